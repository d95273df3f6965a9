"""Weft's default policy: continuous backfill by bytes and predicted seconds, without group barriers.

Whenever a worker is free, tasks are considered in order of priority (raised by waiting), deadline, fair share and
length. A task starts if it fits in memory, if sharing the device pays (``sharing.py``), and if it delays neither an
inference task's answer nor the first task that waits for memory. Tasks that may be fused with it start in the same
group. A task that must start now for the queue to end early goes before shorter ones of its lane
(``critical_tasks.py``). What groups that are preempted leave is kept for the task that they make way for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weft.sched.admission import SAFETY_THRESHOLD, needed_bytes, refusals
from weft.sched.interference import Interference
from weft.sched.policies.candidate_order import CandidateOrder
from weft.sched.policies.critical_tasks import critical_task
from weft.sched.policies.device_plan import DevicePlan, Footprint
from weft.sched.policies.group_draft import GroupDraft
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, GroupStart, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue, lane_key

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
