"""Member: one training of a run as the host knows it. Sessions and drivers share the type."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from weft.core.decision import RUNNING, Update
from weft.core.settings import lower_is_better


@dataclass
class Member:
    """A member in training: ``rows`` has one row of ``columns`` per epoch, of ``epochs`` at most.

    Columns are the training loss, then losses and metrics of the splits. ``peers`` is equal for members whose scores
    compare. ``status`` is ``"running"`` or how it ended; ``end``: the epoch it is to end at; ``best_epoch`` counts from
    0, -1: none. ``present``: whether it is still part of its group's step. ``seconds``: its share of the group's time.
    ``logged``: epochs (from 1) and the numbers that callbacks logged after them, by name.
    """

    name: str
    epochs: int
    columns: tuple[str, ...] = ()
    metric: str = ""
    objective: str = ""
    peers: str = ""
    rows: list[tuple[float, ...]] = field(default_factory=list)
    logged: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    end: int = 0
    best_epoch: int = -1
    best_score: float = -math.inf
    status: str = RUNNING
    message: str = ""
    present: bool = True
    seconds: float = 0.0
    steady_seconds: float = 0.0  # without set-up and the first poll
    steady_epochs: int = 0

    @property
    def running(self) -> bool:
        """Whether there is something left to train."""
        return self.status == RUNNING

    @property
    def epoch(self) -> int:
        """Epochs trained that count."""
        return len(self.rows)

    def take(self, update: Update) -> None:
        """Take over what ``update`` reports: rows from its first epoch on, the end and the best so far."""
        self.rows[update.first :] = map(tuple, update.rows)
        self.end, self.best_epoch, self.best_score = update.end, update.best_epoch, update.best_score

    def stop(self, status: str, message: str) -> None:
        """End here."""
        self.status, self.message, self.end = status, message, self.epoch

    def scores(self, epochs: int) -> list[float]:
        """The validation metric of the first ``epochs`` epochs where it was measured; more is better."""
        watched = f"val_{self.metric}"
        if watched not in self.columns:
            return []
        column, sign = self.columns.index(watched), -1.0 if lower_is_better(watched) else 1.0
        return [sign * row[column] for row in self.rows[:epochs] if math.isfinite(row[column])]

    def row(self, epoch: int) -> dict[str, float]:
        """What was measured at ``epoch`` (counted from 0), by column."""
        return dict(zip(self.columns, self.rows[epoch], strict=True))

    def standing(self) -> dict[str, Any]:
        """The epoch, what was measured last, and the best so far."""
        data: dict[str, Any] = {"epoch": self.epoch, "epochs": self.epochs}
        if self.rows:
            data |= {key: short(value) for key, value in self.row(self.epoch - 1).items() if not math.isnan(value)}
        if 0 <= self.best_epoch < self.epoch:
            best, watched = self.row(self.best_epoch), f"val_{self.metric}"
            data["best_epoch"] = self.best_epoch + 1
            if watched in best:
                data[f"best_{watched}"] = short(best[watched])
        return data

    def metrics(self) -> dict[str, Any]:
        """What a result says: every split at the best epoch, epochs and seconds."""
        metrics: dict[str, Any] = {"metric": self.metric, "objective": self.objective}
        if 0 <= self.best_epoch < self.epoch:
            metrics |= {key: short(value) for key, value in self.row(self.best_epoch).items() if key != "loss"}
        steady = self.steady_seconds / self.steady_epochs if self.steady_epochs else self.seconds / max(self.epoch, 1)
        metrics |= {"best_epoch": self.best_epoch + 1, "epochs_run": self.epoch}
        return metrics | {"seconds": self.seconds, "seconds_per_epoch": steady}

    def history(self) -> dict[str, list[float]]:
        """One list per column."""
        columns: dict[str, list[Any]] = {"epoch": list(range(1, self.epoch + 1))}
        return columns | {name: [row[index] for row in self.rows] for index, name in enumerate(self.columns)}


def short(value: float) -> float:
    """The shortest number that is ``value`` in float32, as it was measured: 0.856, not 0.8560000061988831."""
    if not math.isfinite(value):
        return value
    single = struct.pack("f", value)
    near = (float(f"{struct.unpack('f', single)[0]:.{digits}g}") for digits in range(6, 10))  # nine digits always do
    return next(number for number in near if struct.pack("f", number) == single)
