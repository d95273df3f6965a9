"""Weft: train many graph neural networks at once, safely and at hardware speed.

>>> import weft
>>> result = weft.run(weft.Task(graph="demo", model="gcn"))
>>> result.metrics["test_accuracy"], result.model
"""

from weft import nn, ops
from weft.core.errors import (
    DivergedError,
    GraphError,
    InputError,
    OutOfMemoryError,
    SpecError,
    TrainingError,
    WeftError,
)
from weft.core.event import Event
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.sampling import choice, loguniform, uniform
from weft.core.spec import read_spec
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.version import __version__
from weft.engine.cancel import Cancel
from weft.engine.planning import plan
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult
from weft.engine.train import run
from weft.graph.catalog import load
from weft.graph.features import SparseFeatures
from weft.graph.graph import Graph
from weft.graph.readers import read as open
from weft.plan.pruning import MedianPruner
from weft.plan.report import PlanReport

# ``run`` and ``plan`` are the functions from here on; ``from weft.run.stack import ...`` still finds the packages.

__all__ = [
    "Cancel",
    "DivergedError",
    "Event",
    "Graph",
    "GraphError",
    "InputError",
    "Machine",
    "MedianPruner",
    "OutOfMemoryError",
    "Plan",
    "PlanReport",
    "Result",
    "SparseFeatures",
    "SpecError",
    "Sweep",
    "SweepResult",
    "Task",
    "TrainingError",
    "WeftError",
    "__version__",
    "choice",
    "load",
    "loguniform",
    "nn",
    "open",
    "ops",
    "plan",
    "read_spec",
    "run",
    "uniform",
]
