"""The scheduler's input and output as plain data: queued tasks, running groups, devices, and the decision.

Queued tasks and devices are read from and written to the files of recorded queues. Times are seconds on one clock;
which clock is up to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.core.errors import SpecError
from weft.core.plain_data import PlainData

TASK_KINDS = ("training", "inference")


@dataclass(frozen=True, slots=True)
class QueuedTask(PlainData):
    """A task that waits, with what is predicted of it.

    ``bytes`` and ``seconds`` are predicted for the task alone on the device; ``shared_bytes`` is the part of ``bytes``
    that tasks in one stack have once (graph, features), ``common_bytes`` the part of those that stacks of one group
    have once (a GPU's context); ``utilisation`` is the share of the device that the task
    keeps busy when alone, as a mean over ``seconds``; it keeps it busy after ``start_seconds`` of them, in which it is
    built on the host. ``turn_seconds`` is the mean time of its kernels, for which other groups wait; 0 if unknown.
    Tasks with the same non-empty ``join_key`` may be fused into one group if ``fusable``; those of one ``structure``
    are one stack of it.
    ``deadline`` is a time; ``latency_target`` of an inference task is in seconds from its arrival. ``after`` names
    tasks that must be done before. ``attempts`` counts the starts that failed; only a first attempt is fused.
    ``ranks``: of a sharded task, which starts on so many devices at once, or not at all; ``bytes`` and ``utilisation``
    are those of one rank.
    """

    id: str
    bytes: int
    seconds: float
    graph: str = ""
    join_key: str = ""
    structure: str = ""
    fusable: bool = True
    shared_bytes: int = 0
    common_bytes: int = 0
    utilisation: float = 1.0
    arrival: float = 0.0
    user: str = ""
    priority: int = 0
    deadline: float | None = None
    after: tuple[str, ...] = ()
    kind: str = "training"
    latency_target: float | None = None
    attempts: int = 0
    start_seconds: float = 0.0
    turn_seconds: float = 0.0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not self.id:
            raise SpecError("a queued task has no id; give each task a name of its own")
        if self.kind not in TASK_KINDS:
            raise SpecError(f"task {self.id!r}: kind={self.kind!r} must be one of {', '.join(TASK_KINDS)}")
        if self.bytes < 0 or not 0 <= self.shared_bytes <= self.bytes:
            raise SpecError(f"task {self.id!r}: shared_bytes={self.shared_bytes} must be from 0 to bytes={self.bytes}")
        if not 0 <= self.seconds < math.inf:
            raise SpecError(f"task {self.id!r}: seconds={self.seconds} must be a number of at least 0")
        if not 0 <= self.start_seconds <= self.seconds:
            raise SpecError(
                f"task {self.id!r}: start_seconds={self.start_seconds} must be from 0 to seconds={self.seconds}"
            )
        if not 0 <= self.turn_seconds < math.inf:
            raise SpecError(f"task {self.id!r}: turn_seconds={self.turn_seconds} must be a number of at least 0")
        if not 0 <= self.utilisation <= 1:
            raise SpecError(f"task {self.id!r}: utilisation={self.utilisation} must be from 0 to 1")
        if not math.isfinite(self.arrival):
            raise SpecError(f"task {self.id!r}: arrival={self.arrival} must be a finite time")
        if self.latency_target is not None and not 0 < self.latency_target < math.inf:
            raise SpecError(f"task {self.id!r}: latency_target={self.latency_target} must be above 0 seconds")
        if self.ranks < 1 or (self.ranks > 1 and self.kind != "training"):
            raise SpecError(f"task {self.id!r}: ranks={self.ranks} must be at least 1, and 1 of an inference task")
        if self.id in self.after:
            raise SpecError(f"task {self.id!r}: after={list(self.after)} names the task itself; remove it")

    @property
    def work(self) -> float:
        """Seconds of a fully used device, of all ranks together."""
        return self.seconds * self.utilisation * self.ranks

    @property
    def demand(self) -> float:
        """The share of the device that it keeps busy once it has started."""
        after = self.seconds - self.start_seconds
        return min(self.seconds * self.utilisation / after, 1.0) if after > 0 else self.utilisation

    def rest(self, progress: float) -> QueuedTask:
        """The rest of it after ``progress`` seconds: it starts again, and resumes."""
        seconds = max(self.seconds - max(progress - self.start_seconds, 0.0), self.start_seconds)
        if not self.start_seconds:
            return replace(self, seconds=seconds)
        utilisation = self.demand * (seconds - self.start_seconds) / seconds
        return replace(self, seconds=seconds, utilisation=utilisation)

    @property
    def joinable(self) -> bool:
        """Whether it may share a fused group: a sharded task, and one that has failed before, run alone."""
        return self.fusable and bool(self.join_key) and self.attempts == 0 and self.ranks == 1

    @property
    def must_end_by(self) -> float:
        """Its deadline, or when an inference task's answer is due; infinity without either."""
        due = math.inf if self.deadline is None else self.deadline
        return due if self.latency_target is None else min(due, self.arrival + self.latency_target)


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group that a worker runs: its members (task ids), the bytes it holds, and when it is predicted to end.

    ``slowdown_limit`` is how much slower than alone it may run and still meet a latency target; None if it has none.
    ``priority``: the highest of its members. ``leaving``: it was preempted, and saves a checkpoint.
    ``start_seconds``: how long after ``started`` it leaves the device idle; ``utilisation`` is its mean from
    ``started`` to ``ends``; ``turn_seconds`` the mean time of its kernels, 0 if unknown. ``users``: one per member.
    ``devices``: of a sharded task, the device of every rank, each of which holds ``bytes``; empty: ``device`` alone.
    """

    id: str
    device: str
    members: tuple[str, ...]
    bytes: int
    utilisation: float = 1.0
    started: float = 0.0
    ends: float = 0.0
    graph: str = ""
    kind: str = "training"
    slowdown_limit: float | None = None
    priority: int = 0
    leaving: bool = False
    start_seconds: float = 0.0
    turn_seconds: float = 0.0
    users: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The device of every rank."""
        return self.devices or (self.device,)

    def had(self, user: str, total: float, now: float) -> float:
        """Device-seconds that ``user`` has had, of ``total`` with those that this group is yet to take."""
        left = max(self.ends - now, 0.0) * self.utilisation * len(self.places) / max(len(self.members), 1)
        return total - left * self.users.count(user)


@dataclass(frozen=True, slots=True)
class DeviceState(PlainData):
    """A device: its byte budget, the part of it that is reserved for the framework, and how many workers it has.

    ``inference_workers`` of the workers are kept for inference tasks. ``started`` counts the tasks that were started
    on the device so far.
    """

    name: str
    budget_bytes: int
    reserved_bytes: int = 0
    workers: int = 2
    inference_workers: int = 0
    started: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise SpecError(f"device {self.name!r}: workers={self.workers} must be at least 1")
        if not 0 <= self.inference_workers < self.workers:
            raise SpecError(
                f"device {self.name!r}: inference_workers={self.inference_workers} must be at least 0 and below "
                f"workers={self.workers}"
            )
        if not 0 <= self.reserved_bytes < self.budget_bytes:
            raise SpecError(
                f"device {self.name!r}: reserved_bytes={self.reserved_bytes} must be at least 0 and below "
                f"budget_bytes={self.budget_bytes}"
            )

    @property
    def task_bytes(self) -> int:
        """What all groups together may take."""
        return self.budget_bytes - self.reserved_bytes

    @property
    def training_workers(self) -> int:
        """How many trainings it can run at once: its workers less those reserved for inference."""
        return self.workers - self.inference_workers

    @property
    def host(self) -> str:
        """The node of a cluster that it is of; empty on this host. Ranks of one task share a host."""
        return self.name.partition("@")[2]

    def workers_for(self, ranks: int) -> int:
        """Workers whose share of the device is taken by so many ranks of one task: all of them, if it has fewer."""
        return min(ranks, self.training_workers)


@dataclass(frozen=True, slots=True)
class UserShare:
    """What a user has had: device-seconds in all, and when each lane (by its name) was last served.

    A lane is served when one of its tasks is started, and until one that ran is queued again.
    """

    user: str
    device_seconds: float = 0.0
    last_start: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineState:
    """The devices at the time ``now``, and what each user has had of them."""

    devices: tuple[DeviceState, ...]
    now: float = 0.0
    users: tuple[UserShare, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names or len(set(names)) != len(names):
            raise SpecError(f"devices={names} must be at least one, each with a name of its own")

    @property
    def started(self) -> int:
        """Tasks started so far on all devices."""
        return sum(device.started for device in self.devices)


@dataclass(frozen=True, slots=True)
class GroupStart:
    """A group to start: on which device, with how many bytes, which tasks, and why.

    ``bytes`` include the safety threshold. ``seconds`` and ``utilisation`` are predicted for the group alone on the
    device, which it leaves idle for the first ``start_seconds``; ``turn_seconds`` is the mean time of its kernels, 0 if
    unknown. ``devices``: of a sharded task, the device of every rank, ``device`` first; ``bytes`` and ``utilisation``
    are those of one rank.
    """

    device: str
    members: tuple[str, ...]
    bytes: int
    seconds: float
    utilisation: float
    why: str
    start_seconds: float = 0.0
    turn_seconds: float = 0.0
    devices: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The device of every rank."""
        return self.devices or (self.device,)


@dataclass(frozen=True, slots=True)
class QueueDecision:
    """What to do now: groups to start, tasks that wait and why, tasks that can never run and why.

    ``wait`` names the tasks that the policy considered; every other queued task waits for the reason ``rest``.
    ``preempt`` names running groups that save a checkpoint and return to the queue, so that something urgent fits.
    ``again``: when to decide once more though nothing has ended or arrived by then; None: not before.
    """

    start: tuple[GroupStart, ...] = ()
    wait: Mapping[str, str] = field(default_factory=dict)
    refuse: Mapping[str, str] = field(default_factory=dict)
    preempt: tuple[str, ...] = ()
    rest: str = ""
    again: float | None = None

    def reason(self, task: str) -> str:
        """Why ``task``, which is queued and was not started, is not running."""
        return self.refuse.get(task) or self.wait.get(task) or self.rest

    @property
    def started(self) -> tuple[str, ...]:
        """The tasks that start now."""
        return tuple(member for group in self.start for member in group.members)
