"""Track what one device can still take during a decision: workers, bytes, latency targets, a reservation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from weft.core.units import show_bytes
from weft.sched.admission import needed_bytes
from weft.sched.interference import DeviceLoad, Interference
from weft.sched.queue_state import DeviceState, GroupStart, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue

# A start is work of the host and leaves the device idle; two trainings that each fill the device only slow each other
# down. So the next one starts while the one before still trains, as late as its start allows: tasks of CoGNN's five
# queues completed on average 1.03 to 1.24 times as early as with its policy LMCF (H200, three runs).
MIN_GAIN = 1.02  # sharing must raise the throughput by this factor; estimates are not exact enough to act on less
TOLERATED_OVERLAP = 0.5  # of its start: so long may a group train concurrently without room on the device
SHORT_FACTOR = 2.0  # a group is short if it delays running groups by less than its wait over this factor
LATE_SHARE = 0.3  # a group that should have ended takes longer by this share of its lateness
MOMENT = 1e-6


@dataclass(frozen=True)
class TrainingSpan:
    """The time in which a group keeps the device busy, from the end of its start to its own end, and its load."""

    begins: float
    ends: float
    load: DeviceLoad

    def expected_end(self, now: float) -> float:
        """When it ends, given that it still runs ``now``."""
        return max(self.ends, now + LATE_SHARE * (now - self.ends))


@dataclass(frozen=True)
class Footprint:
    """What a group would take: bytes with the safety margin, seconds alone, demand, and whether it is inference.

    It leaves the device idle for ``start_seconds``; ``demand`` is a mean over all ``seconds``, ``turn_seconds`` over
    its kernels. ``summed_demand``: of the members of a fused group, each as fast as alone; beyond 1 they slow each
    other down, and ``seconds`` are as much longer. ``workers``: whose share of the device it takes, several if it is
    some ranks of a sharded task.
    """

    bytes: int
    seconds: float
    demand: float
    inference: bool = False
    slowdown_limit: float | None = None
    start_seconds: float = 0.0
    turn_seconds: float = 0.0
    summed_demand: float = 0.0
    workers: int = 1

    def of_ranks(self, count: int, device: DeviceState) -> Footprint:
        """What so many ranks take on ``device``, if this is what one takes."""
        if count == 1:
            return self
        return replace(
            self,
            bytes=count * self.bytes,
            demand=count * self.demand,
            summed_demand=count * self.summed_demand,
            workers=device.workers_for(count),
        )

    @property
    def load(self) -> DeviceLoad:
        """How it uses the device."""
        return DeviceLoad(max(self.summed_demand, self.demand), self.turn_seconds)

    def span(self, started: float) -> TrainingSpan:
        """When it trains, started at ``started``; its mean demand falls into that time."""
        training = self.seconds - self.start_seconds
        load = self.demand * self.seconds / training if training > 0 else self.demand
        return TrainingSpan(started + self.start_seconds, started + self.seconds, DeviceLoad(load, self.turn_seconds))


@dataclass
class Occupant:
    """A group on a device: when it was started and is predicted to end; ``id`` of one that runs already."""

    group: Footprint
    started: float
    ends: float
    id: str = ""


@dataclass
class DevicePlan:
    """The groups on a device, running or about to start, and what is set aside for the first task that waits.

    ``promised``: a group for which running ones are evicted, and the device as it is without them. ``reserved_all``:
    the device is set aside for ranks of a sharded task, next to which no other training starts that ends later.
    """

    device: DeviceState
    now: float
    model: Interference
    occupants: list[Occupant] = field(default_factory=list)
    free: int = 0
    reserved_from: float | None = None
    reserved_spare: int = 0
    reserved_all: bool = False
    promised: tuple[Footprint, DevicePlan] | None = None

    @classmethod
    def of(cls, device: DeviceState, running: Sequence[RunningGroup], now: float, model: Interference) -> DevicePlan:
        """The plan before anything new starts."""
        occupants = []
        for each in (each for each in running if device.name in each.places):
            one = Footprint(
                bytes=each.bytes,
                seconds=each.ends - each.started,
                demand=each.utilisation,
                inference=each.kind == "inference",
                slowdown_limit=each.slowdown_limit,
                start_seconds=each.start_seconds,
                turn_seconds=each.turn_seconds,
            )
            group = one.of_ranks(each.places.count(device.name), device)
            occupants.append(Occupant(group, each.started, each.ends, each.id))
        return cls(device, now, model, occupants, device.task_bytes - sum(each.group.bytes for each in occupants))

    @property
    def demand(self) -> float:
        """The demand of all groups on the device."""
        return sum(each.group.load.demand for each in self.occupants)

    @property
    def busy_seconds(self) -> float:
        """Until the last of its groups is predicted to end."""
        return max((each.ends - self.now for each in self.occupants), default=0.0)

    @property
    def busy_workers(self) -> int:
        """Workers that the groups on the device take."""
        return sum(each.group.workers for each in self.occupants)

    def has_worker(self, inference: bool, occupants: Sequence[Occupant] | None = None, workers: int = 1) -> bool:
        """Whether so many workers are free for a group of that kind next to ``occupants`` (by default those of now)."""
        groups = [each.group for each in (self.occupants if occupants is None else occupants)]
        if sum(group.workers for group in groups) + workers > self.device.workers:
            return False
        trainings = sum(group.workers for group in groups if not group.inference)
        return inference or trainings + workers <= self.device.training_workers

    def refuses(self, group: Footprint) -> str:
        """Why ``group`` cannot start here now; empty if it can."""
        name = self.device.name
        if not self.has_worker(group.inference, workers=group.workers):
            return f"waits for {'a free worker' if group.workers == 1 else f'{group.workers} free workers'} of {name}"
        if group.bytes > self.free:
            return f"needs {show_bytes(group.bytes)}, and {name} has {show_bytes(max(self.free, 0))} free"
        delays = self.reserved_from is not None and self.end_of(group) > self.reserved_from
        if delays and self.reserved_all and not group.inference:
            return f"would delay a sharded task that waits for {name}"
        if delays and group.bytes > self.reserved_spare:
            return f"would delay a task that waits for memory of {name}"
        if any(each.group.slowdown_limit is not None for each in self.occupants):
            loads = [each.group.load for each in self.occupants]
            before, after = self.model.slowdowns(loads), self.model.slowdowns([*loads, group.load])
            for each, now, then in zip(self.occupants, before, after, strict=False):
                if each.group.slowdown_limit is not None and then > max(each.group.slowdown_limit, now):
                    return f"would make an inference task on {name} miss its latency target"
        if self.promised is not None:
            promised, plan = self.promised
            later = plan.without(())
            later.start(group)
            if not later.takes(promised):
                return f"would take the memory or worker that is being freed on {name}"
        return ""

    def takes(self, group: Footprint) -> bool:
        """Whether ``group`` can start here now, without slowing the running ones."""
        return not self.refuses(group) and self.earliest_start(group) <= self.now

    def earliest_start(self, group: Footprint) -> float:
        """Earliest time at which starting ``group`` no longer slows the running ones; now if it need not wait."""
        if not self.occupants or group.inference:
            return self.now
        span, now, model = group.span(self.now), self.now, self.model
        overlaps = []  # of groups that would train at the same time
        for other in (each.group.span(each.started) for each in self.occupants):
            seconds = min(span.ends, other.expected_end(now)) - max(span.begins, other.begins)
            if seconds > 0:
                overlaps.append((other, seconds))
        loads = [other.load for other, _ in overlaps]
        if model.throughput([*loads, span.load]) >= MIN_GAIN * model.throughput(loads):
            return now
        start_seconds = span.begins - now
        if sum(seconds for _, seconds in overlaps) <= TOLERATED_OVERLAP * start_seconds:
            return now
        wait = min(other.expected_end(now) for other, _ in overlaps) - start_seconds - now
        delay = (span.ends - span.begins) * span.load.demand * len(self.occupants)
        return now if SHORT_FACTOR * delay < wait or wait < MOMENT else now + wait

    def end_of(self, group: Footprint) -> float:
        """When ``group`` would end, started now."""
        slowdown = self.model.slowdown(group.load, [each.group.load for each in self.occupants])
        return self.now + group.seconds * (slowdown / self.model.slowdown(group.load, []))

    def start(self, group: Footprint) -> None:
        """Count ``group`` as running."""
        ends = self.end_of(group)
        if self.reserved_from is not None and ends > self.reserved_from:
            self.reserved_spare -= group.bytes
        self.free -= group.bytes
        self.occupants.append(Occupant(group, self.now, ends))
        if self.promised is not None:
            self.promised[1].start(group)

    def without(self, groups: Collection[str]) -> DevicePlan:
        """The plan without the running ``groups``; what is set aside stays so."""
        gone = [each for each in self.occupants if each.id in groups]
        stay = [each for each in self.occupants if each.id not in groups]
        later = sum(
            each.group.bytes for each in gone if self.reserved_from is not None and each.ends > self.reserved_from
        )
        free, spare = self.free + sum(each.group.bytes for each in gone), self.reserved_spare + later
        return replace(self, occupants=stay, free=free, reserved_spare=spare, promised=None)

    def fits_from(self, group: Footprint) -> float | None:
        """When its bytes and a worker for it are predicted to be free; None if the device is too small."""
        free, time = self.free, self.now
        remaining = sorted(self.occupants, key=lambda each: -each.ends)
        while remaining and (group.bytes > free or not self.has_worker(group.inference, remaining, group.workers)):
            first = remaining.pop()
            free, time = free + first.group.bytes, max(first.ends, self.now)
        return time if group.bytes <= free else None

    def reserve(self, needed: int, start: float, sharded: bool = False) -> None:
        """Keep ``needed`` bytes from ``start`` on: other groups may use them only if they end before.

        ``sharded``: for ranks, which start when all of their devices are free. So no other training that ends later may
        start here, or it would keep them from starting when the next device is free.
        """
        released = sum(each.group.bytes for each in self.occupants if each.ends <= start)
        self.reserved_from, self.reserved_spare = start, self.free + released - needed
        self.reserved_all = sharded


def slowdown_limit(task: QueuedTask, now: float) -> float | None:
    """How much slower than alone an inference task may run from ``now`` on; None without a latency target."""
    if task.latency_target is None:
        return None
    return max((task.must_end_by - now) / max(task.seconds, 1e-9), 1.0)


@dataclass
class GroupDraft:
    """A fused group being formed: its members so far, and the sums that its footprint is made from.

    ``stacks``: by structure, what its members share, the most that one has of its own, and how many they are.
    """

    safety: float
    model: Interference
    members: list[QueuedTask] = field(default_factory=list)
    stacks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    common_bytes: int = 0
    longest: float = 0.0
    work: float = 0.0
    utilisation: float = 0.0
    start_seconds: float = 0.0

    def add(self, task: QueuedTask) -> None:
        """Let ``task`` join."""
        shared, own, count = self.stacks.get(task.structure, (0, 0, 0))
        own = max(own, task.bytes - task.shared_bytes)  # narrower members are padded
        self.stacks[task.structure] = max(shared, task.shared_bytes), own, count + 1
        self.common_bytes = min(self.common_bytes, task.common_bytes) if self.members else task.common_bytes
        self.members.append(task)
        self.longest = max(self.longest, task.seconds)
        self.work += task.work
        self.utilisation += task.utilisation
        self.start_seconds = max(self.start_seconds, task.start_seconds)

    def with_one_more(self, task: QueuedTask, now: float) -> Footprint:
        """What the group would take with ``task`` as well; its start is that of the present members."""
        draft = replace(self, members=[*self.members], stacks={**self.stacks})
        draft.add(task)
        draft.start_seconds = self.start_seconds
        return draft.footprint(now)

    def footprint(self, now: float) -> Footprint:
        """What the group takes as it is."""
        first = self.members[0]
        seconds, demand, summed = self.longest, self.utilisation, self.utilisation
        if len(self.members) > 1:
            seconds, demand = fused_cost(self.longest, self.start_seconds, self.work, self.model)
            summed = self.utilisation * self.model.fused_work
        size = sum(shared + count * own for shared, own, count in self.stacks.values())
        size -= (len(self.stacks) - 1) * self.common_bytes
        return Footprint(
            bytes=needed_bytes(size, self.safety),
            seconds=seconds,
            demand=demand,
            summed_demand=summed,
            inference=first.kind == "inference",
            slowdown_limit=slowdown_limit(first, now),
            start_seconds=self.start_seconds,
            turn_seconds=first.turn_seconds,
        )

    def start(self, places: tuple[str, ...], why: str, now: float, neighbours: str = "") -> GroupStart:
        """The start of the group with a rank on each of ``places``; ``neighbours``: the end of the reason."""
        group, members = self.footprint(now), tuple(member.id for member in self.members)
        others = len(members) - 1
        why += f"; fused with {others} other task{'s' * (others > 1)} of the same kind" if others else ""
        why += f"; {len(places)} ranks on {' and '.join(dict.fromkeys(places))}" if len(places) > 1 else ""
        return GroupStart(
            device=places[0],
            members=members,
            bytes=group.bytes,
            seconds=group.seconds,
            utilisation=group.demand,
            why=why + neighbours,
            start_seconds=group.start_seconds,
            turn_seconds=group.turn_seconds,
            devices=places if len(places) > 1 else (),
        )


JOIN_AT_LEAST = 8  # a group takes that many members if there are so many: a task of a stack costs the same from 8 on
MAX_MEMBERS = 256  # of a group
MOST_UNEQUAL = 4.0  # times as long: results of a group come when its last member ends


def join_alike(
    draft: GroupDraft, queue: TaskQueue, gone: Collection[str], accepts: Callable[[Footprint], bool], now: float
) -> None:
    """Add queued tasks that can be fused with the first member, until one is not accepted.

    Those of its structure first, shortest first, then others that take about as long; not those that are ``gone``.
    """
    first = draft.members[0]
    if not first.joinable:
        return
    low, high = first.seconds / MOST_UNEQUAL, first.seconds * MOST_UNEQUAL
    alike = [queue[name] for name in queue.by_join[first.join_key] if name not in gone and name != first.id]
    others = (task for task in alike if task.structure != first.structure and low <= task.seconds <= high)
    for task in chain((task for task in alike if task.structure == first.structure), others):
        if task.kind != first.kind or not accepts(draft.with_one_more(task, now)):
            break
        draft.add(task)


def fused_cost(longest: float, start_seconds: float, work: float, model: Interference) -> tuple[float, float]:
    """Seconds of a fused group alone on the device, and the share of it that it keeps busy, as a mean over them.

    ``longest``: seconds of its longest member. ``work``: of its members alone, in seconds of a fully used device.
    """
    busy = work * model.fused_work
    seconds = max(longest, start_seconds + busy)
    return seconds, busy / seconds if seconds > 0 else 0.0
