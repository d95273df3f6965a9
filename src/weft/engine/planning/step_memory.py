"""Remember captured steps per graph and structure under ``$WEFT_HOME/steps``, so that a dry run is made once.

A step is found again if its graph's summary, the structure of its tasks, the plan and the kind of device are the same,
and Weft's code and torch are those that captured it. Only built-in models are kept: a user's may change meanwhile.

The kernels that a step launches are kept beside it, in a file of their own that serves any number of epochs: the step
has histories as long as the training, but no version of a kernel depends on that. A training that is as long as none
before thus needs no dry run to know its kernels.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
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

STEP, KERNELS = ".json.gz", ".kernels.json"  # how names of files end
MOST_FILES = 1024  # of each kind, about 20 KB for a step; the oldest go
SPARE_FILES = 64  # beyond that, before some go: files are dated once in so many writes, else only counted
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
    if not _may_be_kept(tasks):
        return None
    path = _step_path(tasks, stats, plan, limits)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=8)
def _read(path: Path, written: int) -> Steps:  # a run asks twice, and another of the same kind again
    return Steps.from_dict(json.loads(gzip.decompress(path.read_bytes())))


def remembered_kernels(
    tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None
) -> tuple[str, ...] | None:
    """Digests of the kernels that ``tasks`` launch, by an earlier dry run with any number of epochs; None if not known.

    A list that lacked one would do no harm: launches compile what they lack.
    """
    if not _may_be_kept(tasks):
        return None
    try:
        found = json.loads(_kernels_path(tasks, stats, plan, limits).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tuple(map(str, found)) if isinstance(found, list) else None


def remember(steps: Steps, tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> None:
    """Keep the step for later plans, and the list of its kernels; a failure to do so is ignored."""
    if not _may_be_kept(tasks):
        return
    _keep(_step_path(tasks, stats, plan, limits), gzip.compress(json.dumps(steps.to_dict()).encode(), 1))
    if steps.kernels:
        _keep(_kernels_path(tasks, stats, plan, limits), json.dumps(steps.kernels).encode())


def _may_be_kept(tasks: Sequence[Task]) -> bool:
    """Whether all models are built in and no function is the user's own: those may change under one name."""
    named = all(task.traits is not None and task.traits is BUILT_IN.get(task.model_name) for task in tasks)
    own = any(task.has_own(name) for task in tasks for name in OWN_FUNCTIONS)
    return named and not own and not any(task.model_args for task in tasks)


def _keep(path: Path, data: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
        _forget_oldest(path)


def _step_path(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Path:
    epochs = [task.epochs for task in tasks]
    return home() / STEPS / f"{_digest(tasks, stats, plan, limits, epochs)}{STEP}"


def _kernels_path(tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None) -> Path:
    # Launches that are merged into one have a version of their own for lengths that are divisible by 16.
    epochs = [task.epochs for task in tasks] if plan.join == "woven" else []
    return home() / STEPS / f"{_digest(tasks, stats, plan, limits, epochs)}{KERNELS}"


def _digest(
    tasks: Sequence[Task], stats: GraphStats, plan: Plan, limits: DeviceLimits | None, epochs: Sequence[int]
) -> str:
    about = {
        "code": code_digest(),
        "graph": stats.fingerprint().digest,
        "plan": {name: getattr(plan, name) for name in PLAN_FIELDS},
        "limits": None if limits is None else asdict(limits),
        "tasks": [_structure(task, stats) for task in tasks],
        "epochs": epochs,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _structure(task: Task, stats: GraphStats) -> list[Any]:
    """Equal for tasks whose steps differ in numbers alone, and in the length of their histories."""
    treatment = group_key(task, stats.multilabel)[1:]  # the graph itself is there by its summary
    return [treatment, sorted(stack_key(task).items()), width(task), switches(task)]


def switches(task: Task) -> tuple[bool, ...]:
    """Numbers that leave operators out when they are zero."""
    attention = task.dropout if task.attention_dropout is None else task.attention_dropout
    return (task.dropout > 0, attention > 0, task.weight_decay > 0, task.label_smoothing > 0, task.patience is None)


def _forget_oldest(new: Path) -> None:
    """Remove the oldest files of the kind of ``new``, once there are clearly too many of them."""
    folder, ending = new.parent, new.name[new.name.index(".") :]
    alike = [folder / name for name in os.listdir(folder) if name.endswith(ending)]
    if len(alike) <= MOST_FILES + SPARE_FILES:
        return
    for path in sorted(alike, key=lambda path: path.stat().st_mtime, reverse=True)[MOST_FILES:]:
        path.unlink(missing_ok=True)
