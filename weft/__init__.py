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
from weft.core.plan import Plan
from weft.core.spec import read_spec
from weft.core.task import Task
from weft.core.version import __version__
from weft.engine.result import Result
from weft.engine.train import run
from weft.graph.catalog import load
from weft.graph.features import SparseFeatures
from weft.graph.graph import Graph
from weft.graph.readers import read as open

# ``run`` is the function from here on; the package of that name is still imported as ``weft.run.step`` etc.

__all__ = [
    "DivergedError",
    "Event",
    "Graph",
    "GraphError",
    "InputError",
    "OutOfMemoryError",
    "Plan",
    "Result",
    "SparseFeatures",
    "SpecError",
    "Task",
    "TrainingError",
    "WeftError",
    "__version__",
    "load",
    "nn",
    "open",
    "ops",
    "read_spec",
    "run",
]
