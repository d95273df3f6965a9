"""Weft: train many graph neural networks at once, safely and at hardware speed.

>>> import weft
>>> result = weft.run(weft.Task(graph="demo", model="gcn"))
>>> result.metrics["test_accuracy"], result.model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.core.startup import lazy_names
from weft.core.version import __version__

if TYPE_CHECKING:
    from weft import nn, ops
    from weft.batches.neighbor_loader import NeighborLoader
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
    from weft.core.run_options import Placement, RunOptions
    from weft.core.search_space import choice, loguniform, uniform
    from weft.core.settings import Callback, CallbackContext
    from weft.core.sweep import Sweep
    from weft.core.task import Task
    from weft.engine.control import Control
    from weft.engine.estimate import estimate
    from weft.engine.loading import read
    from weft.engine.plan import plan
    from weft.engine.result import Result
    from weft.engine.run import run
    from weft.engine.scikit import WeftClassifier, WeftRegressor
    from weft.engine.sweep_result import SweepResult
    from weft.graph.catalog.names import load
    from weft.graph.graph import Graph
    from weft.graph.sparse_features import SparseFeatures
    from weft.planner.pruning import MedianPruner
    from weft.planner.report.plan_report import PlanReport
    from weft.planner.tuning import Tuner
    from weft.serve.client import Client

# The module of every public name, imported when the name is first used: torch takes seconds to load, and
# ``weft --help`` answers at once.
_MODULES = {
    "Callback": "weft.core.settings",
    "CallbackContext": "weft.core.settings",
    "Client": "weft.serve.client",
    "Control": "weft.engine.control",
    "DivergedError": "weft.core.errors",
    "Event": "weft.core.event",
    "Graph": "weft.graph.graph",
    "GraphError": "weft.core.errors",
    "InputError": "weft.core.errors",
    "Machine": "weft.core.machine",
    "MedianPruner": "weft.planner.pruning",
    "NeighborLoader": "weft.batches.neighbor_loader",
    "OutOfMemoryError": "weft.core.errors",
    "Placement": "weft.core.run_options",
    "Plan": "weft.core.plan",
    "PlanReport": "weft.planner.report.plan_report",
    "Result": "weft.engine.result",
    "RunOptions": "weft.core.run_options",
    "SparseFeatures": "weft.graph.sparse_features",
    "SpecError": "weft.core.errors",
    "Sweep": "weft.core.sweep",
    "SweepResult": "weft.engine.sweep_result",
    "Task": "weft.core.task",
    "TrainingError": "weft.core.errors",
    "Tuner": "weft.planner.tuning",
    "WeftClassifier": "weft.engine.scikit",
    "WeftError": "weft.core.errors",
    "WeftRegressor": "weft.engine.scikit",
    "choice": "weft.core.search_space",
    "estimate": "weft.engine.estimate",
    "load": "weft.graph.catalog.names",
    "loguniform": "weft.core.search_space",
    "plan": "weft.engine.plan",
    "read": "weft.engine.loading",
    "run": "weft.engine.run",
    "uniform": "weft.core.search_space",
}
_PACKAGES = ("nn", "ops")

__all__ = [
    "Callback",
    "CallbackContext",
    "Client",
    "Control",
    "DivergedError",
    "Event",
    "Graph",
    "GraphError",
    "InputError",
    "Machine",
    "MedianPruner",
    "NeighborLoader",
    "OutOfMemoryError",
    "Placement",
    "Plan",
    "PlanReport",
    "Result",
    "RunOptions",
    "SparseFeatures",
    "SpecError",
    "Sweep",
    "SweepResult",
    "Task",
    "TrainingError",
    "Tuner",
    "WeftClassifier",
    "WeftError",
    "WeftRegressor",
    "__version__",
    "choice",
    "estimate",
    "load",
    "loguniform",
    "nn",
    "ops",
    "plan",
    "read",
    "run",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"weft.{name}")
    return _find(name)


_find, __dir__ = lazy_names(__name__, _MODULES)
