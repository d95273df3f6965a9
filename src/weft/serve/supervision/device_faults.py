"""Faults that break a GPU for a process: who is to be tried again, and which workers are replaced.

A kernel that fails (an index out of range, an illegal address) ends every further call of its process. Under NVIDIA's
MPS it does so for all processes on the GPU, and nobody is told whose kernel it was. So whatever ran is tried once more
with the device to itself; what fails there has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.sched.admission import SAFETY_THRESHOLD
from weft.serve.supervision.supervisor_state import Active, SupervisorState, unless_lost
from weft.serve.supervision.worker_pool import WorkerPool
from weft.serve.workers.worker_process import WorkerProcess

SUSPECT = "suspect"  # in the plan of a task that ran when a fault broke its device


def broke_device(message: Mapping[str, Any]) -> bool:
    """Whether a worker says of its group that the device no longer answers."""
    return message.get("leftover", 0) is None


class DeviceFaults:
    """Queues tasks again that shared a GPU with a kernel that failed."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool

    def replace_idle(self, worker: WorkerProcess) -> None:
        """Replace the waiting workers of a device that broke for all of them; those that run say so themselves."""
        if self._pool.shares_faults:
            for one in self._pool.idle_workers(worker.device):
                one.kill("is replaced, since its device no longer answers")

    def try_apart(self, active: Active, message: Mapping[str, Any]) -> bool:
        """Queue the members again, to run without others; False where only they can have broken the device."""
        if not self._pool.shares_faults:
            return False
        told = _first_line(message)
        for name in active.members:
            unless_lost(self._try_one_apart, active, name, told)
        self._state.end_group(active, "dissolved" if active.fused else "ended", told)
        return True

    def _try_one_apart(self, active: Active, name: str, told: str) -> None:
        plan = dict(self._state.db.get(name).plan or {})
        first = not plan.get(SUSPECT)
        whole = int(self._pool.task_bytes(active.group.device) / SAFETY_THRESHOLD)
        plan |= {SUSPECT: True, "alone": True, "bytes": max(int(plan.get("bytes", 0)), whole)}
        if active.fused:
            plan["from"] = active.group.folder
        reason = f"{told}; it is tried once more with the device to itself" if first else told
        self._state.fail(active, name, reason, first, plan)
        self._state.counters.tasks_requeued += first


def _first_line(message: Mapping[str, Any]) -> str:
    found = [message.get("error"), *(one.get("message") for one in message.get("members", {}).values())]
    text = next((str(one).strip() for one in found if one), "its device no longer answers")
    return text.splitlines()[0]
