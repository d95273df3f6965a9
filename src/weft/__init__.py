"""Weft: train many graph neural networks at once, safely and at hardware speed.

>>> import weft
>>> result = weft.run(weft.Task(graph="demo", model="gcn"))
>>> result.metrics["test_accuracy"], result.model
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.core.startup import gc_paused
from weft.core.version import __version__

if TYPE_CHECKING:
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
    from weft.core.search_space import choice, loguniform, uniform
    from weft.core.settings import Callback, Moment
    from weft.core.spec_file import read_spec
    from weft.core.sweep import Sweep
    from weft.core.task import Task
    from weft.engine.control import Cancel, Control
    from weft.engine.loading import load_result
    from weft.engine.plan import plan, read_plan
    from weft.engine.result import Result
    from weft.engine.run import run
    from weft.engine.sweep_result import SweepResult
    from weft.graph.catalog.names import load
    from weft.graph.graph import Graph
    from weft.graph.readers import read as open
    from weft.graph.sparse_features import SparseFeatures
    from weft.planner.pruning import MedianPruner
    from weft.planner.report.plan_report import PlanReport
    from weft.serve.client import Client

# Where every public name is found when it is first asked for: torch takes seconds to load, and ``weft --help`` is to
# answer at once.
_PLACES = {
    "Callback": ("weft.core.settings", "Callback"),
    "Cancel": ("weft.engine.control", "Cancel"),
    "Client": ("weft.serve.client", "Client"),
    "Control": ("weft.engine.control", "Control"),
    "DivergedError": ("weft.core.errors", "DivergedError"),
    "Event": ("weft.core.event", "Event"),
    "Graph": ("weft.graph.graph", "Graph"),
    "GraphError": ("weft.core.errors", "GraphError"),
    "InputError": ("weft.core.errors", "InputError"),
    "Machine": ("weft.core.machine", "Machine"),
    "MedianPruner": ("weft.planner.pruning", "MedianPruner"),
    "Moment": ("weft.core.settings", "Moment"),
    "OutOfMemoryError": ("weft.core.errors", "OutOfMemoryError"),
    "Plan": ("weft.core.plan", "Plan"),
    "PlanReport": ("weft.planner.report.plan_report", "PlanReport"),
    "Result": ("weft.engine.result", "Result"),
    "SparseFeatures": ("weft.graph.sparse_features", "SparseFeatures"),
    "SpecError": ("weft.core.errors", "SpecError"),
    "Sweep": ("weft.core.sweep", "Sweep"),
    "SweepResult": ("weft.engine.sweep_result", "SweepResult"),
    "Task": ("weft.core.task", "Task"),
    "TrainingError": ("weft.core.errors", "TrainingError"),
    "WeftError": ("weft.core.errors", "WeftError"),
    "choice": ("weft.core.search_space", "choice"),
    "load": ("weft.graph.catalog.names", "load"),
    "load_result": ("weft.engine.loading", "load_result"),
    "loguniform": ("weft.core.search_space", "loguniform"),
    "open": ("weft.graph.readers", "read"),
    "plan": ("weft.engine.plan", "plan"),
    "read_plan": ("weft.engine.plan", "read_plan"),
    "read_spec": ("weft.core.spec_file", "read_spec"),
    "run": ("weft.engine.run", "run"),
    "uniform": ("weft.core.search_space", "uniform"),
}
_PACKAGES = ("nn", "ops")

__all__ = [
    "Callback",
    "Cancel",
    "Client",
    "Control",
    "DivergedError",
    "Event",
    "Graph",
    "GraphError",
    "InputError",
    "Machine",
    "MedianPruner",
    "Moment",
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
    "load_result",
    "loguniform",
    "nn",
    "open",
    "ops",
    "plan",
    "read_plan",
    "read_spec",
    "run",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"weft.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    place, attribute = _PLACES[name]
    with gc_paused():
        found = getattr(import_module(place), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``weft.run`` and ``weft.plan`` are functions, whichever modules of the packages so called were imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PLACES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
