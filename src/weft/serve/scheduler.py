"""Which planned tasks start now, as a policy decides; it sees a preempted group that is to go on as one task."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from weft.sched.admission import Policy, decide, waits_for
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState, QueueDecision
from weft.serve.groups import Evictions, GroupStarts, Preempted, PreemptedGroups, weights_file
from weft.serve.queue_file import QueueTask
from weft.serve.state import (
    WAITS_ALONE,
    WAITS_FOR_SUSPECT,
    SupervisorState,
    is_inference,
    is_suspect,
    queued_task,
    unless_lost,
    worker_settings,
)
from weft.serve.worker_pool import PLANNER, WorkerPool

MOST_PLANNED = 5_000  # waiting tasks that a decision looks at
MOST_PREPARED = 8  # tasks whose weights are drawn ahead: as many as are fused whatever else runs


class Scheduler:
    """Starts what the policy of ``options`` chooses, and says of every other task why it waits."""

    def __init__(self, state: SupervisorState, pool: WorkerPool, evictions: Evictions) -> None:
        self._state, self._pool, self._evictions = state, pool, evictions
        self._starts = GroupStarts(state, pool)
        self._groups = PreemptedGroups(state, pool, evictions, self._starts)
        self.policy: Policy = find_policy(state.options.policy)
        self._known: dict[str, QueueTask] = {}  # planned tasks as last read

    def schedule(self) -> None:
        """Start what can start now."""
        waiting = self._planned()
        self._state.why = {}
        if not self._pool.room:
            self._state.why = {task.id: "waits for the first worker to start" for task in waiting}
            return
        running = {name for active in self._state.active.values() for name in active.members}
        self._state.shares.see([task.user for task in waiting] + list(self._being_had()))
        groups = self._groups.ready()
        ready = [
            task for task in waiting if not self._groups.has(task.id) and not self._held_back(task, task.id in running)
        ]
        groups, ready, suspect = self._limit_to_suspect(groups, ready)
        decision = self._decide(groups, ready)
        for name, reason in decision.refuse.items():
            if name in groups:
                self._groups.take_apart(groups[name], reason)
            else:
                unless_lost(self._state.db.refuse, name, reason)
        for preempted in decision.preempt:
            self._evictions.preempt(self._state.active[preempted])
        starts = list(decision.start)
        if suspect and any(start.members[0] == suspect for start in starts):  # nothing else starts with it
            starts = starts[:1] if starts[0].members[0] == suspect else [s for s in starts if s.members[0] != suspect]
        for start in starts:
            if start.members[0] in groups:
                self._groups.resume(groups[start.members[0]], start)
            else:
                self._starts.start(start, [self._known[name] for name in start.members])
        started = set(decision.started)
        self._state.why |= {task.id: decision.reason(task.id) for task in ready if task.id not in started}
        for name, group in groups.items():
            if name not in started:
                self._state.why |= {task.id: decision.reason(name) for task in group.present}
        decided = {*started, *decision.refuse}
        still = {name: group for name, group in groups.items() if name not in decided}
        self._prefetch(still, [task for task in ready if task.id not in decided], decision)

    def _limit_to_suspect(
        self, groups: dict[str, Preempted], ready: list[QueueTask]
    ) -> tuple[dict[str, Preempted], list[QueueTask], str]:
        """What may start now if a server died while some of it ran, and the first suspect ("" for none).

        Suspects start one by one, in their turn, and nothing starts together with a suspect until it has saved a
        checkpoint or has run for a while.
        """
        suspects = [name for name, group in groups.items() if any(map(is_suspect, group.present))]
        suspects += [task.id for task in ready if is_suspect(task)]
        tried = any(active.alone_until > time.monotonic() for active in self._state.active.values())
        if not suspects and not tried:
            return groups, ready, ""
        for task in (*ready, *(task for group in groups.values() for task in group.present)):
            self._state.why[task.id] = WAITS_ALONE if is_suspect(task) else WAITS_FOR_SUSPECT
        names = set() if tried else {*groups, *(task.id for task in ready)}.difference(suspects[1:])
        allowed = {name: group for name, group in groups.items() if name in names}
        return allowed, [task for task in ready if task.id in names], suspects[0] if suspects else ""

    def _planned(self) -> list[QueueTask]:
        """The tasks that wait, in order of submission; only those that were changed are read from the queue again."""
        stamps = self._state.db.stamps("planned", MOST_PLANNED)
        seen = {name: task.updated for name, task in self._known.items()}
        changed = [name for name, stamp in stamps.items() if seen.get(name) != stamp]
        if len(changed) > len(stamps) // 2:
            self._known = {task.id: task for task in self._state.db.in_turn("planned", MOST_PLANNED)}
        else:
            same = {name: self._known[name] for name in stamps if name in self._known}
            self._known = same | {name: self._state.db.get(name) for name in changed}
        return sorted((self._known[name] for name in stamps if name in self._known), key=lambda task: task.position)

    def _prefetch(self, groups: Mapping[str, Preempted], waiting: Sequence[QueueTask], decision: QueueDecision) -> None:
        """Let busy workers prepare what is likely next while they train: graph, weights, checkpoint."""
        needs = self._next_group(groups, waiting, decision)
        if not any(needs.values()):
            return
        for name, worker in self._pool.workers.items():
            if name != PLANNER and worker.group and worker.fetched != needs:
                worker.fetched = needs
                worker.send("prefetch", **needs)

    def _next_group(
        self, groups: Mapping[str, Preempted], waiting: Sequence[QueueTask], decision: QueueDecision
    ) -> dict[str, Any]:
        """What the group that is likely next needs: one that was preempted, or the first task with what may join it."""
        runs, considered = self._state.options.runs, {task.id: task for task in waiting}
        names = chain(decision.wait, groups, considered)
        name = next((name for name in names if name in groups or name in considered), None)
        if name is None:
            return {}
        group, first = groups.get(name), considered.get(name)
        member = group.present[0] if group is not None else first
        needs = {"graph": member.spec.get("graph_path") or "", "weights": None, "tasks": [], "folders": []}
        if group is not None:
            return {**needs, "folders": [str(runs / group.group.folder)]}
        if is_inference(first):
            return {**needs, "weights": weights_file(self._state, first) if self._state.options.pool else None}
        plan = first.plan or {}
        if "from" in plan or first.attempts:
            return {**needs, "folders": [str(runs / plan.get("from", first.id))]}
        key = plan.get("join_key")
        alike = [task for task in waiting if task is not first and key and (task.plan or {}).get("join_key") == key]
        return {**needs, "tasks": [worker_settings(task) for task in (first, *alike[: MOST_PREPARED - 1])]}

    def _decide(self, groups: Mapping[str, Preempted], tasks: Sequence[QueueTask]) -> QueueDecision:
        running = [active.state() for active in self._state.active.values()]
        device = next(iter(self._pool.room))
        setup, share = self._state.setup_of(device), self._pool.share_of(device)
        queued = [group.as_task(setup, share) for group in groups.values()]
        queued += [queued_task(task, setup, share) for task in tasks]
        decision = decide(self.policy, queued, running, self._machine())
        self._state.again = math.inf if decision.again is None else decision.again
        return decision

    def _machine(self) -> MachineState:
        devices = []
        for name, room in self._pool.room.items():
            workers = sum(w.device == name and w.name != PLANNER for w in self._pool.workers.values())
            workers, options = max(workers, 1), self._state.options
            reserved = options.reserved_of(room, self._pool.beside[name])
            inferring = min(options.inference_workers, workers - 1)
            started = self._state.started_on.get(name, 0)
            devices.append(DeviceState(name, room, reserved, workers, inferring, started))
        return MachineState(tuple(devices), time.time(), self._state.shares.with_running(self._being_had()))

    def _being_had(self) -> dict[str, float]:
        """Device-seconds by user of the groups that run."""
        seconds: dict[str, float] = {}
        for active in self._state.active.values():
            for user in active.users.values():
                seconds[user] = seconds.get(user, 0.0) + active.will_have
        return seconds

    def _held_back(self, task: QueueTask, runs: bool) -> bool:
        """True if a task cannot start yet for a reason that no policy sees; ``runs``: a worker still has it."""
        if runs:
            self._state.why[task.id] = "its last run is still ending"
            return True
        until = self._state.not_before.get(task.id, 0.0)
        if until > time.monotonic():
            self._state.why[task.id] = f"waits {until - time.monotonic():.0f} s before it is tried again: {task.error}"
            return True
        open_names = [name for name in task.after if self._state.db.get(name).state != "done"]
        if open_names:
            self._state.why[task.id] = waits_for(open_names)
        return bool(open_names)
