"""RunFolder: what a run writes on disk, and how it finds it again.

events.jsonl              the journal, one Event a line
checkpoint.safetensors    the state to resume from
result.json               settings, environment, metrics, history
model.safetensors         the best weights
report.html               the same for the eye
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.event import Event
from weft.core.task import Task
from weft.engine.report import write_report
from weft.engine.result import Result
from weft.run.checkpoint import FILE, Checkpoint, check_same_task, read_checkpoint, write_checkpoint
from weft.run.solo import SoloRun


class RunFolder:
    """The folder of one run, made when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--out {path}: cannot be made a folder ({error.strerror})") from None

    def start_afresh(self) -> None:
        """Remove what a former run left here, so that nothing of it is taken for this one's."""
        for name in ("events.jsonl", FILE, "result.json", "model.safetensors", "report.html"):
            (self.path / name).unlink(missing_ok=True)

    def journal(self, event: Event) -> None:
        """Append one line."""
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(event.to_json() + "\n")

    def checkpoint_of(self, task: Task) -> Checkpoint | None:
        """The checkpoint to resume ``task`` from; refuses one of another task."""
        checkpoint = read_checkpoint(self.path)
        if checkpoint is not None:
            check_same_task(checkpoint.about["task"], task.to_dict(), self.path / FILE)
        return checkpoint

    def save_state(self, run: SoloRun, **about: Any) -> Path:
        """Write the run's state as it is now."""
        about = {"task": run.task.to_dict(), "epoch": run.epoch, **about}
        return write_checkpoint(self.path, run.tensors(), about)

    def save_result(self, result: Result) -> None:
        """Write what the run left behind."""
        result.save(self.path)
        write_report(result, self.path / "report.html")
