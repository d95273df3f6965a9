"""A recorded queue: tasks with their measured seconds, the device, and how tasks on it slow each other down; JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.recorded_queue_mistakes import mistake_in_queue
from weft.sched.simulator import Conditions


@dataclass(frozen=True)
class RecordedQueue:
    """What the simulator needs to run a queue again under any policy.

    ``tasks`` are as predicted. ``actual``: those of them that turned out otherwise, as they were measured.
    """

    tasks: tuple[QueuedTask, ...]
    device: DeviceState
    interference: Interference = field(default_factory=Interference)
    actual: tuple[QueuedTask, ...] = ()
    background: float = 0.0

    @property
    def conditions(self) -> Conditions:
        """The simulator's conditions."""
        return Conditions(self.interference, background=self.background)

    def on(self, budget: int | None, workers: int | None) -> RecordedQueue:
        """The same on a device with another budget or other workers."""
        given = {"budget_bytes": budget, "workers": workers}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, device=replace(self.device, **changes))

    def to_json(self) -> str:
        """The text of its file."""
        tasks = [task.to_dict() for task in self.tasks]
        about = {"device": self.device.to_dict(), "interference": asdict(self.interference)}
        measured = {"actual": [task.to_dict() for task in self.actual], "background": self.background}
        return json.dumps({"tasks": tasks, **about, **measured}, allow_nan=False, indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RecordedQueue:
        """The inverse of :meth:`to_json`, after parsing."""
        tasks = tuple(QueuedTask.from_dict(task) for task in data["tasks"])
        actual = tuple(QueuedTask.from_dict(task) for task in data.get("actual", ()))
        about = DeviceState.from_dict(data["device"]), Interference(**data.get("interference", {}))
        return cls(tasks, *about, actual, float(data.get("background", 0.0)))


def read_recorded(path: Path) -> RecordedQueue:
    """The queue of a file; one sentence for a file that is none."""
    data = _parsed(path)
    wrong = mistake_in_queue(data)
    if wrong:
        raise SpecError(f"{path}: is not a recorded queue: {wrong}; such a file has tasks, a device and interference")
    try:
        return RecordedQueue.from_dict(data)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _parsed(path: Path) -> Any:
    not_one = f"{path}: is not a recorded queue"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{not_one}: there is no such file") from None
    except OSError as error:
        raise SpecError(f"{not_one}: it cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{not_one}: it holds no JSON ({error})") from None
