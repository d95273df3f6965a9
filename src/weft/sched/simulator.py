"""A discrete-event simulator: runs a policy over a queue in continuous time, without a device.

Between two events every group advances at a constant rate, given by the interference model from the demands of the
groups on its device. Events are arrivals and ends of tasks and the moments that a policy asks for, after each of which
it decides, and the moments at which a task has started and begins to ask something of the device. A group holds its
worker and its bytes until its last member ends. Equal input gives an equal result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core.errors import SpecError, WeftError
from weft.sched.admission import Policy, decide
from weft.sched.device_plan import fused_cost, slowdown_limit
from weft.sched.interference import Interference, Load, mean_turn
from weft.sched.queue_state import Decision, DeviceState, GroupStart, MachineState, QueuedTask, RunningGroup, UserShare
from weft.sched.task_queue import TaskQueue, lane_key, lane_name

# ---- A running group in the simulator: its progress, what it asks of the device now, and when that changes.

ROUNDING = 1e-9


@dataclass
class LiveGroup:
    """Members advance together at ``rate`` (seconds of their own per second); each ends after its own seconds.

    A member asks nothing of the device before its ``start_seconds`` have passed.
    ``as_planned``: policies are told the end and the utilisation that were predicted, not those that are to be.
    """

    id: str
    plan: GroupStart
    worker: int
    start: float
    left: list[QueuedTask]  # longest first
    model: Interference
    progress: float = 0.0
    rate: float = 1.0
    as_planned: bool = False
    load: Load = field(init=False)

    def __post_init__(self) -> None:
        self.left.sort(key=lambda task: -task.seconds)
        self._update_load()

    @property
    def _fused(self) -> float:
        return self.model.fused_work if len(self.plan.members) > 1 else 1.0

    def _update_load(self) -> None:
        asking = [task for task in self.left if not self._starting(task)]
        demand = math.fsum(task.demand for task in asking) * self._fused
        self.load = Load(demand, mean_turn(task.turn_seconds for task in asking))

    def _starting(self, task: QueuedTask) -> bool:
        return task.start_seconds > 0 and task.start_seconds - self.progress > ROUNDING * max(1.0, task.start_seconds)

    @property
    def seconds_to_next_change(self) -> float:
        """Until a member ends or has started, at the present rate."""
        marks = [task.start_seconds for task in self.left if self._starting(task)]
        return max(min([self.left[-1].seconds, *marks]) - self.progress, 0.0) / self.rate

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.progress += seconds * self.rate
        self._update_load()

    def ended(self) -> list[QueuedTask]:
        """The members that end now, removed."""
        done: list[QueuedTask] = []
        while self.left and self.left[-1].seconds - self.progress <= ROUNDING * max(1.0, self.left[-1].seconds):
            done.append(self.left.pop())
        if done:
            self._update_load()
        return done

    @property
    def _mean_demand(self) -> float:
        """Of the members that are left, over the time that they take alone on the device."""
        first = self.left[0]
        if len(self.plan.members) == 1:
            return first.utilisation
        start, work = max(task.start_seconds for task in self.left), math.fsum(task.work for task in self.left)
        return fused_cost(first.seconds, start, work, self.model)[1]

    def state(self, now: float) -> RunningGroup:
        """What a policy sees of it."""
        first = self.left[0]
        ends = now + max(first.seconds - self.progress, 0.0) / self.rate
        if self.as_planned:
            ends = self.start + self.plan.seconds
        return RunningGroup(
            id=self.id,
            device=self.plan.device,
            members=tuple(task.id for task in self.left),
            bytes=self.plan.bytes,
            utilisation=self.plan.utilisation if self.as_planned else self._mean_demand,
            started=self.start,
            ends=ends,
            graph=first.graph,
            kind=first.kind,
            slowdown_limit=slowdown_limit(first, now),
            priority=max(task.priority for task in self.left),
            start_seconds=self.plan.start_seconds,
            turn_seconds=self.plan.turn_seconds if self.as_planned else self.load.turn,
        )


# ---- The outcome of a simulated queue: when each task and group ran, and the figures that compare policies.


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task: when it arrived, was started and ended."""

    id: str
    group: str
    arrival: float
    start: float
    end: float
    due: float = math.inf

    @property
    def completion_seconds(self) -> float:
        """Job completion time: from arrival to end."""
        return self.end - self.arrival

    @property
    def queuing_seconds(self) -> float:
        """From arrival to start."""
        return self.start - self.arrival


@dataclass(frozen=True, slots=True)
class GroupRun:
    """One group: the worker it ran on, its members, its bytes, from when to when."""

    id: str
    device: str
    worker: int
    members: tuple[str, ...]
    bytes: int
    start: float
    end: float
    why: str = ""


@dataclass(frozen=True)
class Metrics:
    """The figures of one simulation. Seconds, bytes, and the utilisation as a share of all devices."""

    tasks: int
    refused: int
    makespan: float
    mean_jct: float
    p95_jct: float
    mean_queuing: float
    p95_queuing: float
    utilisation: float
    peak_bytes: int
    late: int
    decisions: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Simulation:
    """A simulated queue. ``busy_seconds``: seconds of a fully used device; ``peak_bytes``: of one device."""

    policy: str
    tasks: tuple[TaskRun, ...]
    groups: tuple[GroupRun, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    budget_bytes: int = 0
    devices: int = 1
    busy_seconds: float = 0.0
    peak_bytes: int = 0
    decisions: int = 0

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        if not self.tasks:
            return 0.0
        return max(run.end for run in self.tasks) - min(run.arrival for run in self.tasks)

    def metrics(self) -> Metrics:
        """The figures."""
        completion = [run.completion_seconds for run in self.tasks]
        queuing = [run.queuing_seconds for run in self.tasks]
        span = self.makespan * self.devices
        return Metrics(
            tasks=len(self.tasks),
            refused=len(self.refused),
            makespan=self.makespan,
            mean_jct=_mean(completion),
            p95_jct=percentile(completion, 0.95),
            mean_queuing=_mean(queuing),
            p95_queuing=percentile(queuing, 0.95),
            utilisation=self.busy_seconds / span if span else 0.0,
            peak_bytes=self.peak_bytes,
            late=sum(run.end > run.due + 1e-9 for run in self.tasks),
            decisions=self.decisions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures, every group, and what was refused."""
        groups = [{**asdict(group), "members": list(group.members)} for group in self.groups]
        metrics = self.metrics().to_dict()
        return {"policy": self.policy, "metrics": metrics, "groups": groups, "refused": dict(self.refused)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


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
