"""Tasks of the queue as a policy, an estimate and a worker see them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.settings.grid.combinations import all_settings
from weft.core.task import Task
from weft.sched.queue_state import QueuedTask
from weft.serve.queue.task_states import QueueTask

FREE_OF_COST = ("seed", "name", "lr", "weight_decay", "betas", "eps")  # settings that no estimate depends on


def queued_task(task: QueueTask, setup_seconds: float = 0.0, share: float = 1.0) -> QueuedTask:
    """What a policy sees of a planned task: its epochs, and ``setup_seconds`` in which it leaves the device idle.

    ``share``: the part of the device that a worker can use, of a CPU its threads over the cores.
    """
    plan = task.plan or {}
    if is_inference(task):
        return _inference(task, plan, share)
    training = float(plan["seconds"])
    seconds = training + setup_seconds
    return QueuedTask(
        id=task.id,
        bytes=max(int(plan["bytes"]), 0),
        seconds=seconds,
        graph=str(plan.get("graph", "")),
        join_key=str(plan.get("join_key", "")),
        fusable=not plan.get("alone") and task.spec.get("budget") is None and not task.attempts,  # it has a checkpoint
        shared_bytes=min(int(plan.get("shared_bytes", 0)), int(plan["bytes"])),
        utilisation=share * float(plan.get("utilisation", 1.0)) * (training / seconds if seconds > 0 else 1.0),
        arrival=task.created,
        user=task.user,
        priority=task.priority,
        deadline=task.spec.get("deadline"),
        attempts=int(plan.get("failures", 0)),
        start_seconds=setup_seconds,
        turn_seconds=float(plan.get("turn_seconds", 0.0)),
    )


def is_inference(task: QueueTask) -> bool:
    """Whether a task infers rather than trains."""
    return task.spec.get("kind") == "inference"


def _inference(task: QueueTask, plan: Mapping[str, Any], share: float) -> QueuedTask:
    """An inference task as a policy sees it: never fused, due ``latency_target`` seconds after it arrived."""
    return QueuedTask(
        id=task.id,
        bytes=max(int(plan["bytes"]), 0),
        seconds=float(plan["seconds"]),
        graph=str(plan.get("graph", "")),
        fusable=False,
        utilisation=share * float(plan.get("utilisation", 1.0)),
        arrival=task.created,
        user=task.user,
        priority=task.priority,
        deadline=task.spec.get("deadline"),
        kind="inference",
        latency_target=task.spec["infer"].get("latency_target"),
        attempts=int(plan.get("failures", 0)),
        turn_seconds=float(plan.get("turn_seconds", 0.0)),
    )


def worker_settings(task: QueueTask) -> dict[str, Any]:
    """A task as a worker gets it: named by its id, with the path of its graph."""
    place = task.spec.get("graph_path")
    return {**task.spec["task"], **({"graph": place} if place else {}), "name": task.id}


def own_names(tasks: Sequence[QueueTask]) -> dict[str, str | None]:
    """The names that users gave to ``tasks``, by id; None for a task without one."""
    return {task.id: task.spec["task"].get("name") for task in tasks}


def without_twins(tasks: Sequence[QueueTask]) -> list[QueueTask]:
    """Tasks less those with the settings of another, which no sweep may have twice: they start in a later group.

    Settings that were left out are those of a task that gives their usual values.
    """
    chosen: dict[tuple[Any, ...], QueueTask] = {}
    for task in tasks:
        chosen.setdefault(all_settings(Task.from_dict(worker_settings(task))), task)
    return list(chosen.values())


def estimate_key(spec: Mapping[str, Any]) -> str:
    """The key of a task's estimate: tasks of one key need the same memory and time.

    Without a byte budget of its own a bound on its bytes will do, so that is another estimate.
    """
    kept = {key: value for key, value in spec["task"].items() if key not in FREE_OF_COST}
    kept[""] = [spec.get("budget") is None, spec.get("kind", "training"), spec.get("graph_path")]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
