"""A discrete-event simulator: runs a policy over a queue in continuous time, without a device.

Between two events every group advances at a constant rate, given by the interference model from the demands of the
groups on its device. Events are arrivals and ends of tasks and the moments that a policy asks for, after each of which
it decides, and the moments at which a task has started and begins to ask something of the device. A group holds its
worker and its bytes until its last member ends. Equal input gives an equal result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.core.errors import SpecError, WeftError
from weft.sched.decide import decide
from weft.sched.interference import Interference, Load
from weft.sched.live_group import LiveGroup
from weft.sched.policies.policy import Policy
from weft.sched.queue_state import Decision, DeviceState, GroupStart, MachineState, QueuedTask, UserShare
from weft.sched.simulation import GroupRun, Simulation, TaskRun
from weft.sched.task_queue import TaskQueue, lane_key, lane_name

MOST_RESTLESS = 1000  # decisions in a row at one time, with nothing that ends or arrives, before a policy is at fault


@dataclass(frozen=True)
class Conditions:
    """What the simulated device is like: how groups interfere, and what a cold start costs.

    ``background``: the share of the device that others than the queue keep busy all the time.
    """

    interference: Interference = field(default_factory=Interference)
    cold_start_seconds: float = 0.0
    background: float = 0.0


def simulate(
    policy: Policy,
    tasks: Iterable[QueuedTask],
    devices: Sequence[DeviceState],
    conditions: Conditions | None = None,
    name: str = "",
    actual: Iterable[QueuedTask] = (),
) -> Simulation:
    """Run ``policy`` over ``tasks`` until all are done or refused.

    ``actual``: tasks of the queue as they turn out, with other seconds or another utilisation than predicted. The
    policy decides by what is predicted, as a server does, and the simulated device does what is actual.
    """
    turned_out = {task.id: task for task in actual}
    made = _Run(policy, list(tasks), devices, conditions or Conditions(), turned_out)
    return made.until_done(name or type(policy).__name__)


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        policy: Policy,
        tasks: list[QueuedTask],
        devices: Sequence[DeviceState],
        conditions: Conditions,
        actual: Mapping[str, QueuedTask],
    ) -> None:
        _check(tasks, actual)
        self.policy, self.conditions = policy, conditions
        self.predicted = {task.id: task for task in tasks}
        self.actual = dict(actual)
        self.devices = {device.name: device for device in devices}
        self.arrivals = sorted(tasks, key=lambda task: task.arrival)[::-1]  # the next one last
        self.expected = {task.id for task in tasks}
        self.held: dict[str, list[QueuedTask]] = {}  # tasks that arrive before something they depend on
        self.queue = TaskQueue()
        self.live: dict[str, list[LiveGroup]] = {device.name: [] for device in devices}
        self.users: dict[str, UserShare] = {}
        self.now = self.arrivals[-1].arrival if self.arrivals else 0.0
        self.starts: dict[str, tuple[str, float]] = {}
        self.runs: list[TaskRun] = []
        self.groups: list[GroupRun] = []
        self.refused: dict[str, str] = {}
        self.busy_seconds, self.peak_bytes, self.decisions = 0.0, 0, 0
        self.again = math.inf  # when the policy wants to decide though nothing has happened
        self.restless = 0  # decisions since something ended or arrived or time passed
        self.decided: tuple[float, int, int] | None = None  # time, arrivals and ends at the last decision

    def until_done(self, name: str) -> Simulation:
        while self.arrivals or self.queue or any(self.live.values()):
            before = len(self.arrivals), len(self.runs)
            self._advance(self._seconds_to_next_event())
            self._arrive()
            self._end()
            if self.queue and (self.now >= self.again or before != (len(self.arrivals), len(self.runs))):
                self._decide()
            self._update_rates()
        budget = max(device.task_bytes for device in self.devices.values())
        return Simulation(
            name, tuple(self.runs), tuple(self.groups), self.refused, budget, len(self.devices),
            self.busy_seconds, self.peak_bytes, self.decisions,
        )  # fmt: skip

    def _seconds_to_next_event(self) -> float:
        seconds = max(self.again - self.now, 0.0) if self.queue else math.inf
        if self.arrivals:
            seconds = min(seconds, max(self.arrivals[-1].arrival - self.now, 0.0))
        for groups in self.live.values():
            for group in groups:
                seconds = min(seconds, group.seconds_to_next_change)
        if seconds == math.inf:
            stuck = next(iter(self.queue)).id
            raise WeftError(
                f"{type(self.policy).__name__} starts nothing although nothing runs and {len(self.queue)} tasks are "
                f"queued (the first is {stuck!r}); this is a fault of the policy"
            )
        return seconds

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for groups in self.live.values():
            self.busy_seconds += seconds * min(math.fsum(group.load.demand for group in groups), 1.0)
            for group in groups:
                group.advance(seconds)

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[-1].arrival <= self.now:
            self._admit(self.arrivals.pop())

    def _admit(self, task: QueuedTask) -> None:
        """Queue a task once everything it depends on has arrived."""
        missing = next((name for name in task.after if name in self.expected), None)
        if missing is not None:
            self.held.setdefault(missing, []).append(task)
            return
        self.expected.discard(task.id)
        lost = next((name for name in task.after if name in self.refused), None)
        if lost is None:
            self.queue.add(task)
        else:
            self.refused[task.id] = f"depends on {lost!r}, which can never run"
        for waiting in self.held.pop(task.id, ()):
            self._admit(waiting)

    def _end(self) -> None:
        for groups in self.live.values():
            for group in list(groups):
                for task in group.ended():
                    self._end_task(task)
                if not group.left:
                    groups.remove(group)
                    self._end_group(group)

    def _end_task(self, task: QueuedTask) -> None:
        group, start = self.starts.pop(task.id)
        self.runs.append(TaskRun(task.id, group, task.arrival, start, self.now, task.must_end_by))
        self.queue.finish(task.id)

    def _end_group(self, group: LiveGroup) -> None:
        plan = group.plan
        self.groups.append(
            GroupRun(group.id, plan.device, group.worker, plan.members, plan.bytes, group.start, self.now, plan.why)
        )

    def _decide(self) -> None:
        """Let the policy decide until it preempts nothing more."""
        while self._decide_once().preempt:
            self._check_rest()
        self._check_rest()

    def _check_rest(self) -> None:
        """Report a policy that goes on deciding although nothing happens meanwhile."""
        state = self.now, len(self.arrivals), len(self.runs)
        self.restless = self.restless + 1 if state == self.decided else 0
        self.decided = state
        if self.restless > MOST_RESTLESS and self.queue:
            raise WeftError(
                f"{type(self.policy).__name__} has decided {self.restless} times at {self.now:g} s without coming to "
                f"rest, and {len(self.queue)} tasks are queued (the first is {next(iter(self.queue)).id!r}); "
                f"this is a fault of the policy"
            )

    def _decide_once(self) -> Decision:
        running = [group.state(self.now) for groups in self.live.values() for group in groups]
        machine = MachineState(tuple(self.devices.values()), self.now, tuple(self.users.values()))
        decision = decide(self.policy, self.queue, running, machine)
        self.decisions += 1
        self.again = math.inf if decision.again is None else decision.again
        self._refuse(decision)
        for start in decision.start:
            self._start(start)
        self._preempt(decision)
        return decision

    def _refuse(self, decision: Decision) -> None:
        for name, reason in decision.refuse.items():
            self.queue.drop(name)
            self.refused[name] = reason

    def _preempt(self, decision: Decision) -> None:
        """Groups return to the queue with what is left of them; they save their state within the event."""
        for groups in self.live.values():
            for group in [one for one in groups if one.id in decision.preempt]:
                groups.remove(group)
                self._end_group(group)
                for task in group.left:
                    self._put_back(task, max(group.progress, 0.0))

    def _put_back(self, task: QueuedTask, progress: float) -> None:
        """Queue what is left of a task; what is predicted of it shrinks by the same progress.

        Its user has not had what is left. Its lane was served until now: it does not rise for the time that it ran.
        """
        if task.id in self.actual:
            self.actual[task.id] = task.rest(progress)
            task = self.predicted[task.id]
        left = task.rest(progress)
        self.predicted[task.id] = left
        self.queue.put_back(left)
        self._count(left, -left.work)

    def _start(self, start: GroupStart) -> None:
        taken = [self.queue.take(name) for name in start.members]
        tasks = [self.actual.get(task.id, task) for task in taken]
        device = self.devices[start.device]
        self.devices[start.device] = replace(device, started=device.started + len(tasks))
        groups = self.live[start.device]
        used = {group.worker for group in groups}
        worker = next(number for number in range(len(used) + 1) if number not in used)
        setup = 0.0 if start.warm else -self.conditions.cold_start_seconds
        name = f"{start.device}/{device.started}"
        made = LiveGroup(
            name, start, worker, self.now, tasks, self._model, progress=setup, as_planned=bool(self.actual)
        )
        groups.append(made)
        self.peak_bytes = max(self.peak_bytes, sum(group.plan.bytes for group in groups))
        for task in taken:
            self.starts[task.id] = (made.id, self.starts.get(task.id, ("", self.now))[1])
            self._count(task, task.work)

    @property
    def _model(self) -> Interference:
        return self.conditions.interference

    def _count(self, task: QueuedTask, seconds: float) -> None:
        """Charge device-seconds of a task to its user, whose lane is served now."""
        share = self.users.get(task.user, UserShare(task.user))
        last = {**share.last_start, lane_name(lane_key(task)): self.now}
        self.users[task.user] = UserShare(task.user, share.device_seconds + seconds, last)

    def _update_rates(self) -> None:
        for name, groups in self.live.items():
            others = [Load(self.conditions.background)]
            slowdowns = self._model.slowdowns([*(group.load for group in groups), *others])
            over = sum(group.plan.bytes for group in groups) > self.devices[name].task_bytes
            for group, slowdown in zip(groups, slowdowns, strict=False):
                group.rate = 1.0 / (slowdown * (self._model.paging if over else 1.0))


def _check(tasks: Sequence[QueuedTask], actual: Iterable[str]) -> None:
    """Ids are distinct and dependencies do not form a circle."""
    names = {task.id for task in tasks}
    unknown = next((name for name in actual if name not in names), None)
    if unknown is not None:
        raise SpecError(f"task {unknown!r} is said to turn out otherwise, and is not in the queue; name a task that is")
    for task in tasks:
        for name in task.after:
            if name not in names:
                raise SpecError(f"task {task.id!r}: after={name!r} is not in the queue; name a task that is")
    TaskQueue.of(tasks)
