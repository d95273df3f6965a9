"""Weft: train many graph neural networks at once, safely and at hardware speed.

>>> import weft
>>> result = weft.run(weft.Task(graph="demo", model="gcn"))
>>> result.metrics["test_accuracy"], result.model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.core.startup import lazy_names
from weft.core.version import __version__ as __version__

if TYPE_CHECKING:
    from weft import nn as nn
    from weft import ops as ops
    from weft.batches.neighbor_loader import NeighborLoader as NeighborLoader
    from weft.core.errors import DivergedError as DivergedError
    from weft.core.errors import GraphError as GraphError
    from weft.core.errors import InputError as InputError
    from weft.core.errors import OutOfMemoryError as OutOfMemoryError
    from weft.core.errors import SpecError as SpecError
    from weft.core.errors import TrainingError as TrainingError
    from weft.core.errors import WeftError as WeftError
    from weft.core.event import Event as Event
    from weft.core.machine import Machine as Machine
    from weft.core.plan import Plan as Plan
    from weft.core.run_options import Placement as Placement
    from weft.core.run_options import RunOptions as RunOptions
    from weft.core.search_space import choice as choice
    from weft.core.search_space import loguniform as loguniform
    from weft.core.search_space import uniform as uniform
    from weft.core.settings import Callback as Callback
    from weft.core.settings import CallbackContext as CallbackContext
    from weft.core.sweep import Sweep as Sweep
    from weft.core.task import Task as Task
    from weft.engine.control import Control as Control
    from weft.engine.estimate import estimate as estimate
    from weft.engine.loading import read as read
    from weft.engine.plan import plan as plan
    from weft.engine.result import Result as Result
    from weft.engine.run import run as run
    from weft.engine.scikit import WeftClassifier as WeftClassifier
    from weft.engine.scikit import WeftRegressor as WeftRegressor
    from weft.engine.sweep_result import SweepResult as SweepResult
    from weft.graph.catalog.names import load as load
    from weft.graph.graph import Graph as Graph
    from weft.graph.sparse_features import SparseFeatures as SparseFeatures
    from weft.planner.pruning import MedianPruner as MedianPruner
    from weft.planner.report.plan_report import PlanReport as PlanReport
    from weft.planner.tuning import Tuner as Tuner
    from weft.serve.client import Client as Client

# The public names of every module, imported when a name is first used: torch takes seconds to load, and
# ``weft --help`` answers at once.
_MODULES = {
    "weft.batches.neighbor_loader": ("NeighborLoader",),
    "weft.core.errors": (
        "DivergedError",
        "GraphError",
        "InputError",
        "OutOfMemoryError",
        "SpecError",
        "TrainingError",
        "WeftError",
    ),
    "weft.core.event": ("Event",),
    "weft.core.machine": ("Machine",),
    "weft.core.plan": ("Plan",),
    "weft.core.run_options": ("Placement", "RunOptions"),
    "weft.core.search_space": ("choice", "loguniform", "uniform"),
    "weft.core.settings": ("Callback", "CallbackContext"),
    "weft.core.sweep": ("Sweep",),
    "weft.core.task": ("Task",),
    "weft.engine.control": ("Control",),
    "weft.engine.estimate": ("estimate",),
    "weft.engine.loading": ("read",),
    "weft.engine.plan": ("plan",),
    "weft.engine.result": ("Result",),
    "weft.engine.run": ("run",),
    "weft.engine.scikit": ("WeftClassifier", "WeftRegressor"),
    "weft.engine.sweep_result": ("SweepResult",),
    "weft.graph.catalog.names": ("load",),
    "weft.graph.graph": ("Graph",),
    "weft.graph.sparse_features": ("SparseFeatures",),
    "weft.planner.pruning": ("MedianPruner",),
    "weft.planner.report.plan_report": ("PlanReport",),
    "weft.planner.tuning": ("Tuner",),
    "weft.serve.client": ("Client",),
}
_PACKAGES = ("nn", "ops")
_find, __dir__, _names = lazy_names(__name__, _MODULES)
__all__ = [*_names, "__version__", *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"weft.{name}")
    return _find(name)
