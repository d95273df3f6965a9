"""What every scheduling policy must keep, checked at each decision while a queue is worked off by hand."""

from __future__ import annotations

from dataclasses import replace

from weft.sched.admission import needed_bytes, rank_places
from weft.sched.policies import MPSNoAdmission
from weft.sched.queue_state import MachineState, QueueDecision, RunningGroup
from weft.sched.task_queue import TaskQueue


def work_off(policy, tasks, devices) -> list[QueueDecision]:
    """Run ``policy`` until the queue is empty, ending the group that is due first at each step; check every decision.

    The decisions are made from plain lists, as another process would pass them, not from an incremental queue.
    """
    return _Checked(policy, tasks, devices).until_empty()


class _Checked:
    def __init__(self, policy, tasks, devices):
        self.policy, self.queued = policy, {task.id: task for task in tasks}
        self.all = dict(self.queued)
        self.devices = {device.name: device for device in devices}
        self.running: list[RunningGroup] = []
        self.done: set[str] = set()
        self.refused: set[str] = set()
        self.now = max((task.arrival for task in tasks), default=0.0)
        self.decisions: list[QueueDecision] = []

    def until_empty(self):
        steps = 0
        while self.queued or self.running:
            self.decide()
            self.end_one()
            steps += 1
            assert steps <= 3 * len(self.all) + 3, "the queue is not worked off"
        assert self.done | self.refused == set(self.all)
        assert not self.done & self.refused
        return self.decisions

    def decide(self):
        machine = MachineState(tuple(self.devices.values()), self.now)
        tasks = list(self.queued.values())
        decision = self.policy.schedule(tasks, list(self.running), machine)
        assert decision == self.policy.schedule(tasks, list(self.running), machine), "not deterministic"
        self.decisions.append(decision)
        self.check_reasons(decision)
        self.check_refusals(decision)
        for start in decision.start:
            self.start(start)
        self.check_limits()
        assert decision.start or self.running or not self.queued, "nothing runs and nothing starts"

    def check_reasons(self, decision):
        queue = TaskQueue.of(self.queued.values(), self.running)
        for name in self.queued:
            if name not in decision.started:
                why = decision.refuse.get(name) or queue.blocked_by(name) or decision.reason(name)
                assert why, f"no reason why {name} waits"

    def check_refusals(self, decision):
        assert not set(decision.refuse) & set(decision.started)
        for name in decision.refuse:
            task = self.queued.pop(name)
            assert not self.fits_alone(task) or set(task.after) & (self.refused | set(decision.refuse))
        self.refused |= set(decision.refuse)

    def fits_alone(self, task):
        needed = needed_bytes(task.bytes)
        return rank_places(task.ranks, [*self.devices.values()], lambda one, count: count * needed <= one.task_bytes)

    def start(self, start):
        tasks = [self.queued.pop(name) for name in start.members]
        for task in tasks:
            assert set(task.after) <= self.done, f"{task.id} starts before {task.after}"
            assert len(tasks) == 1 or (task.joinable and task.join_key == tasks[0].join_key), "fused what may not be"
        assert start.why
        assert len(start.places) == max(task.ranks for task in tasks), "started partially"
        assert start.places[0] == start.device
        device = self.devices[start.device]
        self.devices[start.device] = replace(device, started=device.started + len(tasks))
        name, ends = f"g{len(self.done)}-{start.members[0]}", self.now + start.seconds
        where = {"kind": tasks[0].kind, "devices": start.devices}
        self.running.append(
            RunningGroup(name, start.device, start.members, start.bytes, start.utilisation, self.now, ends, **where)
        )

    def check_limits(self):
        for device in self.devices.values():
            groups = [group for group in self.running if device.name in group.places]
            taken = {group.id: device.workers_for(group.places.count(device.name)) for group in groups}
            assert sum(taken.values()) <= device.workers, "more groups than workers"
            trainings = sum(taken[group.id] for group in groups if group.kind == "training")
            assert trainings <= device.workers - device.inference_workers, "a training has a worker kept for inference"
            if not isinstance(self.policy, MPSNoAdmission):
                held = sum(group.bytes * group.places.count(device.name) for group in groups)
                assert held <= device.task_bytes, "over budget"
                own = [max(self.all[m].bytes for m in group.members) for group in groups]
                assert all(group.bytes >= needed_bytes(size) for group, size in zip(groups, own, strict=True))

    def end_one(self):
        if self.running:
            first = min(self.running, key=lambda group: (group.ends, group.id))
            self.running.remove(first)
            self.now = max(self.now, first.ends)
            self.done |= set(first.members)
