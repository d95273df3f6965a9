"""Tasks that ran when a server died, which their model may have killed.

Each is released without a word the first time, and after every checkpoint that it saved since. A task that has saved
none since a server died is a suspect: it is started alone, so that the next death is its own doing, and every further
death costs an attempt. When it has none left it is held: paused, until somebody resumes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.serve.queue_db import QueueDB
from weft.serve.queue_file import QueueTask

SUSPECT, DEATHS = "suspect_of_death", "deaths"  # in the plan of a task: since its last checkpoint, and in all
MOST_DEATHS = 10  # in all, whatever the task has saved between them
ALONE_SECONDS = 60.0  # that a suspect runs by itself at most
RESTARTED = "the server was restarted"
WAITS_ALONE = "waits to be tried alone: a server died while it ran"
WAITS_FOR_SUSPECT = "waits while a task is tried alone that ran when a server died"


def is_suspect(task: QueueTask) -> bool:
    """Whether a task ran when a server died and has saved nothing since."""
    return bool((task.plan or {}).get(SUSPECT))


def take_over(db: QueueDB, ran: Iterable[QueueTask], died: bool) -> set[str]:
    """Queue again what a server ran, or hold what it ``died`` of too often; those that go on without their groups."""
    apart: set[str] = set()
    for task in ran:
        if not died:
            db.release(task.id, RESTARTED)
            continue
        plan: dict[str, Any] = dict(task.plan or {})
        last = db.last_events(task.id, ("running", "checkpoint"), 1)
        saved = bool(last) and last[-1].kind == "checkpoint"
        suspect = 1 if saved else int(plan.get(SUSPECT, 0)) + 1
        plan |= {DEATHS: int(plan.get(DEATHS, 0)) + 1, SUSPECT: suspect}
        if saved:
            del plan[SUSPECT]
        apart |= {task.id} if suspect > 1 or plan[DEATHS] >= MOST_DEATHS else set()
        if plan[DEATHS] >= MOST_DEATHS or (suspect > 1 and task.attempts >= task.max_attempts):
            reason = f"{plan[DEATHS]} servers died while it ran; it is held: resume it to try it again, or cancel it"
            db.hold(task.id, reason, {name: value for name, value in plan.items() if name not in (SUSPECT, DEATHS)})
        elif suspect > 1:
            db.fail(task.id, str(task.worker), task.attempts, "the server died while it ran", retry=True, plan=plan)
        else:
            db.replan(task.id, plan)
            db.release(task.id, RESTARTED)
    return apart
