"""Weft's default policy: continuous backfill by bytes and predicted seconds, without group barriers.

Whenever a worker is free, tasks are considered in order of priority (raised by waiting), deadline, fair share and
length. A task starts if it fits in memory, if sharing the device pays (``sharing.py``), and if it delays neither an
inference task's answer nor the first task that waits for memory. Tasks that may be fused with it start in the same
group. A task that must start now for the queue to end early goes before shorter ones of its lane
(``critical_tasks.py``). What groups that are preempted leave is kept for the task that they make way for.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, refusals
from weft.sched.device_plan import DevicePlan, Footprint, GroupDraft, training_workers
from weft.sched.interference import Interference, Load
from weft.sched.queue_state import Decision, GroupStart, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import LaneKey, SortedTasks, TaskQueue, lane_key, lane_name, lane_order

# ---- The order in which the backfill policy considers tasks: priority with ageing, deadlines, fair share, then
# length.

Rank = tuple[float, float, float, float, float]


@dataclass
class _Head:
    """The next task of a lane that has not been considered."""

    task: QueuedTask
    rest: Iterator[str]
    level: float


class CandidateOrder:
    """Ready tasks one by one, best first; tasks taken meanwhile are skipped.

    A lane (user, priority, with or without a time to end by) rises by one priority level per ``age_seconds`` in which
    none of its tasks was started. Within a level: earliest end, then the user with the fewest device-seconds, then the
    order of the lane, which is by arrival and predicted seconds.
    """

    def __init__(self, queue: TaskQueue, machine: MachineState, age_seconds: float) -> None:
        self._queue, self._now, self._age_seconds = queue, machine.now, age_seconds
        self._used = {share.user: share.device_seconds for share in machine.users}
        self._last = {share.user: share.last_start for share in machine.users}
        self._taken: set[str] = set()
        self._heap: list[tuple[Rank, LaneKey, _Head]] = []
        self._begin(queue.lanes)

    def __iter__(self) -> Iterator[QueuedTask]:
        while self._heap:
            rank, key, head = heapq.heappop(self._heap)
            current = self._rank(head)
            if current > rank:  # a task of this user was started meanwhile
                heapq.heappush(self._heap, (current, key, head))
                continue
            self._push(key, head.rest)
            if head.task.id not in self._taken:
                yield head.task

    def begin_with_inference(self) -> None:
        """Go through the inference tasks alone, from the first of them that is not taken."""
        self._heap.clear()
        self._begin(self._queue.inference_lanes)

    def take(self, task: QueuedTask) -> None:
        """Skip ``task`` from now on; its user has had its device-seconds."""
        self._taken.add(task.id)
        self._used[task.user] = self._used.get(task.user, 0.0) + task.work

    def is_taken(self, task: str) -> bool:
        """Whether ``task`` was taken."""
        return task in self._taken

    def _begin(self, lanes: Mapping[LaneKey, SortedTasks]) -> None:
        for key, lane in lanes.items():
            self._push(key, iter(lane))

    def _push(self, key: LaneKey, lane: Iterator[str]) -> None:
        name = next(lane, None)
        if name is None:
            return
        task = self._queue[name]
        head = _Head(task, lane, self._level(key, task))
        heapq.heappush(self._heap, (self._rank(head), key, head))

    def _level(self, key: LaneKey, task: QueuedTask) -> float:
        last = self._last.get(task.user, {}).get(lane_name(key), task.arrival)
        waited = max(self._now - max(last, task.arrival), 0.0)
        return task.priority + waited // self._age_seconds

    def _rank(self, head: _Head) -> Rank:
        task = head.task
        due, virtual_arrival = lane_order(task)
        return (-head.level, due, self._used.get(task.user, 0.0), virtual_arrival, self._queue.position(task.id))


# ---- Find the task that must start now for the queue to end early, though shorter ones wait.
#
# Shortest first leaves the long and the large tasks for the end, where nothing is left that could run beside them:
# what
# they leave idle of the device, while they start above all, is lost. Two rules find the last moment to begin with
# them.
# A chain of large tasks lets a shorter one go first if that costs the chain less than the shorter one would lose
# beside
# it, where its short kernels wait behind long ones.

LONGEST = "is the longest, and the rest of the queue only just fills the device beside it"
CHAIN = "is of those that fit beside none of each other, and take as long as the rest of the queue"
MARGIN = 1.5  # begin with a chain while the rest is up to that much longer: predictions are not exact
MOST_LARGE = 32  # tasks of a chain that are looked at


def critical_task(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> tuple[QueuedTask, str] | None:
    """The task that must start now, with the reason; None if the order of the queue will do."""
    if not queue.longest_first or sum(training_workers(plan.device) for plan in plans) < 2:
        return None  # nothing could run beside it
    urgent = max(priority for _, priority, _ in queue.lanes)
    longest = queue[queue.longest_first[0]]
    if longest.id not in refused and longest.priority >= urgent and _is_critical(longest, queue, plans):
        return longest, LONGEST
    large = _next_of_chain(queue, plans, refused, safety)
    return (large, CHAIN) if large is not None and large.priority >= urgent else None


def _is_critical(longest: QueuedTask, queue: TaskQueue, plans: Sequence[DevicePlan]) -> bool:
    """Whether ``longest`` must start now.

    Alone it leaves a share of the device idle, ``(1 - utilisation) * seconds``. Once the rest of the queue is no more
    than that, starting it later makes the queue end later.
    """
    running = sum(min(plan.demand, 1.0) * plan.busy_seconds for plan in plans)
    rest = (queue.ready_work - longest.work + running) / len(plans)
    return longest.seconds - longest.work >= rest


def _next_of_chain(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> QueuedTask | None:
    """The shortest of the tasks that can only run one after another, if they must begin now.

    They must if the rest, beside them, has no more work than they leave idle and takes no longer on the other workers.
    """
    plan = max(plans, key=lambda one: one.device.task_bytes)
    workers = sum(training_workers(one.device) for one in plans) - 1
    chain = _chain(queue, plan.device.task_bytes, refused, safety)
    if len(chain) < 2 or workers < 1:
        return None
    smallest = needed_bytes(chain[-1].bytes, safety)
    if any(one.bytes + smallest > plan.device.task_bytes for one in plan.occupants):
        return None  # one of them, or as large, runs
    seconds, work = sum(task.seconds for task in chain), sum(task.work for task in chain)
    left = [(max(one.ends - plan.now, 0.0), min(one.load.demand, 1.0)) for each in plans for one in each.occupants]
    other_seconds = queue.ready_seconds - seconds + sum(ends for ends, _ in left)
    other_work = queue.ready_work - work + sum(ends * demand for ends, demand in left)
    if other_seconds / workers > MARGIN * seconds or other_work / len(plans) > MARGIN * (seconds - work):
        return None
    if _loses_beside(queue[queue.longest_first[-1]], chain, plan.model):
        return None
    fitting = [task for task in chain if needed_bytes(task.bytes, safety) <= plan.free]
    return min(fitting, key=lambda task: task.seconds, default=None)


def _chain(queue: TaskQueue, room: int, refused: Collection[str], safety: float) -> list[QueuedTask]:
    """The largest tasks of which no two fit into ``room`` bytes together, largest first."""
    found: list[QueuedTask] = []
    for name in reversed(queue.by_bytes):
        task = queue[name]
        if name in refused:
            continue
        if found and needed_bytes(task.bytes, safety) + needed_bytes(found[-1].bytes, safety) <= room:
            break
        found.append(task)
        if len(found) == MOST_LARGE:
            break
    return found


def _loses_beside(shortest: QueuedTask, chain: Sequence[QueuedTask], model: Interference) -> bool:
    """Whether ``shortest`` would lose more time beside the chain than all of the chain would if it went first.

    Beside a large task it trains as slowly as their turns have it, at worst until that one has ended. Before the chain
    it delays every task of it by its own training.
    """
    training = shortest.seconds - shortest.start_seconds
    beside = min(chain, key=lambda task: task.seconds)
    slowdown = model.slowdown(load_of(shortest), [load_of(beside)])
    lost = min((slowdown - 1.0) * training, beside.seconds - beside.start_seconds)
    return lost > len(chain) * training


def load_of(task: QueuedTask) -> Load:
    """What a task asks of a device once it has started."""
    return Load(task.demand, task.turn_seconds)


REST = "waits behind tasks that are considered first"
NO_WORKER = "waits for a free worker"


@dataclass(frozen=True)
class Backfill:
    """Continuous backfill.

    ``age_seconds``: waiting that raises a lane by one priority level. ``depth``: how many waiting tasks a decision
    considers, and how many inference tasks behind them, which bounds its cost whatever the queue's length.
    ``join_at_least``: a group takes that many members if there are so many; beyond, only while they do not fill the
    device (a task of a stack costs the same from 8 on).
    ``max_members``: of a group. ``preempt_seconds``: a task of higher priority that lacks a worker or memory preempts
    groups of lower priority that would run for longer than that. An inference task that would miss its latency target
    preempts trainings of its own priority, however short they are.
    """

    safety: float = SAFETY_THRESHOLD
    age_seconds: float = 600.0
    depth: int = 32
    join_at_least: int = 8
    max_members: int = 256
    preempt_seconds: float = 5.0
    model: Interference = field(default_factory=Interference)

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start what fits and pays now."""
        queue = TaskQueue.of(tasks, running)
        return _Pass(self, queue, running, machine).decide()


class _Pass:
    """One decision in the making."""

    def __init__(
        self, policy: Backfill, queue: TaskQueue, running: Sequence[RunningGroup], machine: MachineState
    ) -> None:
        self.policy, self.queue, self.machine, self.running = policy, queue, machine, running
        self.preempt: tuple[str, ...] = ()
        self.refuse = refusals(queue, machine, policy.safety)
        self.plans = [DevicePlan.of(d, running, machine.now, policy.model) for d in machine.devices]
        self.graphs = {(group.device, group.graph) for group in running if group.graph}
        self.order = CandidateOrder(queue, machine, policy.age_seconds)
        soonest = (queue[name] for name in islice(queue.inference, policy.depth) if name not in self.refuse)
        self.answers = [task for task in soonest if task.latency_target is not None]
        self.starts: list[GroupStart] = []
        self.wait: dict[str, str] = {}
        self.reserved = False
        self.promised = False  # a place that others make
        self.again: float | None = None

    def decide(self) -> Decision:
        if not any(plan.has_worker(inference=True) for plan in self.plans):
            self._make_way_for_first()
            return self._decision(NO_WORKER)
        critical = critical_task(self.queue, self.plans, self.refuse, self.policy.safety)
        for task in self.order:
            if critical is not None and self._may_pass(critical[0], task):
                self._consider_critical(*critical)
                critical = None
            if not self._any_worker(task) and not self.queue.inference:
                if task.id in self.refuse or self.order.is_taken(task.id):
                    continue
                self._make_way(task, self._alone(task).footprint(self.machine.now))
                return self._decision(NO_WORKER)
            if task.id not in self.refuse and self._is_open(task):
                self._consider_in_turn(task, "is next")
                if critical is not None:
                    self._consider_critical(*critical)
                    critical = None
            if len(self.wait) >= self.policy.depth:
                self._consider_inference()
                break
        return self._decision(REST)

    def _consider_inference(self) -> None:
        """Consider inference behind all that waits: its workers do not stand idle for trainings that cannot start."""
        most = len(self.wait) + self.policy.depth
        self.order.begin_with_inference()
        for task in self.order:
            if len(self.wait) >= most or not self._any_worker(task):
                break
            if task.id not in self.refuse and self._is_open(task):
                self._consider(task, "is the next inference task")

    def _may_pass(self, critical: QueuedTask, first: QueuedTask) -> bool:
        """Whether a critical task goes before the one whose turn it is: of its lane, and no wait for memory."""
        needed = needed_bytes(first.bytes, self.policy.safety)
        return lane_key(critical) == lane_key(first) and any(needed <= plan.free for plan in self.plans)

    def _answers_before(self, task: QueuedTask) -> Iterator[QueuedTask]:
        """The waiting answers that would be late behind ``task``: it would be preempted for them once it runs."""
        ends = self.machine.now + task.seconds
        for asked in self.answers if task.kind == "training" else ():
            late = self.machine.now < asked.must_end_by < ends + asked.seconds and task.priority <= asked.priority
            if late and self._is_open(asked):
                yield asked

    def _consider_critical(self, task: QueuedTask, why: str) -> None:
        if self._is_open(task):
            self._consider_in_turn(task, why)

    def _consider_in_turn(self, task: QueuedTask, why: str) -> None:
        for answer in self._answers_before(task):
            self._consider(answer, "is due before what is next would end")
        self._consider(task, why)

    def _is_open(self, task: QueuedTask) -> bool:
        """Whether a task was not considered yet."""
        return task.id not in self.wait and not self.order.is_taken(task.id)

    def _decision(self, rest: str) -> Decision:
        return Decision(tuple(self.starts), self.wait, self.refuse, self.preempt, rest, self.again)

    def _any_worker(self, task: QueuedTask) -> bool:
        return any(plan.has_worker(task.kind == "inference") for plan in self.plans)

    def _consider(self, task: QueuedTask, why: str) -> None:
        """Start ``task`` with what joins it, or note why it waits."""
        draft = self._alone(task)
        alone = draft.footprint(self.machine.now)
        reasons, later = [], []
        for plan in self._devices(task):
            reason = plan.refuses(alone)
            pays_from = plan.pays_from(alone)
            if not reason and pays_from <= self.machine.now:
                self._start(draft, plan, why)
                return
            if not reason:
                later.append(pays_from)
            reasons.append(reason or f"would only slow down what runs on {plan.device.name}")
        self.again = min((time for time in (self.again, *later) if time is not None), default=None)
        self.wait[task.id] = reasons[0]
        if not self._make_way(task, alone):
            self._reserve(alone)

    def _alone(self, task: QueuedTask) -> GroupDraft:
        draft = GroupDraft(self.policy.safety, self.policy.model)
        draft.add(task)
        return draft

    def _devices(self, task: QueuedTask) -> list[DevicePlan]:
        """Devices that hold the task's graph first, then the least busy, then those with the most free memory."""
        if len(self.plans) == 1:
            return self.plans
        holds = {plan.device.name: (plan.device.name, task.graph) in self.graphs for plan in self.plans}
        return sorted(self.plans, key=lambda plan: (not holds[plan.device.name], plan.demand, -plan.free))

    def _start(self, draft: GroupDraft, plan: DevicePlan, why: str) -> None:
        self._join(draft, plan)
        group, members = draft.footprint(self.machine.now), draft.members
        joined = f"; fused with {len(members) - 1} tasks of the same kind" if len(members) > 1 else ""
        beside = f"; beside {len(plan.occupants)} running on {plan.device.name}" if plan.occupants else ""
        plan.start(group)
        for member in members:
            self.order.take(member)
        names, reason = tuple(member.id for member in members), why + joined + beside
        about = group.bytes, group.seconds, group.demand, reason
        self.starts.append(
            GroupStart(
                plan.device.name, names, *about, start_seconds=group.start_seconds, turn_seconds=group.turn_seconds
            )
        )
        self.graphs.add((plan.device.name, members[0].graph))

    def _join(self, draft: GroupDraft, plan: DevicePlan) -> None:
        """Add the queued tasks that can be fused with the first member here, shortest first."""
        first = draft.members[0]
        for name in self.queue.by_join[first.join_key] if first.joinable else ():
            if name == first.id or name in self.refuse or self.order.is_taken(name):
                continue
            if len(draft.members) >= self.policy.max_members or not self._may_join(self.queue[name], draft, plan):
                return
            draft.add(self.queue[name])

    def _may_join(self, task: QueuedTask, draft: GroupDraft, plan: DevicePlan) -> bool:
        group = draft.with_one_more(task, self.machine.now)
        wanted = len(draft.members) < self.policy.join_at_least or group.load.demand + plan.demand <= 1.0
        return wanted and task.kind == draft.members[0].kind and not plan.refuses(group)

    def _reserve(self, group: Footprint) -> None:
        """Keep memory for the first task that lacks it, on the device that has it earliest."""
        if self.reserved or any(group.bytes <= plan.free for plan in self.plans):
            return
        times = [(plan.fits_from(group), place) for place, plan in enumerate(self.plans)]
        known = [(time, place) for time, place in times if time is not None]
        if known:
            time, place = min(known)
            self.plans[place].reserve(group.bytes, time)
            self.reserved = True

    def _make_way_for_first(self) -> None:
        first = next((task for task in self.order if task.id not in self.refuse), None)
        for task in (*self._answers_before(first), first) if first is not None else ():
            self._make_way(task, self._alone(task).footprint(self.machine.now))

    def _make_way(self, task: QueuedTask, group: Footprint) -> bool:
        """Preempt groups of lower priority, if ``task`` lacks a worker or memory that they have.

        Their place is kept for it: in this decision, and while they leave, nothing starts there that would take it.
        """
        if self.promised:
            return False
        leaving = any(one.leaving for one in self.running)
        for plan in self._devices(task):
            here = [one for one in self.running if one.device == plan.device.name]
            leave = self._leaving(here, task, plan, group) if leaving else self._to_preempt(here, task, plan, group)
            if leave:
                plan.promise(group, leave)
                self.promised = True
                self.preempt = () if leaving else leave
                self.wait[task.id] = f"waits for {len(leave)} less urgent groups to save a checkpoint"
                return True
        return False

    def _leaving(
        self, here: Sequence[RunningGroup], task: QueuedTask, plan: DevicePlan, group: Footprint
    ) -> tuple[str, ...]:
        """The groups that leave already and without which ``group`` starts, as if they had been preempted for it."""
        names = tuple(one.id for one in here if one.leaving and _is_less_urgent(one, task))
        return names if names and plan.without(names).takes(group) else ()

    def _to_preempt(
        self, here: Sequence[RunningGroup], task: QueuedTask, plan: DevicePlan, group: Footprint
    ) -> tuple[str, ...]:
        """The fewest groups without which ``group`` starts; none if it lacks nothing, or never does.

        It may wait for another reason as well: they would be started again in its place, and preempted again.
        """
        if group.bytes <= plan.free and plan.has_worker(group.inference):
            return ()
        lower = sorted((one for one in here if self._gives_way(one, task)), key=lambda one: (one.priority, -one.bytes))
        names = tuple(one.id for one in lower)
        counts = range(1, len(names) + 1)
        return next((names[:count] for count in counts if plan.without(names[:count]).takes(group)), ())

    def _gives_way(self, one: RunningGroup, task: QueuedTask) -> bool:
        """Whether a running group is preempted for ``task``: one of lower priority that would run for long.

        For a latency target that would be missed otherwise, a training of the same priority gives way, too.
        """
        if not _is_less_urgent(one, task):
            return False
        if task.latency_target is not None and one.kind == "training":
            return self.machine.now < task.must_end_by < one.ends + task.seconds
        return one.ends - self.machine.now > self.policy.preempt_seconds


def _is_less_urgent(one: RunningGroup, task: QueuedTask) -> bool:
    """Whether a running group may have to give way to ``task``."""
    asked = task.latency_target is not None and one.kind == "training"
    return one.priority <= task.priority if asked else one.priority < task.priority
