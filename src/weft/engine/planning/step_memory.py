"""Remember captured steps per graph and structure under ``$WEFT_HOME/steps``, so that a dry run is made once.

A step is found again if its graph's summary, the structure of its tasks, the plan and the kind of device are the same,
and Weft's code and torch are those that captured it. Only built-in models are kept: a user's may change meanwhile.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from weft.core.compatibility import group_key, stack_key, width
from weft.core.files import write_bytes
from weft.core.graph_stats import GraphStats
from weft.core.models import BUILT_IN
from weft.core.plan import Plan
from weft.core.program import Program
from weft.core.task import OWN_FUNCTIONS, Task
from weft.engine.base.code_digest import code_digest
from weft.engine.base.home import STEPS, home
from weft.ops.launch.device_limits import DeviceLimits

MOST_FILES = 256  # of about 20 KB; the oldest go
PLAN_FIELDS = ("join", "device", "replay", "first_layer", "row_order", "mode", "stacks", "places", "division")


@dataclass(frozen=True)
class Steps:
    """A captured group: one epoch, what is done once before, the parameters of every member, and their shapes.

    ``kernels``: digests of the versions of Weft's kernels that it launches on a GPU. ``notes``: remarks of the dry run
    of users' modules.
    """

    step: Program
    preparation: Program | None
    parameters: tuple[int, ...]
    weights: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Steps:
        """The inverse of :meth:`to_dict`."""
        programs = Program.from_dict(data["step"]), Program.from_dict(data["preparation"])
        return cls(*programs, tuple(data["parameters"]), tuple(data["weights"]), tuple(data["kernels"]))


def remembered(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Steps | None:
    """The step of ``tasks`` as an earlier dry run captured it; None if there was none, or it cannot be read."""
    path = _path(tasks, stats, plan, limits)
    if path is None:
        return None
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=8)
def _read(path: Path, written: int) -> Steps:  # a run asks twice, and another of the same kind again
    return Steps.from_dict(json.loads(gzip.decompress(path.read_bytes())))


def remember(steps: Steps, tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> None:
    """Keep the step for later plans; a failure to do so is ignored."""
    path = _path(tasks, stats, plan, limits)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, gzip.compress(json.dumps(steps.to_dict()).encode(), 1))
        _forget_oldest(path.parent)


def _path(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Path | None:
    """Where the step is kept; None if it must not be."""
    named = all(task.traits is not None and task.traits is BUILT_IN.get(task.model_name) for task in tasks)
    if not named or any(task.model_args for task in tasks):
        return None
    if any(task.has_own(name) for task in tasks for name in OWN_FUNCTIONS):  # which may change under one name
        return None
    about = {
        "code": code_digest(),
        "graph": stats.fingerprint().digest,
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "limits": None if limits is None else asdict(limits),
        "tasks": [_structure(task, stats) for task in tasks],
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    return home() / STEPS / f"{digest[:32]}.json.gz"


def _structure(task: Task, stats: GraphStats) -> list[Any]:
    """Equal for tasks whose steps differ in numbers alone."""
    treatment = group_key(task, stats.multilabel)[1:]  # the graph itself is there by its summary
    return [treatment, sorted(stack_key(task).items()), width(task), task.epochs, switches(task)]


def switches(task: Task) -> tuple[bool, ...]:
    """Numbers that leave operators out when they are zero."""
    attention = task.dropout if task.attention_dropout is None else task.attention_dropout
    return (task.dropout > 0, attention > 0, task.weight_decay > 0, task.label_smoothing > 0, task.patience is None)


def _forget_oldest(folder: Path) -> None:
    kept = sorted(folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[MOST_FILES:]:
        path.unlink(missing_ok=True)
