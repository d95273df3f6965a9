"""Weft's default policy: continuous backfill by bytes and predicted seconds, without group barriers.

Whenever a worker is free, tasks are considered in order of priority (raised by waiting), fair share, deadline and
length. A task starts if it fits in memory, if it does not only slow the running groups (``device_plan.py``), and if it
delays neither an inference task's answer nor the first task that waits for memory. Tasks that may be fused with it
start in the same group. A task that must start now for the queue to end early goes before shorter ones of its lane
(:func:`critical_task`). Memory and workers of preempted groups are reserved for the task they were preempted for.
The ranks of a sharded task start together. Until their devices are free at once, nothing starts there that ends later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, rank_places, refusals
from weft.sched.device_plan import JOIN_AT_LEAST, MAX_MEMBERS, DevicePlan, Footprint, GroupDraft, join_alike
from weft.sched.interference import DeviceLoad, Interference
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.task_queue import LaneKey, SortedTasks, TaskQueue, lane_key, lane_name, lane_order

Rank = tuple[float, float, float, float, float]


class CandidateOrder:
    """Ready tasks one by one, best first; tasks taken meanwhile are skipped.

    A lane (user, priority, with or without a time to end by) rises by one priority level per ``age_seconds`` in which
    none of its tasks was started. Within a level: the user with the fewest device-seconds, so that nobody gets ahead of
    others by giving deadlines; then earliest end, then the order of the lane, by arrival and predicted seconds.
    """

    def __init__(self, queue: TaskQueue, machine: MachineState, age_seconds: float) -> None:
        self._queue, self._now, self._age_seconds = queue, machine.now, age_seconds
        self.used = {share.user: share.device_seconds for share in machine.users}
        self._last = {share.user: share.last_start for share in machine.users}
        self.taken: set[str] = set()
        self._heap: list[tuple[Rank, LaneKey, QueuedTask, Iterator[str]]] = []  # the next task per lane, and the rest
        self.begin(queue.lanes)

    def __iter__(self) -> Iterator[QueuedTask]:
        while self._heap:
            rank, key, task, rest = heapq.heappop(self._heap)
            current = self._rank(task, -rank[0])
            if current > rank:  # a task of this user was started meanwhile
                heapq.heappush(self._heap, (current, key, task, rest))
                continue
            self._push(key, rest)
            if task.id not in self.taken:
                yield task

    def take(self, task: QueuedTask) -> None:
        """Skip ``task`` from now on; its user has had its device-seconds."""
        self.taken.add(task.id)
        self.used[task.user] = self.used.get(task.user, 0.0) + task.work

    def begin(self, lanes: Mapping[LaneKey, SortedTasks]) -> None:
        """Start over with the tasks of ``lanes``, from the first of them that is not taken."""
        self._heap.clear()
        for key, lane in lanes.items():
            self._push(key, iter(lane))

    def _push(self, key: LaneKey, lane: Iterator[str]) -> None:
        name = next(lane, None)
        if name is None:
            return
        task = self._queue[name]
        last = self._last.get(task.user, {}).get(lane_name(key), task.arrival)
        waited = max(self._now - max(last, task.arrival), 0.0)
        rank = self._rank(task, task.priority + waited // self._age_seconds)
        heapq.heappush(self._heap, (rank, key, task, lane))

    def _rank(self, task: QueuedTask, level: float) -> Rank:
        due, virtual_arrival = lane_order(task)
        return (-level, self.used.get(task.user, 0.0), due, virtual_arrival, self._queue.position(task.id))


# ---- The task that must start now for the queue to end early, though shorter ones wait
#
# Shortest first keeps the long and the large tasks for the end, where nothing remains that could run concurrently: what
# they leave idle of the device, above all while they start, is lost. Two rules find the last moment to begin with them.
# A chain of large tasks lets a shorter one go first if that costs the chain less than the shorter one would lose next
# to it, where its short kernels wait behind long ones.

LONGEST = "is the longest, and the rest of the queue only just fills the device next to it"
CHAIN = "is of those of which no two fit at once, and take as long as the rest of the queue"
CHAIN_MARGIN = 1.5  # begin with a chain while the rest is up to that much longer: predictions are not exact
MOST_LARGE = 32  # tasks of a chain that are considered


def critical_task(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> tuple[QueuedTask, str] | None:
    """The task that must start now, with the reason; None if the order of the queue will do."""
    if not queue.longest_first or sum(plan.device.training_workers for plan in plans) < 2:
        return None  # nothing could run concurrently
    urgent = max(priority for _, priority, _ in queue.lanes)
    longest = next((queue[name] for name in queue.longest_first if queue[name].ranks == 1), None)
    if longest is not None and longest.id not in refused and longest.priority >= urgent:
        # Alone it leaves a share of the device idle, (1 - utilisation) * seconds. Once the rest of the queue is no more
        # than that, starting it later makes the queue end later.
        running = sum(min(plan.demand, 1.0) * plan.busy_seconds for plan in plans)
        rest = (queue.ready_work - longest.work + running) / len(plans)
        if longest.seconds - longest.work >= rest:
            return longest, LONGEST
    large = _next_of_chain(queue, plans, refused, safety)
    return (large, CHAIN) if large is not None and large.priority >= urgent else None


def _next_of_chain(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> QueuedTask | None:
    """The shortest of the largest tasks, of which no two fit on a device at once, if they must begin now.

    They must if the rest has no more work than they leave idle and takes no longer on the other workers.
    """
    plan = max(plans, key=lambda each: each.device.task_bytes)
    room, workers = plan.device.task_bytes, sum(each.device.training_workers for each in plans) - 1
    chain: list[QueuedTask] = []
    for name in reversed(queue.by_bytes):
        if name not in refused and queue[name].ranks == 1:
            smallest = needed_bytes(queue[name].bytes, safety)
            if len(chain) == MOST_LARGE or (chain and smallest + needed_bytes(chain[-1].bytes, safety) <= room):
                break
            chain.append(queue[name])
    if len(chain) < 2 or workers < 1:
        return None
    smallest = needed_bytes(chain[-1].bytes, safety)
    if any(each.group.bytes + smallest > room for each in plan.occupants):
        return None  # one of them, or as large, runs
    seconds, work = sum(task.seconds for task in chain), sum(task.work for task in chain)
    running = [(max(o.ends - plan.now, 0.0), min(o.group.load.demand, 1.0)) for each in plans for o in each.occupants]
    other_seconds = queue.ready_seconds - seconds + sum(ends for ends, _ in running)
    other_work = queue.ready_work - work + sum(ends * demand for ends, demand in running)
    if other_seconds / workers > CHAIN_MARGIN * seconds or other_work / len(plans) > CHAIN_MARGIN * (seconds - work):
        return None
    # Next to a large task the shortest of the queue trains as slowly as their turns have it, at worst until that one
    # has ended. Before the chain it delays every task of it by its own training.
    shortest = queue[queue.longest_first[-1]]
    training = shortest.seconds - shortest.start_seconds
    neighbour = min(chain, key=lambda task: task.seconds)
    loads = [DeviceLoad(task.demand, task.turn_seconds) for task in (shortest, neighbour)]
    lost = (plan.model.slowdown(loads[0], loads[1:]) - 1.0) * training
    if min(lost, neighbour.seconds - neighbour.start_seconds) > len(chain) * training:
        return None
    fitting = [task for task in chain if needed_bytes(task.bytes, safety) <= plan.free]
    return min(fitting, key=lambda task: task.seconds, default=None)


REST = "waits behind tasks that are considered first"
NO_WORKER = "waits for a free worker"


@dataclass(frozen=True)
class Backfill:
    """Continuous backfill.

    ``age_seconds``: waiting that raises a lane by one priority level. ``depth``: how many waiting tasks a decision
    considers, and how many inference tasks behind them, which bounds its cost whatever the queue's length.
    ``fuse``: whether tasks that may be fused start as one group, of ``join_at_least`` members if there are so many, and
    of up to ``max_members`` while they do not fill the device.
    ``preempt_seconds``: a task of higher priority that lacks a worker or memory preempts groups of lower priority
    that would run for longer than that. An inference task that would miss its latency target preempts trainings
    of its priority, however short they are, of its own user and of users who have had no less of the device; it
    goes before trainings that wait until its user has had so many seconds more than theirs.
    """

    safety: float = SAFETY_THRESHOLD
    age_seconds: float = 600.0
    depth: int = 32
    fuse: bool = True
    join_at_least: int = JOIN_AT_LEAST
    max_members: int = MAX_MEMBERS
    preempt_seconds: float = 5.0
    model: Interference = field(default_factory=Interference)

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start what fits now without only slowing the running groups."""
        return _Pass(self, TaskQueue.of(tasks, running), running, machine).decide()


class _Pass:
    """One decision in the making."""

    def __init__(
        self, policy: Backfill, queue: TaskQueue, running: Sequence[RunningGroup], machine: MachineState
    ) -> None:
        self.policy, self.queue, self.now, self.running = policy, queue, machine.now, running
        self.preempt: tuple[str, ...] = ()
        self.refuse = refusals(queue, machine, policy.safety)
        self.plans = [DevicePlan.of(d, running, machine.now, policy.model) for d in machine.devices]
        self.plan_of = {plan.device.name: plan for plan in self.plans}
        self.graphs = {(name, group.graph) for group in running if group.graph for name in group.places}
        self.order = CandidateOrder(queue, machine, policy.age_seconds)
        soonest = (queue[name] for name in islice(queue.inference, policy.depth) if name not in self.refuse)
        self.answers = [task for task in soonest if task.latency_target is not None]
        self.starts: list[GroupStart] = []
        self.wait: dict[str, str] = {}
        self.again: float | None = None

    def decide(self) -> QueueDecision:
        if any(plan.has_worker(inference=True) for plan in self.plans):
            rest = self._consider_all()
        else:
            rest = NO_WORKER
            first = next((task for task in self.order if task.id not in self.refuse), None)
            for task in (*self._answers_before(first), first) if first is not None else ():
                self._evict_for(task, self._alone(task).footprint(self.now))
        return QueueDecision(tuple(self.starts), self.wait, self.refuse, self.preempt, rest, self.again)

    def _consider_all(self) -> str:
        """Consider tasks in order, as many as the policy's depth; why all others wait."""
        critical = critical_task(self.queue, self.plans, self.refuse, self.policy.safety)
        for task in self.order:
            # A critical task goes before the one whose turn it is if both are of one lane and that one has memory.
            has_memory = needed_bytes(task.bytes, self.policy.safety) <= max(plan.free for plan in self.plans)
            if critical is not None and has_memory and lane_key(critical[0]) == lane_key(task):
                self._consider_in_turn(*critical)
                critical = None
            if not self._any_worker(task) and not self.queue.inference:
                if task.id in self.refuse or task.id in self.order.taken:
                    continue
                self._evict_for(task, self._alone(task).footprint(self.now))
                return NO_WORKER
            if task.id not in self.refuse and self._is_open(task):
                self._consider_in_turn(task, "is next")
                if critical is not None:
                    self._consider_in_turn(*critical)
                    critical = None
            if len(self.wait) >= self.policy.depth:
                break
        else:
            return REST
        # Inference behind all that waits: its workers do not stand idle for trainings that cannot start.
        most = len(self.wait) + self.policy.depth
        self.order.begin(self.queue.inference_lanes)
        for task in self.order:
            if len(self.wait) >= most or not self._any_worker(task):
                break
            if task.id not in self.refuse:
                self._consider(task, "is the next inference task")
        return REST

    def _answers_before(self, task: QueuedTask) -> Iterator[QueuedTask]:
        """The waiting answers that would be late behind ``task``: it would be preempted for them once it runs."""
        ends, most = self.now + task.seconds, self.order.used.get(task.user, 0.0) + self.policy.preempt_seconds
        for answer in self.answers if task.kind == "training" else ():
            late = self.now < answer.must_end_by < ends + answer.seconds and task.priority <= answer.priority
            fair = answer.user == task.user or self.order.used.get(answer.user, 0.0) < most
            if late and fair and self._is_open(answer):
                yield answer

    def _consider_in_turn(self, task: QueuedTask, why: str) -> None:
        if self._is_open(task):
            for answer in self._answers_before(task):
                self._consider(answer, "is due before what is next would end")
            self._consider(task, why)

    def _is_open(self, task: QueuedTask) -> bool:
        """Whether a task was not considered yet."""
        return task.id not in self.wait and task.id not in self.order.taken

    def _any_worker(self, task: QueuedTask) -> bool:
        return any(plan.has_worker(task.kind == "inference") for plan in self.plans)

    def _consider(self, task: QueuedTask, why: str) -> None:
        """Start ``task`` with what joins it, or note why it waits."""
        if not self._is_open(task):
            return
        draft = self._alone(task)
        alone = draft.footprint(self.now)
        reasons, later = list[str](), list[float]()

        def takes(device: DeviceState, count: int) -> bool:
            plan, ranks = self.plan_of[device.name], alone.of_ranks(count, device)
            reason = plan.refuses(ranks)
            earliest = plan.earliest_start(ranks)
            if not reason and earliest <= self.now:
                return True
            if not reason:
                later.append(earliest)
            reasons.append(reason or f"would only slow down what runs on {device.name}")
            return False

        places = rank_places(task.ranks, self._devices(task), takes)
        if places:
            self._start(draft, places, why)
            return
        self.again = min((time for time in (self.again, *later) if time is not None), default=None)
        self.wait[task.id] = reasons[0] + (f"; its {task.ranks} ranks start together" if task.ranks > 1 else "")
        if not self._evict_for(task, alone):
            self._reserve(task, alone)

    def _alone(self, task: QueuedTask) -> GroupDraft:
        draft = GroupDraft(self.policy.safety, self.policy.model)
        draft.add(task)
        return draft

    def _devices(self, task: QueuedTask) -> list[DeviceState]:
        """Devices that hold the task's graph first, then the least busy, then those with the most free memory."""
        holds = {plan.device.name: (plan.device.name, task.graph) in self.graphs for plan in self.plans}
        in_turn = sorted(self.plans, key=lambda plan: (not holds[plan.device.name], plan.demand, -plan.free))
        return [plan.device for plan in in_turn]

    def _start(self, draft: GroupDraft, places: tuple[str, ...], why: str) -> None:
        """Start a group, after adding the queued tasks that can be fused with its first member, shortest first."""
        first, policy, plan = draft.members[0], self.policy, self.plan_of[places[0]]

        def accepts(group: Footprint) -> bool:
            count = len(draft.members)
            fills = count >= policy.join_at_least and group.load.demand + plan.demand > 1.0
            return count < policy.max_members and not fills and not plan.refuses(group)

        if policy.fuse:
            join_alike(draft, self.queue, self.refuse.keys() | self.order.taken, accepts, self.now)
        group = draft.footprint(self.now)
        neighbours = f"; next to {len(plan.occupants)} running on {plan.device.name}" if plan.occupants else ""
        for name, count in Counter(places).items():
            self.plan_of[name].start(group.of_ranks(count, self.plan_of[name].device))
            self.graphs.add((name, first.graph))
        for member in draft.members:
            self.order.take(member)
        self.starts.append(draft.start(places, why, self.now, neighbours))

    def _reserve(self, task: QueuedTask, group: Footprint) -> None:
        """Keep memory for the first task that lacks it, on the device that has it earliest.

        For the ranks of a sharded task, keep the devices that are free at once earliest, whatever it lacks: otherwise
        others would start on each of them that is free while it waits for the next.
        """
        sharded = task.ranks > 1
        if any(plan.reserved_from is not None or (group.bytes <= plan.free and not sharded) for plan in self.plans):
            return
        times: dict[str, float] = {}

        def holds(device: DeviceState, count: int) -> bool:
            plan, ranks = self.plan_of[device.name], group.of_ranks(count, device)
            time = plan.fits_from(ranks)
            if time is not None:
                times[device.name] = max(time, plan.earliest_start(ranks)) if sharded else time
            return time is not None

        free_from = {plan.device.name: plan.fits_from(group) for plan in self.plans}
        earliest = sorted(self.plans, key=lambda plan: math.inf if (t := free_from[plan.device.name]) is None else t)
        places = rank_places(task.ranks, [plan.device for plan in earliest], holds)
        for name, count in Counter(places).items():
            self.plan_of[name].reserve(count * group.bytes, max(times[place] for place in places), sharded)

    def _evict_for(self, task: QueuedTask, group: Footprint) -> bool:
        """Preempt groups of lower priority, if ``task`` lacks a worker or memory that they have.

        Both are reserved for it: in this decision, and while they leave, nothing starts there that would take them.
        """
        if any(plan.promised is not None for plan in self.plans):
            return False
        leaving = any(each.leaving for each in self.running)
        evicted: dict[str, tuple[str, ...]] = {}  # by device

        def takes(device: DeviceState, count: int) -> bool:
            plan, ranks = self.plan_of[device.name], group.of_ranks(count, device)
            is_free = task.ranks > 1 and plan.takes(ranks)  # of the devices of a sharded task some may be
            evicted[device.name] = () if is_free else self._evictions(task, plan, ranks, leaving)
            return is_free or bool(evicted[device.name])

        places = Counter(rank_places(task.ranks, self._devices(task), takes))
        groups = tuple(dict.fromkeys(name for place in places for name in evicted[place]))
        if not groups:
            return False
        for name, count in places.items():
            plan = self.plan_of[name]
            plan.promised = group.of_ranks(count, plan.device), plan.without(groups)
        self.preempt = () if leaving else groups
        self.wait[task.id] = f"waits for {len(groups)} less urgent groups to save a checkpoint"
        return True

    def _evictions(self, task: QueuedTask, plan: DevicePlan, group: Footprint, leaving: bool) -> tuple[str, ...]:
        """The groups without which ``group`` starts: those that leave already if any do, else the fewest.

        None if it lacks nothing, or never starts: it may wait for another reason as well, and they would be started
        again instead, and preempted again. A group is preempted if its priority is lower and it would run for long. For
        a latency target that would be missed otherwise, a training of the same priority is preempted, too, unless its
        user has had less of the device.
        """
        names: list[str] = []
        if not leaving and group.bytes <= plan.free and plan.has_worker(group.inference, workers=group.workers):
            return ()
        for each in sorted(self.running, key=lambda each: (each.priority, -each.bytes)):
            if plan.device.name not in each.places:
                continue
            mine, used = self.order.used.get(task.user, 0.0), self.order.used
            others = (each.had(user, used.get(user, 0.0), self.now) for user in each.users if user != task.user)
            answers = task.latency_target is not None and each.kind == "training" and all(mine <= had for had in others)
            if not (each.priority <= task.priority if answers else each.priority < task.priority):
                continue
            if leaving:
                preempted = each.leaving
            elif answers:
                preempted = self.now < task.must_end_by < each.ends + task.seconds
            else:
                preempted = each.ends - self.now > self.policy.preempt_seconds
            if preempted:
                names.append(each.id)
                if not leaving and plan.without(names).takes(group):
                    return tuple(names)
        return tuple(names) if leaving and names and plan.without(names).takes(group) else ()
