"""What the dashboard and the metrics read of the supervisor, published as one new object each time."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from weft.serve.supervision.supervisor_state import SupervisorState
from weft.serve.supervision.worker_pool import PLANNER, WorkerPool

SAMPLES = 1_800


class ServerView:
    """Keeps samples of memory by device over time."""

    def __init__(self, state: SupervisorState, pool: WorkerPool) -> None:
        self._state, self._pool = state, pool
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    @staticmethod
    def empty() -> dict[str, Any]:
        """The view before anything has started."""
        return {"workers": [], "running": [], "devices": [], "samples": [], "why": {}}

    def show(self) -> dict[str, Any]:
        """The state as it is now, and a sample of it in the view's series."""
        now = time.time()
        bytes_by_device: dict[str, int] = {}
        for worker in self._pool.workers.values():
            if worker.name != PLANNER:
                bytes_by_device[worker.device] = bytes_by_device.get(worker.device, 0) + worker.bytes
        estimated: dict[str, int] = {}
        for active in self._state.active.values():
            estimated[active.group.device] = estimated.get(active.group.device, 0) + active.group.bytes
        for device in self._pool.room:
            sample = {"time": now, "device": device, "bytes": bytes_by_device.get(device, 0)}
            self._samples.append({**sample, "estimate": estimated.get(device, 0)})
        return {
            "time": now,
            "draining": self._state.draining,
            "devices": [{"name": name, "budget": room} for name, room in self._pool.room.items()],
            "workers": [
                {"name": w.name, "device": w.device, "pid": w.pid, "ready": w.ready, "group": w.group, "bytes": w.bytes}
                for w in self._pool.workers.values()
            ],
            "running": [
                {**active.group.to_dict(), "epoch": active.epoch, "held": active.worker.bytes}
                for active in self._state.active.values()
            ],
            "samples": list(self._samples),
            "why": dict(self._state.why),
            "counters": vars(self._state.counters).copy(),
        }
