"""Session: drive a run to its end. Looks at the device now and then, tells, saves, and notices trouble."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from weft.core.errors import DivergedError
from weft.core.event import Event
from weft.engine.folder import RunFolder
from weft.engine.interrupt import Interrupted, Interruption
from weft.run.solo import Progress, SoloRun

LOOK_SECONDS = 0.2  # often enough to feel live; rare enough that a GPU never waits for the host
CHECKPOINT_SECONDS = 30.0


class Session:
    """One run, its history so far on the host, and where it is saved and told.

    ``period`` fixes the number of epochs between looks, which otherwise follows the speed of the run. Nothing
    but the number of events depends on it.
    """

    def __init__(
        self,
        run: SoloRun,
        emit: Callable[[Event], None],
        folder: RunFolder | None = None,
        checkpoint_every: float = CHECKPOINT_SECONDS,
        period: int | None = None,
    ) -> None:
        self.run, self._emit, self._folder = run, emit, folder
        self._checkpoint_every, self._fixed_period = checkpoint_every, period
        self._period = period or 1
        self._told_notes = 0
        self.rows: list[list[float]] = []
        self.progress: Progress | None = None
        self.seconds = 0.0
        self._steady_seconds, self._steady_epochs = 0.0, 0

    # ---- where it stands -----------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether every epoch that counts has been trained."""
        return self.progress is not None and self.run.epoch >= self.progress.end

    @property
    def stopped_early(self) -> bool:
        """Whether it ran out of patience before it ran out of epochs."""
        return self.progress is not None and self.progress.end < self.run.task.epochs

    @property
    def seconds_per_epoch(self) -> float:
        """Mean seconds of an epoch, set-up and the first look left out where there were others."""
        if self._steady_epochs:
            return self._steady_seconds / self._steady_epochs
        return self.seconds / max(len(self.rows), 1)

    @property
    def best_epoch(self) -> int:
        """The best epoch counted from 0, -1 before the first evaluation."""
        return self.progress.best_epoch if self.progress else -1

    def row(self, epoch: int) -> dict[str, float]:
        """What was measured at ``epoch`` (counted from 0), by column."""
        return dict(zip(self.run.columns, self.rows[epoch], strict=True))

    # ---- doing ---------------------------------------------------------------------------------------

    def resume(self, tensors: dict[str, Any], seconds: float) -> None:
        """Continue from a checkpoint's tensors."""
        self.run.restore(tensors)
        self.seconds = seconds
        self.progress = self.run.look(0)
        self.rows = list(self.progress.rows)
        message = f"resumed after epoch {self.run.epoch} of {self.run.task.epochs}"
        self._emit(Event("note", self.run.task.label, {"message": message}))

    def train(self) -> None:
        """Train to the end, or save what there is and raise DivergedError or Interrupted."""
        if self.finished:
            return
        saved_at = time.monotonic()
        with Interruption() as interruption:
            while not self.finished:
                self._advance(interruption)
                self._check_finite()
                if interruption.requested() and not self.finished:
                    self._leave(interruption)
                if time.monotonic() - saved_at >= self._checkpoint_every:
                    self._save()
                    saved_at = time.monotonic()
        self._save(finished=True)

    def _advance(self, interruption: Interruption) -> None:
        first_look = self.progress is None or not self.run.started
        begin = time.perf_counter()
        self.progress = self.run.advance(self._period, interruption.requested)
        seconds = time.perf_counter() - begin
        del self.rows[self.progress.first :]
        self.rows += self.progress.rows
        done = max(self.run.epoch - self.progress.first, 1)
        self.seconds += seconds
        if not first_look:
            self._steady_seconds += seconds
            self._steady_epochs += done
        self._tell(done / max(seconds, 1e-9))
        self._adapt(seconds / done)

    def _adapt(self, epoch_seconds: float) -> None:
        if self._fixed_period is None:
            wanted = int(LOOK_SECONDS / max(epoch_seconds, 1e-9))
            self._period = max(1, min(wanted, 8 * self._period))

    def _tell(self, rate: float) -> None:
        task = self.run.task
        for note in self.run.notes[self._told_notes :]:
            self._emit(Event("note", task.label, {"message": note}))
        self._told_notes = len(self.run.notes)
        if not self.rows:
            return
        data: dict[str, Any] = {"epoch": len(self.rows), "epochs": task.epochs, "epochs_per_second": rate}
        data |= {key: value for key, value in self.row(len(self.rows) - 1).items() if not math.isnan(value)}
        if self.best_epoch >= 0:
            best = self.row(self.best_epoch)
            data["best_epoch"] = self.best_epoch + 1
            watched = f"val_{self.run.metric}"
            if watched in best:
                data[f"best_{watched}"] = best[watched]
        self._emit(Event("progress", task.label, data))

    def _check_finite(self) -> None:
        assert self.progress is not None
        losses = [i for i, name in enumerate(self.run.columns) if name.endswith("loss")]
        for offset, row in enumerate(self.progress.rows):
            epoch = self.progress.first + offset
            evaluated = not math.isnan(row[-1]) or self.progress.end == epoch + 1
            watched = losses if evaluated else losses[:1]
            bad = [self.run.columns[i] for i in watched if not math.isfinite(row[i])]
            if bad:
                del self.rows[epoch + 1 :]
                raise self._diverged(epoch, bad[0], row[self.run.columns.index(bad[0])])

    def _diverged(self, epoch: int, column: str, value: float) -> DivergedError:
        task = self.run.task
        kept = "no epoch was usable"
        if self.best_epoch >= 0:
            kept = f"the best weights so far (epoch {self.best_epoch + 1}) are kept"
        return DivergedError(
            f"task {task.label!r}: {column} became {value} at epoch {epoch + 1} of {task.epochs}; "
            f"{kept}; try a lower lr than {task.lr:g}"
        )

    def _save(self, finished: bool = False) -> None:
        if self._folder is None:
            return
        path = self._folder.save_state(self.run, seconds=self.seconds, finished=finished)
        self._emit(Event("checkpoint", self.run.task.label, {"path": str(path), "epoch": self.run.epoch}))

    def _leave(self, interruption: Interruption) -> None:
        self._save()
        path = self._folder.path if self._folder else None
        self._emit(Event("interrupted", self.run.task.label, {"epoch": self.run.epoch}))
        raise Interrupted(self.run.epoch, path, interruption.number or 2)
