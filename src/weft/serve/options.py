"""The options of a server, as the command line and tests give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings import Rule
from weft.sched.policies import DEFAULT_POLICY, find_policy

MIB = 1 << 20
LEFTOVER_BYTES = 256 * MIB  # that a GPU worker may hold besides graphs between groups; beyond, a model has leaked
DAY = 86_400.0
MOST_SECONDS = 4e9  # more than a century; the system's own waits take no more than twice that
ABOVE_0 = Rule(float, above=0, described="a finite number of seconds, above 0")
AT_LEAST_0 = Rule(float, low=0, described="a finite number of seconds, 0 or more")
COUNT = Rule(int, low=0)
RULES = {
    "workers": Rule(int, low=1),
    "inference_workers": COUNT,
    "quota": Rule(int, low=1, described="at least 1 task per user"),
    "max_priority": Rule(int, low=-1000, high=1000, described="a whole number from -1000 to 1000"),
    "time_limit": Rule(float, above=0, optional=True, described=ABOVE_0.described),
    "user_time_limit": Rule(float, above=0, optional=True, described=ABOVE_0.described),
    "budget": Rule(int, low=1, optional=True),
    "reserved": Rule(int, low=0, optional=True),
    "keep_graphs": COUNT,
    "overrun_bytes": COUNT,
    "checkpoint_seconds": AT_LEAST_0,
    "lease_seconds": ABOVE_0,
    "silent_seconds": ABOVE_0,
    "hang_seconds": ABOVE_0,
    "keep_seconds": Rule(float, above=0, optional=True, described=ABOVE_0.described),
    "drain_seconds": AT_LEAST_0,
    "keep_days": Rule(float, above=0, optional=True, described="a finite number of days, above 0"),
}


def check_option(name: str, value: Any) -> None:
    """A :class:`SpecError` for a value that an option of a server cannot have."""
    RULES[name].check("", name, value)
    unit, size = ("days", DAY) if name.endswith("days") else ("seconds", 1.0)
    if name.endswith((unit, "seconds", "time_limit")) and value is not None and value * size > MOST_SECONDS:
        raise SpecError(f"{name}={value} must be at most {MOST_SECONDS / size:,.0f} {unit}")


@dataclass(frozen=True)
class ServeOptions:
    """``db``: the file of the queue; beside it ``DB.runs/`` with a folder per group, and the workers' logs.

    ``devices``: ``auto``, or names such as ``cpu``, ``cuda:0`` and, of a Ray cluster, ``cpu@NODE``, all GPUs or all
    processors. ``workers``: groups that may run at once on each, ``inference_workers`` of them for inference alone.
    ``fuse``: whether the policy trains tasks as one group that can be (None: backfill does, the others do not).
    ``budget``: bytes per device for all groups (None: what is free).
    ``models``: import paths that tasks may name. ``graphs``: the folder that paths of graphs are relative to (None:
    no paths). ``downloads``: whether tasks may name graphs that are downloaded. ``quota``: tasks per user that have
    not ended. ``max_priority``: the highest priority that a user may give; the operator may give any.
    ``time_limit``: seconds that a task may run in all (None: no limit). ``user_time_limit``: running seconds of a
    user's tasks in 24 hours, after which no more of them are started. ``overrun_bytes``: what a CPU worker may hold
    beyond its group's bytes before its allocations fail.
    ``hang_seconds`` without progress, or ``silent_seconds`` without a heartbeat, end a worker. ``keep_seconds``:
    how long ended tasks and their folders are kept (None: for good). ``keep_graphs``: bytes of graphs that each worker
    keeps between groups. ``reserved``: bytes of the budget that no group gets (None: what workers may hold between
    groups, at most a quarter). ``mps``: whether NVIDIA's multi-process service is started for several workers of a GPU.
    """

    db: Path
    devices: tuple[str, ...] = ("auto",)
    workers: int = 1
    inference_workers: int = 0
    policy: str = DEFAULT_POLICY
    fuse: bool | None = None
    budget: int | None = None
    models: tuple[str, ...] = ()
    graphs: Path | None = None
    downloads: bool = False
    quota: int = 10_000
    max_priority: int = 0
    time_limit: float | None = None
    user_time_limit: float | None = None
    checkpoint_seconds: float = 30.0
    lease_seconds: float = 30.0
    silent_seconds: float = 60.0
    hang_seconds: float = 900.0
    overrun_bytes: int = 1024 * MIB
    keep_seconds: float | None = None
    keep_graphs: int = 512 * MIB
    reserved: int | None = None
    mps: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        find_policy(self.policy)
        for name in RULES:
            if hasattr(self, name):
                check_option(name, getattr(self, name))
        if self.inference_workers >= self.workers:
            raise SpecError(
                f"inference_workers={self.inference_workers} must be at least 0 and below workers={self.workers}"
            )
        names = [name.partition("@")[0] for name in self.devices]
        for name in names:
            if name not in ("auto", "cpu", "cuda") and not is_gpu_name(name):
                raise SpecError(f"device {name!r} must be auto, cpu, cuda or cuda:N")
        if len({name.partition(":")[0] for name in names}) > 1:
            reason = "bytes and seconds are predicted for devices of one kind; start another server for the other"
            raise SpecError(f"devices {' and '.join(self.devices)}: {reason}")
        for name in self.models:
            module, _, called = name.rpartition(":")
            if not module or not called:
                raise SpecError(f"allow_model={name!r} must be MODULE:CALLABLE, or MODULE:* for all of a module")
        if self.graphs is not None and not self.graphs.is_dir():
            raise SpecError(f"graphs={str(self.graphs)!r} is not a folder; make it, or name the one with your graphs")

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.db.with_name(self.db.name + ".runs")

    def reserved_of(self, room: int, beside: int = 0) -> int:
        """Bytes of a device with ``room`` bytes that no group gets; ``beside``: what a worker holds besides graphs."""
        return min(self.workers * (self.keep_graphs + beside), room // 4) if self.reserved is None else self.reserved

    def device_names(self) -> tuple[str, ...]:
        """The devices, with ``auto`` resolved to every GPU that CUDA shows, or the CPU."""
        from weft.core.gpus import gpu_names

        if "auto" not in self.devices:
            return tuple(dict.fromkeys("cuda:0" if name == "cuda" else name for name in self.devices))
        return tuple(f"cuda:{index}" for index in range(len(gpu_names()))) or ("cpu",)


def is_gpu_name(name: str) -> bool:
    """Whether ``name`` is ``cuda:N``."""
    number = name.removeprefix("cuda:")
    return name.startswith("cuda:") and number.isascii() and number.isdecimal()
