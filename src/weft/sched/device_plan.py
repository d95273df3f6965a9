"""Track what one device can still take during a decision: workers, bytes, latency targets, a reservation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from weft.sched.admission import lacks_bytes, needed_bytes
from weft.sched.interference import Interference, Load
from weft.sched.queue_state import DeviceState, QueuedTask, RunningGroup

# ---- From when on a group pays beside those that run: once it has started, the device should be about to be free.
#
# A start is work of the host and leaves the device idle; two trainings that each fill the device only slow each other
# down. So the next one starts while the one before still trains, as late as its start allows.

GAIN = 1.02  # sharing must raise the throughput by this factor; estimates are not exact enough to act on less
TOLERATED = 0.5  # of its start: as long may a group train beside others that leave it no room
SHORT = 2.0  # a group is short if it delays others by less than its wait would be over this
LATE = 0.3  # a group that should have ended takes so much longer again as it is late
MOMENT = 1e-6


@dataclass(frozen=True)
class Training:
    """The time in which a group keeps the device busy: from its start's end to its own, with a share ``asks``."""

    begins: float
    ends: float
    asks: Load

    @classmethod
    def of(cls, started: float, seconds: float, start_seconds: float, demand: float, turn: float = 0.0) -> Training:
        """Of a group that is started at ``started`` and takes ``seconds``, with a mean ``demand`` over all of them."""
        training = seconds - start_seconds
        asks = demand * seconds / training if training > 0 else demand
        return cls(started + start_seconds, started + seconds, Load(asks, turn))

    def until(self, now: float) -> float:
        """When it is expected to end, now that it runs still."""
        return max(self.ends, now + LATE * (now - self.ends))


def pays_from(group: Training, others: Sequence[Training], now: float, model: Interference) -> float:
    """From when on it pays to start ``group``, were it to start ``now``; ``now`` if it does already."""
    beside = [(one, _together(group, one, now)) for one in others]
    beside = [(one, seconds) for one, seconds in beside if seconds > 0]
    asked, start_seconds = [one.asks for one, _ in beside], group.begins - now
    if model.throughput([*asked, group.asks]) >= GAIN * model.throughput(asked):
        return now
    if sum(seconds for _, seconds in beside) <= TOLERATED * start_seconds:
        return now
    wait = min(one.until(now) for one, _ in beside) - start_seconds - now
    delayed = (group.ends - group.begins) * group.asks.demand * len(others)
    return now if SHORT * delayed < wait or wait < MOMENT else now + wait


def _together(group: Training, other: Training, now: float) -> float:
    """Seconds for which both would train."""
    return min(group.ends, other.until(now)) - max(group.begins, other.begins)


@dataclass(frozen=True)
class Footprint:
    """What a group would take: bytes with the safety margin, seconds alone, demand, and whether it is inference.

    It asks nothing of the device for ``start_seconds``; ``demand`` is a mean over all ``seconds``, ``turn_seconds`` one
    over its kernels. ``asked``: what the members of a fused group ask together, each as fast as alone; beyond 1 they
    slow each other down, and ``seconds`` are as much longer.
    """

    bytes: int
    seconds: float
    demand: float
    inference: bool = False
    slowdown_limit: float | None = None
    start_seconds: float = 0.0
    turn_seconds: float = 0.0
    asked: float = 0.0

    @property
    def load(self) -> Load:
        """What it asks of the device."""
        return Load(max(self.asked, self.demand), self.turn_seconds)


@dataclass
class _Occupant:
    bytes: int
    load: Load
    ends: float
    inference: bool
    slowdown_limit: float | None
    training: Training
    id: str = ""  # of a running group


@dataclass
class DevicePlan:
    """The groups on a device, running or about to start, and what is set aside for the first task that waits.

    ``promised``: a group for which others leave, and the device as it is without them.
    """

    device: DeviceState
    now: float
    model: Interference
    occupants: list[_Occupant] = field(default_factory=list)
    free: int = 0
    reserved_from: float | None = None
    reserved_spare: int = 0
    promised: tuple[Footprint, DevicePlan] | None = None

    @classmethod
    def of(cls, device: DeviceState, running: Sequence[RunningGroup], now: float, model: Interference) -> DevicePlan:
        """The plan before anything new starts."""
        here = [group for group in running if group.device == device.name]
        occupants = [
            _Occupant(g.bytes, Load(g.utilisation, g.turn_seconds), g.ends, g.kind == "inference", g.slowdown_limit,
                      Training.of(g.started, g.ends - g.started, g.start_seconds, g.utilisation, g.turn_seconds), g.id)
            for g in here
        ]  # fmt: skip
        return cls(device, now, model, occupants, device.task_bytes - sum(one.bytes for one in occupants))

    @property
    def demand(self) -> float:
        """The demand of all groups on the device."""
        return sum(one.load.demand for one in self.occupants)

    @property
    def busy_seconds(self) -> float:
        """Until the last of its groups is predicted to end."""
        return max((one.ends - self.now for one in self.occupants), default=0.0)

    def has_worker(self, inference: bool) -> bool:
        """Whether a worker is free for a group of that kind."""
        return self._has_worker_beside(self.occupants, inference)

    def _has_worker_beside(self, others: Sequence[_Occupant], inference: bool) -> bool:
        if len(others) >= self.device.workers:
            return False
        return inference or sum(not one.inference for one in others) < training_workers(self.device)

    def refuses(self, group: Footprint) -> str:
        """Why ``group`` cannot start here now; empty if it can."""
        if not self.has_worker(group.inference):
            return f"waits for a free worker of {self.device.name}"
        if group.bytes > self.free:
            return lacks_bytes(group.bytes, self.free, self.device.name)
        return self._delays_reservation(group) or self._harms_latency(group) or self._takes_promised(group)

    def takes(self, group: Footprint) -> bool:
        """Whether ``group`` can start here now, and it pays."""
        return not self.refuses(group) and self.pays_from(group) <= self.now

    def slowdown_of(self, group: Footprint) -> float:
        """How much slower than alone on the device ``group`` would run beside the others."""
        beside = self.model.slowdown(group.load, [one.load for one in self.occupants])
        return beside / self.model.slowdown(group.load, [])

    def pays_from(self, group: Footprint) -> float:
        """From when on it pays to start ``group`` beside the others; ``now`` if it does already."""
        if not self.occupants or group.inference:
            return self.now
        return pays_from(self._training_of(group), [one.training for one in self.occupants], self.now, self.model)

    def _training_of(self, group: Footprint) -> Training:
        return Training.of(self.now, group.seconds, group.start_seconds, group.demand, group.turn_seconds)

    def start(self, group: Footprint) -> None:
        """Count ``group`` as running."""
        ends = self._end_of(group)
        if self.reserved_from is not None and ends > self.reserved_from:
            self.reserved_spare -= group.bytes
        self.free -= group.bytes
        about = group.inference, group.slowdown_limit, self._training_of(group)
        self.occupants.append(_Occupant(group.bytes, group.load, ends, *about))
        if self.promised is not None:
            self.promised[1].start(group)

    def without(self, groups: Collection[str]) -> DevicePlan:
        """The plan once the running ``groups`` have left; what is set aside stays so."""
        gone = [one for one in self.occupants if one.id in groups]
        kept = [one for one in self.occupants if one.id not in groups]
        later = sum(one.bytes for one in gone if self.reserved_from is not None and one.ends > self.reserved_from)
        free, spare = self.free + sum(one.bytes for one in gone), self.reserved_spare + later
        return replace(self, occupants=kept, free=free, reserved_spare=spare, promised=None)

    def promise(self, group: Footprint, leaving: Collection[str]) -> None:
        """Keep the place that ``leaving`` groups make for ``group``: nothing starts here after which it could not."""
        self.promised = group, self.without(leaving)

    def fits_from(self, group: Footprint) -> float | None:
        """When its bytes and a worker for it are predicted to be free; None if the device is too small."""
        free, time = self.free, self.now
        left = sorted(self.occupants, key=lambda one: -one.ends)
        while left and (group.bytes > free or not self._has_worker_beside(left, group.inference)):
            one = left.pop()
            free, time = free + one.bytes, max(one.ends, self.now)
        return time if group.bytes <= free else None

    def reserve(self, needed: int, start: float) -> None:
        """Keep ``needed`` bytes from ``start`` on: others may use them only if they end before."""
        released = sum(one.bytes for one in self.occupants if one.ends <= start)
        self.reserved_from, self.reserved_spare = start, self.free + released - needed

    def _end_of(self, group: Footprint) -> float:
        return self.now + group.seconds * self.slowdown_of(group)

    def _delays_reservation(self, group: Footprint) -> str:
        if (
            self.reserved_from is None
            or group.bytes <= self.reserved_spare
            or self._end_of(group) <= self.reserved_from
        ):
            return ""
        return f"would delay a task that waits for memory of {self.device.name}"

    def _takes_promised(self, group: Footprint) -> str:
        if self.promised is None:
            return ""
        wanted, then = self.promised
        then = then.without(())
        then.start(group)
        return "" if then.takes(wanted) else f"would take the place that others make on {self.device.name}"

    def _harms_latency(self, group: Footprint) -> str:
        if all(one.slowdown_limit is None for one in self.occupants):
            return ""
        loads = [one.load for one in self.occupants]
        before, after = self.model.slowdowns(loads), self.model.slowdowns([*loads, group.load])
        for one, now, then in zip(self.occupants, before, after, strict=False):
            if one.slowdown_limit is not None and then > max(one.slowdown_limit, now):
                return f"would make an inference task on {self.device.name} miss its latency target"
        return ""


def training_workers(device: DeviceState) -> int:
    """How many trainings a device can run at once: its workers less those that are kept for inference."""
    return device.workers - device.inference_workers


def slowdown_limit(task: QueuedTask, now: float) -> float | None:
    """How much slower than alone an inference task may run from ``now`` on; None without a latency target."""
    if task.latency_target is None:
        return None
    return max((task.must_end_by - now) / max(task.seconds, 1e-9), 1.0)


# ---- A fused group being formed: its cost, updated per member.


@dataclass
class GroupDraft:
    """The members so far, and the sums that the group's footprint is made from."""

    safety: float
    model: Interference
    members: list[QueuedTask] = field(default_factory=list)
    shared_bytes: int = 0
    own_bytes: int = 0
    longest: float = 0.0
    work: float = 0.0
    utilisation: float = 0.0
    start_seconds: float = 0.0

    def add(self, task: QueuedTask) -> None:
        """Let ``task`` join."""
        self.members.append(task)
        self.shared_bytes = max(self.shared_bytes, task.shared_bytes)
        self.own_bytes = max(self.own_bytes, task.bytes - task.shared_bytes)
        self.longest = max(self.longest, task.seconds)
        self.work += task.work
        self.utilisation += task.utilisation
        self.start_seconds = max(self.start_seconds, task.start_seconds)

    def footprint(self, now: float) -> Footprint:
        """What the group takes as it is."""
        total = self.shared_bytes + len(self.members) * self.own_bytes
        return self._footprint(total, self.longest, self.work, self.utilisation, 0, now)

    def with_one_more(self, task: QueuedTask, now: float) -> Footprint:
        """What the group would take with ``task`` as well."""
        own = max(self.own_bytes, task.bytes - task.shared_bytes)  # narrower members are padded to the widest
        total = max(self.shared_bytes, task.shared_bytes) + (len(self.members) + 1) * own
        longest, demand = max(self.longest, task.seconds), self.utilisation + task.utilisation
        return self._footprint(total, longest, self.work + task.work, demand, 1, now)

    def _footprint(
        self, total: int, longest: float, work: float, utilisation: float, more: int, now: float
    ) -> Footprint:
        first, start_seconds = self.members[0], self.start_seconds
        seconds, demand, asked = longest, utilisation, utilisation
        if len(self.members) + more > 1:
            seconds, demand = fused_cost(longest, start_seconds, work, self.model)
            asked = utilisation * self.model.fused_work
        return Footprint(
            bytes=needed_bytes(total, self.safety),
            seconds=seconds,
            demand=demand,
            asked=asked,
            inference=first.kind == "inference",
            slowdown_limit=slowdown_limit(first, now),
            start_seconds=start_seconds,
            turn_seconds=first.turn_seconds,
        )


def fused_cost(longest: float, start_seconds: float, work: float, model: Interference) -> tuple[float, float]:
    """Seconds of a fused group alone on the device, and the share of it that it keeps busy, as a mean over them.

    ``longest``: seconds of its longest member. ``work``: of its members alone, in seconds of a fully used device.
    """
    busy = work * model.fused_work
    seconds = max(longest, start_seconds + busy)
    return seconds, busy / seconds if seconds > 0 else 0.0
