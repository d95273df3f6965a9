"""Estimates for queued tasks: known ones at once, others from the planner process, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.units import show_bytes
from weft.serve.queue.task_states import QueueTask
from weft.serve.supervision.queue_views import estimate_key, is_inference, worker_settings
from weft.serve.supervision.supervisor_state import SupervisorState, unless_lost
from weft.serve.supervision.worker_pool import PLANNER, WorkerPool
from weft.serve.workers.source_files import unchanged
from weft.serve.workers.worker_process import WorkerProcess

PLANNED_AT_ONCE = 500  # in one transaction, for which others wait
PLAN_TRIES = 2
MOST_ESTIMATES = 10_000  # kept in memory


class TaskPlanner:
    """Turns queued tasks into planned ones."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool
        self._planning: tuple[str, str] | None = None  # task, key of its estimate
        self._tries: dict[str, int] = {}
        self._estimates: dict[str, Mapping[str, Any]] = {}
        self._turns: dict[str, int] = {}  # by user: when the planner last had one of their tasks

    def plan_queued(self) -> None:
        """Give queued tasks an estimate: known ones at once, together; another from the planner, one at a time."""
        plans: list[tuple[str, Mapping[str, Any]]] = []
        unknown: list[tuple[QueueTask, str]] = []
        for task in self._state.db.in_turn("queued", PLANNED_AT_ONCE):
            if task.plan is not None and unchanged(task.plan.get("files")):
                plans.append((task.id, task.plan))
                continue
            key = estimate_key(task.spec)
            known = self._estimates.get(key)
            if known is not None and unchanged(known.get("files")):
                plans += self._within_limits(task, kept_of(task.plan) | dict(known))
            else:
                unknown.append((task, key))
        if unknown and self._planning is None and self._pool.workers[PLANNER].ready:
            self._ask(*min(unknown, key=lambda one: (-one[0].priority, self._turns.get(one[0].user, 0))))
        if plans:
            self._plan(plans)
        self._state.dirty = self._state.dirty or len(plans) == PLANNED_AT_ONCE

    def _ask(self, task: QueueTask, key: str) -> None:
        """Have the planner look at a task; users take turns, however many tasks one of them has."""
        self._planning = (task.id, key)
        self._turns[task.user] = max(self._turns.values(), default=0) + 1
        device = self._state.options.device_names()[0].partition("@")[0]
        self._pool.workers[PLANNER].send("plan", id=task.id, device=device, **_asked(task))

    def planned(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        """The planner has made an estimate, or refused the task."""
        if self._planning is None or self._planning[0] != message["id"]:
            return
        (name, key), self._planning, self._state.dirty = self._planning, None, True
        task = self._state.db.get(name)
        if task.state != "queued":
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
        self._plan(self._within_limits(task, kept_of(task.plan) | estimate))

    def learn(self, device: str, took: Sequence[Mapping[str, Any]]) -> None:
        """Have the planner learn from what epochs of a group took on ``device``, if that is of this machine."""
        planner = self._pool.workers.get(PLANNER)
        if planner is not None and planner.ready and "@" not in device:
            planner.send("learn", device=device, took=list(took))

    def _plan(self, plans: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._state.db.plan_many(plans)
        self._state.urgent |= any(plan.get("kind") == "inference" for _, plan in plans)

    def _within_limits(self, task: QueueTask, plan: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """The plan of a task, in a list; an empty one if the task was refused because it exceeds its own budget."""
        limit = task.spec.get("budget")
        if limit is None:
            return [(task.id, plan)]
        if plan.get("guess"):
            return [(task.id, {**plan, "bytes": min(plan["bytes"], limit)})]
        if plan["bytes"] > limit:
            needs = f"needs {show_bytes(plan['bytes'])}, more than its budget of {show_bytes(limit)}"
            unless_lost(self._state.db.refuse, task.id, f"{needs}; raise the budget, or lower hidden or layers")
            return []
        return [(task.id, plan)]

    def planner_gone(self, reason: str) -> None:
        """The planner ended; a task that ends it again and again is refused."""
        if self._planning is None:
            return
        (name, _), self._planning = self._planning, None
        self._tries[name] = self._tries.get(name, 0) + 1
        if self._tries[name] >= PLAN_TRIES and self._state.db.get(name).state == "queued":
            unless_lost(self._state.db.refuse, name, f"planning it ended the planner {PLAN_TRIES} times: {reason}")


def kept_of(plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a plan knows of a task besides its estimate: where it goes on from, and how it failed."""
    return {name: value for name, value in (plan or {}).items() if name in ("from", "failures", "memory_errors")}


def _asked(task: QueueTask) -> dict[str, Any]:
    """What the planner is asked: of an inference task, whether it is one."""
    asked = {"task": worker_settings(task), "bounds": task.spec.get("budget") is None}
    return {**asked, "kind": "inference"} if is_inference(task) else asked
