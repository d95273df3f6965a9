"""The options of a server, as the command line and tests give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.core.errors import SpecError
from weft.sched.policies import DEFAULT_POLICY, find_policy

MIB = 1 << 20
LEFTOVER_BYTES = 256 * MIB  # that a GPU worker may hold beside graphs between groups; beyond, a model has leaked


@dataclass(frozen=True)
class ServeOptions:
    """``db``: the file of the queue; beside it ``DB.runs/`` with a folder per group, and the workers' logs.

    ``devices``: ``auto``, or names such as ``cpu``, ``cuda:0`` and, of a Ray cluster, ``cpu@NODE``, all GPUs or all
    processors. ``workers``: groups that may run at once on each, ``inference_workers`` of them for inference alone.
    ``budget``: bytes per device for all groups (None: what is free).
    ``models``: import paths that tasks may name. ``graphs``: the folder that paths of graphs are relative to (None:
    no paths). ``downloads``: whether tasks may name graphs that are downloaded. ``quota``: tasks per user that have
    not ended. ``overrun_bytes``: what a CPU worker may hold beyond its group's bytes before its allocations fail.
    ``hang_seconds`` without progress, or ``silent_seconds`` without a heartbeat, end a worker. ``keep_seconds``:
    how long ended tasks stay in the queue (None: for good). ``keep_graphs``: bytes of graphs that each worker keeps
    between groups; ``pool``: in one buffer of that size, with the state of the group. ``reserved``: bytes of the budget
    that no group gets (None: what workers may hold between groups, at most a quarter). ``mps``: whether NVIDIA's
    multi-process service is started for several workers of a GPU.
    """

    db: Path
    devices: tuple[str, ...] = ("auto",)
    workers: int = 1
    inference_workers: int = 0
    policy: str = DEFAULT_POLICY
    budget: int | None = None
    models: tuple[str, ...] = ()
    graphs: Path | None = None
    downloads: bool = False
    quota: int = 10_000
    checkpoint_seconds: float = 30.0
    lease_seconds: float = 30.0
    silent_seconds: float = 60.0
    hang_seconds: float = 900.0
    overrun_bytes: int = 1024 * MIB
    keep_seconds: float | None = None
    keep_graphs: int = 512 * MIB
    reserved: int | None = None
    pool: bool = False
    mps: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        find_policy(self.policy)
        if self.workers < 1:
            raise SpecError(f"workers={self.workers} must be at least 1")
        if not 0 <= self.inference_workers < self.workers:
            raise SpecError(
                f"inference_workers={self.inference_workers} must be at least 0 and below workers={self.workers}"
            )
        if self.keep_graphs < 0:
            raise SpecError(f"keep_graphs={self.keep_graphs} must be at least 0 bytes")
        if self.quota < 1:
            raise SpecError(f"quota={self.quota} must be at least 1 task per user")
        for name in (one.partition("@")[0] for one in self.devices):
            if name not in ("auto", "cpu", "cuda") and not (name.startswith("cuda:") and name[5:].isdigit()):
                raise SpecError(f"device {name!r} must be auto, cpu, cuda or cuda:N")
        if len({name.partition("@")[0].partition(":")[0] for name in self.devices}) > 1:
            told = "bytes and seconds are predicted for devices of one kind; start another server for the other"
            raise SpecError(f"devices {' and '.join(self.devices)}: {told}")

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.db.with_name(self.db.name + ".runs")

    def reserved_of(self, room: int, beside: int = 0) -> int:
        """Bytes of a device with ``room`` bytes that no group gets; ``beside``: what a worker holds besides graphs."""
        return min(self.workers * (self.keep_graphs + beside), room // 4) if self.reserved is None else self.reserved

    def device_names(self) -> tuple[str, ...]:
        """The devices, with ``auto`` resolved to every GPU or the CPU."""
        from weft.engine.base.home import gpu_names

        if "auto" not in self.devices:
            return tuple(dict.fromkeys("cuda:0" if name == "cuda" else name for name in self.devices))
        return tuple(f"cuda:{place}" for place in range(len(gpu_names()))) or ("cpu",)
