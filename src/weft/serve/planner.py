"""Estimates for queued tasks: known ones at once, others from a planner process, one at a time of each user."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from weft.core.errors import WeftError
from weft.core.files import write_json
from weft.core.units import show_bytes
from weft.serve.groups import with_seconds_left
from weft.serve.queue_db import QueueError, QueueTask
from weft.serve.state import (
    SupervisorState,
    estimate_key,
    is_inference,
    planned_for_more,
    run_options_of,
    runs_users_code,
    unchanged,
    unless_lost,
    worker_settings,
)
from weft.serve.worker_pool import PLANNER, WorkerPool, WorkerProcess

NOTED = "planning.json"  # in the folder of runs
PLAN_TRIES = 2  # at least: what ended the planner may be no fault of the task that it planned
PLANNED_AT_ONCE = 500  # in one transaction, for which others wait
MOST_TO_LEARN = 1_000  # groups that the planner has not learned from yet
MOST_ESTIMATES = 10_000  # kept in memory
PLANNING_SECONDS = 300.0  # at most of one task
ASIDE_SECONDS = 3.0  # of one task until another planner takes its place for other users
MOST_ASIDE = 4  # users with a planner of their own: each holds a graph
LOADING_SECONDS = 3600.0  # at most for its graph, which may have to be downloaded
CHANGED = (
    "its graph or its model was written anew since it began; it goes on from its checkpoint with what is there now, so "
    "its numbers are of both: cancel it and submit it again to train on the new one alone"
)
HISTORY = ("from", "failures", "memory_errors", "suspect_of_death", "deaths", "ran_seconds")
SOON_DONE = 0.3  # seconds: a withdrawn estimate most likely ends by itself within them


@dataclass
class Planning:
    """What a planner is at."""

    planner: WorkerProcess
    task: str
    user: str
    key: str  # of its estimate
    since: float
    users_code: bool  # whether its estimate runs code that is not Weft's
    loads: bool = False  # its graph


class TaskPlanner:
    """Turns queued tasks into planned ones."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool
        self._plannings: list[Planning] = []  # the present planner's, and those of planners that were put aside
        self._others_wait = False  # tasks of users for whom no planner is at work
        self._tries: dict[str, int] = {}
        self._estimates: dict[str, Mapping[str, Any]] = {}
        self._turns: dict[str, int] = {}  # by user: when the planner last had one of their tasks
        self._stuck: set[str] = set()  # users whose last task never ended there
        self._noted_changes: dict[str, int] = {}  # attempts of tasks that go on with files that have changed
        self._to_learn: deque[Mapping[str, Any]] = deque(maxlen=MOST_TO_LEARN)

    @property
    def _devices(self) -> int:
        """How many devices of one host a sharded task can have; 0 on the GPUs of a cluster."""
        names = self._state.options.device_names()
        if any(name.startswith("cuda") and "@" in name for name in names):
            return 0
        return max(Counter(name.partition("@")[2] for name in names).values())

    def plan_queued(self) -> None:
        """Give queued tasks an estimate: known ones at once, together; another from the planner, one at a time."""
        plans: list[tuple[str, Mapping[str, Any]]] = []
        unknown: list[tuple[QueueTask, str]] = []
        for task in self._state.db.in_turn("queued", PLANNED_AT_ONCE):
            if task.plan is not None and unchanged(task.plan.get("files")):
                plans.append((task.id, with_seconds_left(self._state.db, task, task.plan)))
                continue
            if task.plan is not None and task.attempts and self._noted_changes.get(task.id) != task.attempts:
                self._noted_changes[task.id] = task.attempts
                self._state.records.append((task.id, "note", {"message": CHANGED}))
            key = estimate_key(task.spec)
            estimate = self._estimates.get(key)
            known = estimate is not None and unchanged(estimate.get("files"))
            if known and not planned_for_more(estimate, self._pool.task_room()):
                plans += self._within_limits(task, history_of(task) | dict(estimate))
            else:
                unknown.append((task, key))
        self._teach()
        planner, busy = self._pool.workers.get(PLANNER), {planning.user for planning in self._plannings}
        unknown = [(task, key) for task, key in unknown if task.user not in busy]
        if unknown and planner is not None and planner.idle:
            # Users take turns; those of a user whose last task hung come when there are no others.
            first = min(
                unknown,
                key=lambda u: (
                    u[0].user in self._stuck,
                    -max(u[0].priority, self._state.raised.get(u[0].id, u[0].priority)),  # or of what waits for it
                    self._turns.get(u[0].user, 0),
                ),
            )
            self._ask(planner, *first)
            unknown = [(task, key) for task, key in unknown if task.user != first[0].user]
        self._others_wait = bool(unknown)
        if plans:
            self._plan(plans)
        self._state.dirty = self._state.dirty or len(plans) == PLANNED_AT_ONCE

    def _ask(self, planner: WorkerProcess, task: QueueTask, key: str) -> None:
        """Have the planner look at a task; users take turns, however many tasks one of them has."""
        self._plannings.append(Planning(planner, task.id, task.user, key, time.monotonic(), runs_users_code(task)))
        self._turns[task.user] = max(self._turns.values(), default=0) + 1
        device = self._state.options.device_names()[0].partition("@")[0]
        if self._plannings[-1].users_code:
            self.note()
        planner.group = task.id
        kind, options = "inference" if is_inference(task) else "training", run_options_of(task.spec)
        settings = worker_settings(task if task.attempts else replace(task, plan=None))  # decided for the room of now
        send = {"device": device, "task": settings, "options": options, "room": self._pool.task_room()}
        planner.send("plan", id=task.id, **send, kind=kind, devices=self._devices)

    def note(self, ends: bool = False) -> None:
        """Write down which tasks with users' code are planned, for the next server, should this one die of them.

        ``ends``: none is, since this server ends by itself.
        """
        tasks = [planning.task for planning in self._plannings if planning.users_code and not ends]
        tries = {name: count for name, count in self._tries.items() if self._waiting(name) is not None}
        with suppress(WeftError, OSError):  # planning works without the note
            write_json(self._state.options.runs / NOTED, {"tasks": tasks, "tries": tries})

    def take_over(self) -> None:
        """Count a try of the task that was planned when the last server died, and refuse what has had enough."""
        file = self._state.options.runs / NOTED
        with suppress(OSError, ValueError, TypeError, KeyError):
            noted = json.loads(file.read_text(encoding="utf-8"))
            self._tries = {str(name): int(count) for name, count in noted["tries"].items()}
            for name in noted["tasks"]:
                self._count_try(str(name), "the server died")
        file.unlink(missing_ok=True)

    def _count_try(self, name: str, reason: str) -> None:
        """Count that planning a task ended the planner; one that did so too often is refused."""
        task = self._waiting(name)
        if task is None:
            return
        tries = self._tries[name] = self._tries.get(name, 0) + 1
        if tries >= max(PLAN_TRIES, task.max_attempts):
            unless_lost(self._state.db.refuse, name, f"planning it ended the planner {tries} times: {reason}")

    def loading(self, planner: WorkerProcess, message: Mapping[str, Any]) -> None:
        """The planner begins to load the graph of a task, or has it; time counts anew from then on."""
        planning = self._of(planner)
        if planning is not None and planning.task == message["id"]:
            planning.loads, planning.since = bool(message["begins"]), time.monotonic()

    def planned(self, planner: WorkerProcess, message: Mapping[str, Any]) -> None:
        """The planner has made an estimate, or refused the task."""
        planner.group, planning = "", self._of(planner)
        if planning is None or planning.task != message["id"]:
            return
        self._state.dirty = True
        self._forget(planning)
        if planning.users_code or self._pool.workers.get(PLANNER) is not planner:
            planner.renew()
        name, key = planning.task, planning.key
        self._stuck.discard(planning.user)
        task = self._waiting(name)
        if task is None:
            return
        if "error" in message:
            unless_lost(self._state.db.refuse, name, str(message["error"]))
            return
        if len(self._estimates) > MOST_ESTIMATES:
            self._estimates.clear()
            self._state.runnable.clear()
        estimate = dict(message["plan"])
        runnable = estimate.pop("runnable", None)
        if runnable is not None:
            self._state.runnable[key] = runnable
        self._estimates[key] = estimate
        self._plan(self._within_limits(task, history_of(task) | estimate))

    def learn(self, device: str, took: Sequence[Mapping[str, Any]]) -> None:
        """Have the planner learn from what epochs of a group took on ``device``, if that is of this machine.

        A planner that runs code which is not Weft's does not outlive it, so the next one learns.
        """
        if "@" not in device:
            self._to_learn.append({"device": device, "took": list(took)})
        self._teach()

    def _teach(self) -> None:
        planner = self._pool.workers.get(PLANNER)
        if planner is None or not planner.ready or planner.end_reason:
            return
        planning = self._of(planner)
        while self._to_learn and (planning is None or not planning.users_code):
            planner.send("learn", **self._to_learn.popleft())

    def _plan(self, plans: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._state.db.plan_many(plans)
        self._state.urgent |= any(plan.get("kind") == "inference" for _, plan in plans)

    def _within_limits(self, task: QueueTask, plan: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """The plan of a task, in a list; an empty one if the task was refused because it exceeds its own budget."""
        limit, plan = task.spec.get("budget"), with_seconds_left(self._state.db, task, plan)
        ranks = plan.get("ranks", 1)
        if ranks > 1 and self._devices == 0:
            why = f"ranks={ranks}: a worker on a node of the cluster sees one GPU; use weft run --on ray, or one host"
            unless_lost(self._state.db.refuse, task.id, why)
            return []
        if limit is not None and plan.get("guess"):
            plan = {**plan, "bytes": min(plan["bytes"], limit)}
        elif limit is not None and plan["bytes"] > limit:
            needs = f"needs {show_bytes(plan['bytes'])}, more than its budget of {show_bytes(limit)}"
            unless_lost(self._state.db.refuse, task.id, f"{needs}; raise the budget, or lower hidden or layers")
            return []
        return [(task.id, plan)]

    def end_stuck(self, now: float) -> None:
        """End a planner if a model keeps it for too long, or if what it plans was cancelled or paused.

        One that is busy for some seconds while tasks of other users wait is put aside: another takes its place.
        """
        for planning in list(self._plannings):
            planner, took = planning.planner, now - planning.since
            limit = LOADING_SECONDS if planning.loads else min(self._state.options.hang_seconds, PLANNING_SECONDS)
            if planner.end_reason or took <= min(limit, SOON_DONE):
                continue
            if self._waiting(planning.task) is None:
                reason = "planned a task that was withdrawn"
            elif took > limit:
                reason = f"planned one task for more than {limit:g} s"
                self._stuck.add(planning.user)
                why = f"planning it took longer than {limit:g} s: its model made no progress"
                why = f"loading its graph took longer than {limit:g} s" if planning.loads else why
                unless_lost(self._state.db.refuse, planning.task, why)
            else:
                if took > ASIDE_SECONDS and self._others_wait and len(self._plannings) <= MOST_ASIDE:
                    self._pool.put_aside(planner)
                continue
            self._forget(planning)
            planner.kill(reason)

    def planner_gone(self, planner: WorkerProcess, reason: str) -> None:
        """A planner ended; a task that ends it again and again is refused."""
        planning = self._of(planner)
        if planning is not None:
            self._forget(planning)
            self._count_try(planning.task, reason)

    def _of(self, planner: WorkerProcess) -> Planning | None:
        """What a planner is at."""
        return next((planning for planning in self._plannings if planning.planner is planner), None)

    def _forget(self, planning: Planning) -> None:
        self._plannings.remove(planning)
        if planning.users_code:
            self.note()

    def _waiting(self, name: str) -> QueueTask | None:
        """A task that still waits to be planned; None if it was cancelled, paused or deleted meanwhile."""
        try:
            task = self._state.db.get(name)
        except QueueError:
            return None
        return task if task.state == "queued" else None


def history_of(task: QueueTask) -> dict[str, Any]:
    """What is known of a task besides its estimate: how it failed, where it goes on from and what it began with."""
    names = (*HISTORY, "mode", "batch") if task.attempts else HISTORY
    return {name: value for name, value in (task.plan or {}).items() if name in names}
