"""Random small queues by seed, and a policy that checks each of its decisions while the simulator runs them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.sched.queues import GIB
from weft.sched.admission import Policy, Tasks, needed_bytes
from weft.sched.policies import MPSNoAdmission
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.simulator import Simulation, simulate
from weft.sched.task_queue import TaskQueue

MAKES_WAY = "save a checkpoint"  # the reason of a task for which others are preempted


def random_case(seed: int, sharded: bool = False) -> tuple[list[QueuedTask], list[DeviceState]]:
    """One to twelve tasks of all kinds and one to three devices; the same for the same seed.

    ``sharded``: a third of the trainings have two ranks or more.
    """
    draw = random.Random(seed)
    tasks: list[QueuedTask] = []
    for number in range(draw.randint(1, 12)):
        tasks.append(_task(draw, number, [task.id for task in tasks]))
    draw.shuffle(tasks)  # dependencies may arrive later
    more = random.Random(f"ranks {seed}")
    if sharded:
        drawn = [(task, more.choice((1, 1, 1, 1, 2, 3)) if task.kind == "training" else 1) for task in tasks]
        tasks = [replace(task, ranks=ranks) for task, ranks in drawn]
    return tasks, [_device(draw, number) for number in range(draw.randint(1, 3))]


def _task(draw: random.Random, number: int, earlier: Sequence[str]) -> QueuedTask:
    inference = draw.random() < 0.3
    size, seconds = int(draw.choice((0.1, 1, 4, 7, 12, 24)) * GIB), draw.choice((0.0, 0.5, 3.0, 20.0, 100.0, 5000.0))
    start_seconds = seconds * draw.choice((0.0, 0.0, 0.1, 0.6))
    return QueuedTask(
        id=f"t{number}",
        bytes=size,
        seconds=seconds,
        graph=draw.choice(("", "a", "b")),
        join_key="" if inference else draw.choice(("", "", "k", "l")),
        shared_bytes=draw.choice((0, size // 2)),
        utilisation=draw.choice((0.0, 0.1, 0.4, 0.8, 1.0)) * (1.0 - start_seconds / seconds if seconds else 1.0),
        arrival=draw.choice((0.0, 0.0, 1.0, 1.0, 7.0, 50.0, 1300.0)),
        user=draw.choice(("ann", "bob", "cid")),
        priority=draw.choice((0, 0, 0, 1, 2, 5)),
        deadline=draw.choice((None, None, None, 30.0, 2000.0)),
        after=tuple(draw.sample(earlier, 1)) if earlier and draw.random() < 0.2 else (),
        kind="inference" if inference else "training",
        latency_target=draw.choice((None, 2.0, 60.0, 500.0)) if inference else None,
        attempts=int(draw.random() < 0.1),
        start_seconds=start_seconds,
        turn_seconds=draw.choice((0.0, 1e-5, 1e-3)),
    )


def _device(draw: random.Random, number: int) -> DeviceState:
    workers = draw.randint(1, 4)
    inference = draw.randrange(workers)
    return DeviceState(f"cuda:{number}", draw.choice((10, 26)) * GIB, draw.choice((0, GIB)), workers, inference)


@dataclass
class Watched:
    """A policy whose decisions are checked one by one."""

    policy: Policy
    leaves_at_once: bool = True  # groups that are preempted have left by the next decision
    wanted: str = ""  # the task for which groups have just been preempted
    passed: list[str] = field(default_factory=list)  # tasks that did not start in the place that was made for them
    preempted: int = 0

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """The decision of the policy, checked."""
        queue = TaskQueue.of(tasks, running)
        decision = self.policy.schedule(queue, running, machine)
        assert decision == self.policy.schedule(queue, running, machine), "equal input, another decision"
        for device in machine.devices:
            here = [group for group in running if device.name in group.places]
            self._check_room(device, here, [start for start in decision.start if device.name in start.places], queue)
        for start in decision.start:
            self._check_start(start, queue)
        self._check_way(decision)
        return decision

    def _check_room(
        self, device: DeviceState, here: Sequence[RunningGroup], starts: Sequence[GroupStart], queue: TaskQueue
    ) -> None:
        ranks = [one.places.count(device.name) for one in (*here, *starts)]
        workers = [device.workers_for(count) for count in ranks]
        assert sum(workers) <= device.workers, "more groups than workers"
        kinds = [group.kind for group in here] + [queue[start.members[0]].kind for start in starts]
        trainings = sum(taken for taken, kind in zip(workers, kinds, strict=True) if kind == "training")
        assert trainings <= device.workers - device.inference_workers, "a training has a worker kept for inference"
        if not isinstance(self.policy, MPSNoAdmission):
            held = sum(one.bytes * count for one, count in zip((*here, *starts), ranks, strict=True))
            assert held <= device.task_bytes, "over the budget"

    def _check_start(self, start: GroupStart, queue: TaskQueue) -> None:
        members = [queue[name] for name in start.members]
        assert {len(start.places)} == {task.ranks for task in members}, "started partially"
        assert not any(queue.blocked_by(name) for name in start.members), "started before what it waits for"
        assert len({(task.kind, task.join_key) for task in members}) == 1, "fused what may not be"
        assert 0.0 <= start.utilisation <= 1.0, "keeps more than the device busy"
        if not isinstance(self.policy, MPSNoAdmission):
            assert start.bytes >= max(needed_bytes(task.bytes) for task in members)

    def _check_way(self, decision: QueueDecision) -> None:
        if self.leaves_at_once and self.wanted and self.wanted not in decision.started:
            self.passed.append(self.wanted)
        waiting = [name for name, why in decision.wait.items() if MAKES_WAY in why]
        assert len(waiting) <= 1, "a place is made for one task"
        assert waiting or not decision.preempt, "nobody is preempted for nothing"
        self.wanted = waiting[0] if waiting else ""
        self.preempted += len(decision.preempt)


def run_checked(policy: Policy, seed: int, sharded: bool = False) -> tuple[Simulation, Watched]:
    """Simulate the queue of ``seed`` and check its decisions and its outcome."""
    tasks, devices = random_case(seed, sharded)
    watched = Watched(policy)
    run = simulate(watched, tasks, devices, name="watched")
    assert run == simulate(policy, tasks, devices, name="watched"), "equal input, another run"
    assert {one.id for one in run.tasks} | set(run.refused) == {task.id for task in tasks}
    assert len(run.tasks) + len(run.refused) == len(tasks)
    starts, ends = ({one.id: getattr(one, name) for one in run.tasks} for name in ("start", "end"))
    for task in tasks:
        if task.id in starts:
            assert starts[task.id] >= task.arrival
            assert all(starts[task.id] >= ends[name] for name in task.after), "started before what it waits for"
    return run, watched
