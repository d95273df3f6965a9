"""Groups on their way to a worker: their tasks are claimed, and the group is sent."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from weft.core.errors import InputError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.report.group_plan import group_plan
from weft.sched.admission import needed_bytes
from weft.sched.interference import mean_turn
from weft.sched.policies.device_plan import slowdown_limit
from weft.sched.queue_state import GroupStart
from weft.serve.queue.queue_groups import Group
from weft.serve.queue.task_states import QueueError, QueueTask
from weft.serve.supervision.queue_views import (
    estimate_key,
    is_inference,
    own_names,
    queued_task,
    without_twins,
    worker_settings,
)
from weft.serve.supervision.supervisor_state import Active, SupervisorState, unless_lost
from weft.serve.supervision.worker_pool import WorkerPool
from weft.serve.workers.source_files import unchanged
from weft.serve.workers.worker_process import WorkerProcess

WEIGHTS = "model.safetensors"


class GroupStarts:
    """Starts groups on idle workers."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool

    def start(self, start: GroupStart, tasks: Sequence[QueueTask]) -> None:
        """Start a group that a policy has chosen."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            for task in tasks:
                self._state.why[task.id] = "waits for a free worker"
            return
        chosen = without_twins(tasks)
        alone = len(chosen) == 1
        name = uuid.uuid4().hex[:12]
        group = Group(
            id=name,
            device=start.device,
            worker=worker.name,
            members=tuple(task.id for task in chosen),
            folder=chosen[0].id if alone else f"group-{name}",
            bytes=start.bytes,
            seconds=start.seconds,
            why=start.why,
            started=time.time(),
        )
        self.launch(group, worker, chosen, start.utilisation)

    def launch(
        self,
        group: Group,
        worker: WorkerProcess,
        tasks: Sequence[QueueTask],
        utilisation: float,
        cancelled: Sequence[QueueTask] = (),
    ) -> bool:
        """Claim ``tasks`` and send the group to ``worker``; ``cancelled`` members have left it and are not claimed.

        False, and nothing was started, if a task has changed since the decision.
        """
        claimant, lease = self._state.claimant(worker), self._state.options.lease_seconds
        if self._replanned(tasks):
            return False
        shares, now = self._state.shares, time.time()
        for task in tasks:
            shares.started(queued_task(task), now)
        had = [shares.of(user) for user in dict.fromkeys(task.user for task in tasks)]
        try:
            claimed = self._state.db.claim_all([task.id for task in tasks], claimant, lease, group, had)
        except QueueError:  # cancelled or paused since the decision
            self._state.dirty = True
            return False
        everyone = {task.id: task for task in (*claimed, *cancelled)}
        infers = is_inference(claimed[0])
        active = Active(
            group=group,
            worker=worker,
            attempts={task.id: task.attempts for task in claimed},
            users={task.id: task.user for task in claimed},
            utilisation=utilisation,
            graph=str((claimed[0].plan or {}).get("graph", "")),
            heard=time.monotonic(),
            priority=max(task.priority for task in claimed),
            kind=claimed[0].spec.get("kind", "training"),
            start_seconds=0.0 if infers else self._state.setup_of(group.device),
            slowdown_limit=slowdown_limit(queued_task(claimed[0]), time.time()),
            turn_seconds=mean_turn(queued_task(task).turn_seconds for task in claimed),
        )
        self._state.begin(active)
        worker.group = group.id
        self._state.started_on[group.device] = self._state.started_on.get(group.device, 0) + len(claimed)
        self._state.counters.groups_started += 1
        self._state.counters.tasks_started += len(claimed)
        runs, members = self._state.options.runs, [everyone[name] for name in group.members]
        if infers:
            self._infer(group, worker, members[0])
            return True
        split = [
            {"from": str(runs / origin), "member": task.id, "into": str(runs / task.id)}
            for task in members
            if (origin := (task.plan or {}).get("from")) is not None
        ]
        limits = [task.spec["budget"] for task in claimed if task.spec.get("budget") is not None]
        budget = min([_allowed(group, claimed), *limits]) if len(claimed) == 1 else group.bytes
        plan = None if cancelled or split else self._plan_of(members, group.bytes)
        worker.send(
            "run",
            group=group.id,
            plan=plan,
            limit=budget + self._state.options.overrun_bytes,
            tasks=[worker_settings(task) for task in members],
            names=own_names(members),
            out=str(runs / group.folder),
            budget=budget,
            checkpoint_every=self._state.options.checkpoint_seconds,
            split=split,
            cancel=[task.id for task in cancelled],
        )
        return True

    def _replanned(self, tasks: Sequence[QueueTask]) -> bool:
        """Whether tasks were queued again because a graph or a model was written anew since they were planned."""
        stale = [task for task in tasks if not task.attempts and not unchanged((task.plan or {}).get("files"))]
        for task in stale:
            unless_lost(self._state.db.unplan, task.id)
        self._state.dirty |= bool(stale)
        return bool(stale)

    def _infer(self, group: Group, worker: WorkerProcess, task: QueueTask) -> None:
        """Send an inference task, with the file of the weights that it is about."""
        options, infer = self._state.options, task.spec["infer"]
        budget = min(group.bytes, task.spec.get("budget") or group.bytes)
        worker.send(
            "infer",
            group=group.id,
            task=worker_settings(task),
            names=own_names([task]),
            weights=weights_file(self._state, task),
            nodes=infer.get("nodes"),
            out=str(options.runs / group.folder),
            budget=budget,
            limit=budget + options.overrun_bytes,
        )

    def _plan_of(self, members: Sequence[QueueTask], total_bytes: int) -> dict[str, Any] | None:
        """The group's plan as plain data; None if the worker has to make it: after a restart, or of a user's model."""
        known = self._state.runnable.get(estimate_key(members[0].spec))
        if known is None:
            return None
        try:
            tasks = [Task.from_dict(worker_settings(member)) for member in members]
            stats, alone = GraphStats.from_dict(known["stats"]), Plan.from_dict(known["plan"])
            return group_plan(tasks, stats, alone, total_bytes, Machine.from_dict(known["machine"])).to_dict()
        except InputError:
            return None  # the worker says what is wrong


def _allowed(group: Group, claimed: Sequence[QueueTask]) -> int:
    """The bytes that a task alone may take: its prediction and the margin, even if ``mps`` sets less aside."""
    return max(group.bytes, needed_bytes(int((claimed[0].plan or {}).get("bytes", 0))))


def weights_file(state: SupervisorState, task: QueueTask) -> str:
    """The file of the weights that an inference task is about."""
    infer = task.spec["infer"]
    if infer.get("of") is None:
        return str(infer["weights"])
    trained = state.db.get(infer["of"]).result or {}
    return str(state.options.runs / str(trained.get("folder", infer["of"])) / WEIGHTS)
