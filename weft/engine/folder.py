"""RunFolder: what a run writes on disk, and how it finds it again.

events.jsonl              the journal, one Event a line
checkpoint.safetensors    the state to resume from
result.json               settings, environment, metrics, history
model.safetensors         the best weights
report.html               the same for the eye
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from weft.core.errors import SpecError, TrainingError
from weft.core.event import Event
from weft.core.task import Task
from weft.engine.report import write_report
from weft.engine.result import Result
from weft.run.checkpoint import FILE, Checkpoint, check_same_task, read_checkpoint, write_checkpoint
from weft.run.solo import SoloRun

REPORT = "report.html"
FILES = ("events.jsonl", FILE, "result.json", "model.safetensors", REPORT)


class RunFolder:
    """The folder of one run. Nothing in it is touched before :meth:`open`, when the run is known to be sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = False
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise SpecError(f"--out {path}: cannot be made a folder ({there} is a file); choose another one")
        if not os.access(there, os.W_OK | os.X_OK):
            raise SpecError(f"--out {path}: {there} cannot be written to; choose another folder")

    def open(self, afresh: bool) -> None:
        """Make the folder; ``afresh`` removes what a former run left, so that nothing is taken for this one's."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in FILES if afresh else ():
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise SpecError(f"--out {self.path}: cannot be written to ({error.strerror}); choose another") from None
        self._opened = True

    def journal(self, event: Event) -> None:
        """Append one line."""
        if self._opened:
            with self._writing(), open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
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
        with self._writing():
            return write_checkpoint(self.path, run.tensors(), about)

    def save_result(self, result: Result) -> None:
        """Write what the run left behind."""
        with self._writing():
            result.save(self.path)
            write_report(result, self.path / REPORT)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk, or one taken away, is one sentence."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._opened = False  # no more lines in the journal: it would fail as well
            reason = getattr(error, "strerror", None) or error
            raise TrainingError(
                f"cannot write to {self.path}: {reason}; every file there is whole, so make room and --resume"
            ) from error
