"""A discrete-event simulator: runs a policy over a queue in continuous time, without a device.

Between two events every group advances at a constant rate, which the interference model computes from the demands of
the groups on its device. Events are arrivals and ends of tasks and the times that a policy requests, after each of
which it decides, and the times at which a task has started and begins to use the device. A group holds its worker and
its bytes until its last member ends. The ranks of a sharded task advance together, as fast as the slowest of them.
Equal input gives an equal result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core.errors import SpecError, WeftError
from weft.sched.admission import Policy, decide
from weft.sched.device_plan import fused_cost, slowdown_limit
from weft.sched.interference import DeviceLoad, Interference, mean_turn
from weft.sched.queue_state import (
    DeviceState,
    GroupStart,
    MachineState,
    QueueDecision,
    QueuedTask,
    RunningGroup,
)
from weft.sched.task_queue import TaskQueue, UserShares

ROUNDING = 1e-9


@dataclass
class LiveGroup:
    """Members advance together at ``rate`` (seconds of their own per second); each ends after its own seconds.

    A member uses nothing of the device before its ``start_seconds`` have passed. ``as_planned``: policies see the end
    and the utilisation that were predicted, not the actual ones.
    """

    id: str
    plan: GroupStart
    worker: int
    start: float
    tasks: list[QueuedTask]  # those that have not ended, longest first
    model: Interference
    progress: float = 0.0
    rate: float = 1.0
    as_planned: bool = False
    load: DeviceLoad = field(init=False)

    def __post_init__(self) -> None:
        self.tasks.sort(key=lambda task: -task.seconds)
        self._update_load()

    def advance(self, seconds: float) -> list[QueuedTask]:
        """Let time pass; the members that end by then, which are removed."""
        self.progress += seconds * self.rate
        done: list[QueuedTask] = []
        while self.tasks and self.tasks[-1].seconds - self.progress <= ROUNDING * max(1.0, self.tasks[-1].seconds):
            done.append(self.tasks.pop())
        self._update_load()
        return done

    def _update_load(self) -> None:
        training = [task for task in self.tasks if not self._is_starting(task)]
        fused = self.model.fused_work if len(self.plan.members) > 1 else 1.0
        demand = math.fsum(task.demand for task in training) * fused
        self.load = DeviceLoad(demand, mean_turn(task.turn_seconds for task in training))

    def _is_starting(self, task: QueuedTask) -> bool:
        return task.start_seconds > 0 and task.start_seconds - self.progress > ROUNDING * max(1.0, task.start_seconds)

    @property
    def seconds_to_next_change(self) -> float:
        """Until a member ends or has started, at the present rate."""
        marks = [task.start_seconds for task in self.tasks if self._is_starting(task)]
        return max(min([self.tasks[-1].seconds, *marks]) - self.progress, 0.0) / self.rate

    def state(self, now: float) -> RunningGroup:
        """What a policy sees of it."""
        first = self.tasks[0]
        ends, utilisation = now + max(first.seconds - self.progress, 0.0) / self.rate, first.utilisation
        if self.as_planned:
            ends, utilisation = self.start + self.plan.seconds, self.plan.utilisation
        elif len(self.plan.members) > 1:  # the mean of those that have not ended, over the time that they take alone
            start, work = max(task.start_seconds for task in self.tasks), math.fsum(task.work for task in self.tasks)
            utilisation = fused_cost(first.seconds, start, work, self.model)[1]
        return RunningGroup(
            id=self.id,
            device=self.plan.device,
            members=tuple(task.id for task in self.tasks),
            bytes=self.plan.bytes,
            utilisation=utilisation,
            started=self.start,
            ends=ends,
            graph=first.graph,
            kind=first.kind,
            slowdown_limit=slowdown_limit(first, now),
            priority=max(task.priority for task in self.tasks),
            start_seconds=self.plan.start_seconds,
            turn_seconds=self.plan.turn_seconds if self.as_planned else self.load.turn,
            users=tuple(task.user for task in self.tasks),
            devices=self.plan.devices,
        )

    def on(self, device: str) -> tuple[int, DeviceLoad]:
        """The bytes that its ranks on ``device`` hold, and how they use it."""
        ranks = self.plan.places.count(device)
        return ranks * self.plan.bytes, DeviceLoad(ranks * self.load.demand, self.load.turn)


# ---- The outcome


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task: when it arrived, was started and ended."""

    id: str
    group: str
    arrival: float
    start: float
    end: float
    due: float = math.inf


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """One group: the worker it ran on, its members, its bytes, from when to when.

    ``places``: the device of every rank, each of which held ``bytes``.
    """

    id: str
    device: str
    worker: int
    members: tuple[str, ...]
    bytes: int
    start: float
    end: float
    why: str = ""
    places: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", self.places or (self.device,))


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


@dataclass
class Simulation:
    """A simulated queue. ``busy_seconds``: seconds of a fully used device; ``peak_bytes``: of one device."""

    policy: str
    tasks: list[TaskRun] = field(default_factory=list)
    groups: list[SimulatedGroup] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
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
        completion = [run.end - run.arrival for run in self.tasks]
        queuing = [run.start - run.arrival for run in self.tasks]
        span = self.makespan * self.devices
        return Metrics(
            tasks=len(self.tasks),
            refused=len(self.refused),
            makespan=self.makespan,
            mean_jct=math.fsum(completion) / len(completion) if completion else 0.0,
            p95_jct=percentile(completion, 0.95),
            mean_queuing=math.fsum(queuing) / len(queuing) if queuing else 0.0,
            p95_queuing=percentile(queuing, 0.95),
            utilisation=self.busy_seconds / span if span else 0.0,
            peak_bytes=self.peak_bytes,
            late=sum(run.end > run.due + 1e-9 for run in self.tasks),
            decisions=self.decisions,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures, every group, and what was refused."""
        return {
            "policy": self.policy,
            "metrics": asdict(self.metrics()),
            "groups": [asdict(group) for group in self.groups],
            "refused": self.refused,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


# ---- The simulation

MOST_RESTLESS = 1000  # decisions in a row at one time, with nothing that ends or arrives, before a policy is at fault


@dataclass(frozen=True)
class Conditions:
    """What the simulated device is like: how groups interfere.

    ``background``: the share of the device that is always busy with work outside the queue.
    """

    interference: Interference = field(default_factory=Interference)
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
    run = _Run(policy, list(tasks), devices, conditions or Conditions(), actual)
    run.outcome.policy = name or type(policy).__name__
    run.until_done()
    return run.outcome


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        policy: Policy,
        tasks: list[QueuedTask],
        devices: Sequence[DeviceState],
        conditions: Conditions,
        actual: Iterable[QueuedTask],
    ) -> None:
        self.policy, self.conditions, self.model = policy, conditions, conditions.interference
        self.predicted = {task.id: task for task in tasks}
        self.actual = {task.id: task for task in actual}
        for name in self.actual:
            if name not in self.predicted:
                raise SpecError(f"actual task {name!r} is not in the queue; name a task that is")
        for task in tasks:
            for name in task.after:
                if name not in self.predicted:
                    raise SpecError(f"task {task.id!r}: after={name!r} is not in the queue; name a task that is")
        TaskQueue.of(tasks)  # ids are distinct, and dependencies do not form a circle
        self.devices = {device.name: device for device in devices}
        self.arrivals = sorted(tasks, key=lambda task: task.arrival)[::-1]  # the next task last
        self.expected = {task.id for task in tasks}
        self.held: dict[str, list[QueuedTask]] = {}  # tasks that arrive before something they depend on
        self.queue = TaskQueue()
        # By device: a sharded task is in the list of every device that it has ranks on.
        self.live: dict[str, list[LiveGroup]] = {device.name: [] for device in devices}
        self.shares = UserShares()
        self.now = self.arrivals[-1].arrival if self.arrivals else 0.0
        self.starts: dict[str, tuple[str, float]] = {}
        budget = max(device.task_bytes for device in devices)
        self.outcome = Simulation("", budget_bytes=budget, devices=len(devices))
        self.again = math.inf  # when the policy decides even if nothing has happened
        self.restless = 0  # decisions since something ended or arrived or time passed
        self.decided: tuple[float, int, int] | None = None  # time, arrivals and ends at the last decision

    def until_done(self) -> None:
        """Run the events until nothing is queued, running or still to arrive."""
        while self.arrivals or self.queue or any(self.live.values()):
            before = len(self.arrivals), len(self.outcome.tasks)
            self._advance()
            if self.queue and (self.now >= self.again or before != (len(self.arrivals), len(self.outcome.tasks))):
                while self._decide().preempt:
                    pass
            rates: dict[str, float] = {}
            for device, groups in self.live.items():
                loads = [*(group.on(device)[1] for group in groups), DeviceLoad(self.conditions.background)]
                over = sum(group.on(device)[0] for group in groups) > self.devices[device].task_bytes
                for group, slowdown in zip(groups, self.model.slowdowns(loads), strict=False):
                    rate = 1.0 / (slowdown * (self.model.paging if over else 1.0))
                    group.rate = rates[group.id] = min(rate, rates.get(group.id, math.inf))

    @property
    def _running(self) -> list[LiveGroup]:
        """Every group once."""
        return list({group.id: group for groups in self.live.values() for group in groups}.values())

    def _advance(self) -> None:
        """Let time pass until the next event; tasks arrive and end."""
        seconds = min((group.seconds_to_next_change for group in self._running), default=math.inf)
        if self.queue:
            seconds = min(seconds, max(self.again - self.now, 0.0))
        if self.arrivals:
            seconds = min(seconds, max(self.arrivals[-1].arrival - self.now, 0.0))
        if seconds == math.inf:
            raise self._fault("starts nothing although nothing runs")
        self.now += seconds
        while self.arrivals and self.arrivals[-1].arrival <= self.now:
            self._admit(self.arrivals.pop())
        for device, groups in self.live.items():
            self.outcome.busy_seconds += seconds * min(math.fsum(group.on(device)[1].demand for group in groups), 1.0)
        for group in self._running:
            for task in group.advance(seconds):
                name, start = self.starts.pop(task.id)
                self.outcome.tasks.append(TaskRun(task.id, name, task.arrival, start, self.now, task.must_end_by))
                self.queue.finish(task.id)
            if not group.tasks:
                self._remove(group)

    def _remove(self, group: LiveGroup) -> None:
        """Record a group that has ended or was preempted."""
        plan = group.plan
        for device in set(plan.places):
            self.live[device] = [other for other in self.live[device] if other is not group]
        where, span = (plan.device, group.worker), (group.start, self.now)
        self.outcome.groups.append(
            SimulatedGroup(group.id, *where, plan.members, plan.bytes, *span, plan.why, plan.places)
        )

    def _fault(self, what: str) -> WeftError:
        return WeftError(
            f"{type(self.policy).__name__} {what}, and {len(self.queue)} tasks are queued (the first is "
            f"{next(iter(self.queue)).id!r}); this is a fault of the policy"
        )

    def _admit(self, task: QueuedTask) -> None:
        """Queue a task once everything it depends on has arrived."""
        missing = next((name for name in task.after if name in self.expected), None)
        if missing is not None:
            self.held.setdefault(missing, []).append(task)
            return
        self.expected.discard(task.id)
        lost = next((name for name in task.after if name in self.outcome.refused), None)
        if lost is None:
            self.queue.add(task)
        else:
            self.outcome.refused[task.id] = f"depends on {lost!r}, which can never run"
        for waiting in self.held.pop(task.id, ()):
            self._admit(waiting)

    def _decide(self) -> QueueDecision:
        """Let the policy decide once, and carry the decision out."""
        running = [group.state(self.now) for group in self._running]
        machine = MachineState(tuple(self.devices.values()), self.now, self.shares.with_running({}))
        decision = decide(self.policy, self.queue, running, machine)
        self.outcome.decisions += 1
        self.again = math.inf if decision.again is None else decision.again
        for name, reason in decision.refuse.items():
            self.queue.drop(name)
            self.outcome.refused[name] = reason
        for start in decision.start:
            self._start(start)
        for group in [group for group in self._running if group.id in decision.preempt]:  # saved within the event
            self._remove(group)
            for task in group.tasks:
                # Queue the rest of a preempted task; what is predicted of it shrinks by the same progress.
                progress = max(group.progress, 0.0)
                if task.id in self.actual:
                    self.actual[task.id] = task.rest(progress)
                rest = self.predicted[task.id].rest(progress)
                self.predicted[task.id] = rest
                self.queue.put_back(rest)
                self._charge(rest, -rest.work)
        state = self.now, len(self.arrivals), len(self.outcome.tasks)
        self.restless = self.restless + 1 if state == self.decided else 0
        self.decided = state
        if self.restless > MOST_RESTLESS and self.queue:
            raise self._fault(f"has decided {self.restless} times at {self.now:g} s without coming to rest")
        return decision

    def _start(self, start: GroupStart) -> None:
        taken = [self.queue.take(name) for name in start.members]
        device = self.devices[start.device]
        self.devices[start.device] = replace(device, started=device.started + len(taken))
        used = {group.worker for name in start.places for group in self.live[name]}
        group = LiveGroup(
            id=f"{start.device}/{device.started}",
            plan=start,
            worker=next(number for number in range(len(used) + 1) if number not in used),
            start=self.now,
            tasks=[self.actual.get(task.id, task) for task in taken],
            model=self.model,
            as_planned=bool(self.actual),
        )
        for name in Counter(start.places):
            self.live[name].append(group)
            self.outcome.peak_bytes = max(self.outcome.peak_bytes, sum(each.on(name)[0] for each in self.live[name]))
        for task in taken:
            self.starts[task.id] = (group.id, self.starts.get(task.id, ("", self.now))[1])
            self._charge(task, task.work)

    def _charge(self, task: QueuedTask, seconds: float) -> None:
        """Charge device-seconds of a task to its user, whose lane is served now."""
        self.shares.charge(task.user, seconds)
        self.shares.started(task, self.now)
