"""Predicted seconds of a task that goes on from a checkpoint: of the epochs that are left, not of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.serve.queue.queue_db import QueueDB
from weft.serve.queue.task_states import QueueTask

WHOLE = "whole_seconds"  # of a plan: what was predicted for all epochs, where some are done


def with_seconds_left(db: QueueDB, task: QueueTask, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """``plan`` of a queued task, its seconds less the share of the epochs that its last checkpoint has.

    A task that has not run, or without a plan because it begins anew, has all of them left. One epoch always counts as
    left: a run that is resumed after its last one still writes its result.
    """
    epochs = int(plan.get("epochs") or 0)
    if not task.attempts or task.plan is None or not epochs:
        return plan
    saved = db.last_events(task.id, ("checkpoint",), 1)
    done = int(saved[0].data.get("epoch") or 0) if saved else 0
    if not done:
        return plan
    whole = float(plan.get(WHOLE, plan["seconds"]))
    return {**plan, WHOLE: whole, "seconds": whole * max(epochs - done, 1) / epochs}


def has_begun(task: QueueTask) -> bool:
    """Whether the predicted seconds of a task are of the epochs that are left."""
    return WHOLE in (task.plan or {})
