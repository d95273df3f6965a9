"""Weft's default policy: continuous backfill by bytes and predicted seconds, without group barriers.

Whenever a worker is free, tasks are considered in order of priority (raised by waiting), deadline, fair share and
length. A task starts if it fits in memory, if sharing the device pays (``sharing.py``), and if it delays neither an
inference task's answer nor the first task that waits for memory. Tasks that may be fused with it start in the same
group. A task that must start now for the queue to end early goes before shorter ones of its lane
(``critical_tasks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    considers, which bounds its cost whatever the queue's length. ``join_at_least``: a group takes that many members if
    there are so many; beyond, only while they do not fill the device (a task of a stack costs the same from 8 on).
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
        self.starts: list[GroupStart] = []
        self.wait: dict[str, str] = {}
        self.reserved = False
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
                return self._decision(NO_WORKER)
            if task.id not in self.refuse and task.id not in self.wait and not self.order.is_taken(task.id):
                self._consider(task, "is next")
                if critical is not None:
                    self._consider_critical(*critical)
                    critical = None
            if len(self.wait) >= self.policy.depth:
                break
        return self._decision(REST)

    def _may_pass(self, critical: QueuedTask, first: QueuedTask) -> bool:
        """Whether a critical task goes before the one whose turn it is: of its lane, and no wait for memory."""
        needed = needed_bytes(first.bytes, self.policy.safety)
        return lane_key(critical) == lane_key(first) and any(needed <= plan.free for plan in self.plans)

    def _consider_critical(self, task: QueuedTask, why: str) -> None:
        if task.id not in self.wait and not self.order.is_taken(task.id):
            self._consider(task, why)

    def _decision(self, rest: str) -> Decision:
        return Decision(tuple(self.starts), self.wait, self.refuse, self.preempt, rest, self.again)

    def _any_worker(self, task: QueuedTask) -> bool:
        return any(plan.has_worker(task.kind == "inference") for plan in self.plans)

    def _consider(self, task: QueuedTask, why: str) -> None:
        """Start ``task`` with what joins it, or note why it waits."""
        draft = GroupDraft(self.policy.safety, self.policy.model)
        draft.add(task)
        alone = draft.footprint(self.machine.now)
        reasons = []
        for plan in self._devices(task):
            reason = plan.refuses(alone)
            pays_from = plan.pays_from(alone)
            if not reason and pays_from <= self.machine.now:
                self._start(draft, plan, why)
                return
            if not reason:
                self.again = pays_from if self.again is None else min(self.again, pays_from)
            reasons.append(reason or f"would only slow down what runs on {plan.device.name}")
        self.wait[task.id] = reasons[0]
        self._make_way(task, alone)
        self._reserve(alone)

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
        wanted = len(draft.members) < self.policy.join_at_least or group.demand + plan.demand <= 1.0
        return wanted and task.kind == draft.members[0].kind and not plan.refuses(group)

    def _reserve(self, group: Footprint) -> None:
        """Keep memory for the first task that lacks it, on the device that has it earliest."""
        if self.reserved or any(group.bytes <= plan.free for plan in self.plans):
            return
        times = [(plan.fits_from(group.bytes), place) for place, plan in enumerate(self.plans)]
        known = [(time, place) for time, place in times if time is not None]
        if known:
            time, place = min(known)
            self.plans[place].reserve(group.bytes, time)
            self.reserved = True

    def _make_way_for_first(self) -> None:
        first = next((task for task in self.order if task.id not in self.refuse), None)
        if first is not None:
            draft = GroupDraft(self.policy.safety, self.policy.model)
            draft.add(first)
            self._make_way(first, draft.footprint(self.machine.now))

    def _make_way(self, task: QueuedTask, group: Footprint) -> None:
        """Preempt groups of lower priority, if ``task`` lacks a worker or memory that they have."""
        if self.preempt or self.starts or any(one.leaving for one in self.running):
            return
        for plan in self._devices(task):
            here = [one for one in self.running if one.device == plan.device.name]
            lower = [one for one in here if self._gives_way(one, task)]
            chosen = self._fewest(sorted(lower, key=lambda one: (one.priority, -one.bytes)), plan, group)
            if chosen:
                self.preempt = tuple(one.id for one in chosen)
                self.wait[task.id] = f"waits for {len(chosen)} less urgent groups to save a checkpoint"
                return

    def _fewest(self, candidates: Sequence[RunningGroup], plan: DevicePlan, group: Footprint) -> Sequence[RunningGroup]:
        """The first of ``candidates`` without which ``group`` starts; none if it lacks nothing, or never does.

        It may wait for another reason as well: they would be started again in its place, and preempted again.
        """
        if group.bytes <= plan.free and plan.has_worker(group.inference):
            return ()
        for count in range(1, len(candidates) + 1):
            left = [one for one in self.running if one not in candidates[:count]]
            without = DevicePlan.of(plan.device, left, self.machine.now, self.policy.model)
            if not without.refuses(group) and without.pays_from(group) <= self.machine.now:
                return candidates[:count]
        return ()

    def _gives_way(self, one: RunningGroup, task: QueuedTask) -> bool:
        """Whether a running group is preempted for ``task``: one of lower priority that would run for long.

        For a latency target that would be missed otherwise, a training of the same priority gives way, too.
        """
        if task.latency_target is not None and one.kind == "training" and one.priority <= task.priority:
            return self.machine.now < task.must_end_by < one.ends + task.seconds
        return one.priority < task.priority and one.ends - self.machine.now > self.policy.preempt_seconds
