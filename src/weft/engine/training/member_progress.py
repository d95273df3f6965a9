"""MemberProgress: the host's record of one member: history, status, and how it ended.

Columns of a history: the training loss, losses of the splits, metrics of the splits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.core.compatibility import function_name
from weft.core.decision import RUNNING, Update
from weft.core.task import Task

if TYPE_CHECKING:
    from weft.runtime.group import GroupRun
    from weft.runtime.group_members import MemberUpdate


@dataclass
class MemberProgress:
    """A member in training. ``rows``: one row of ``columns`` an epoch; ``seconds``: its share of the group's time.

    ``steps``: of an epoch; ``status`` is ``"running"`` or one of :data:`weft.engine.results.result.STATUSES`;
    ``best_epoch`` counts from 0, -1: none.
    """

    task: Task
    columns: list[str]
    metric: str
    objective: str
    steps: int = 1
    rows: list[list[float]] = field(default_factory=list)
    end: int = 0
    best_epoch: int = -1
    best_score: float = -math.inf
    status: str = RUNNING
    message: str = ""
    seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_epochs: int = 0

    @classmethod
    def of(cls, group: GroupRun, index: int) -> MemberProgress:
        """The track of a member that has not begun."""
        stack = group.members[index].stack
        steps = stack.source.steps_per_epoch
        return cls(group.tasks[index], stack.columns, stack.metric, stack.objective.name, steps)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.task.label

    @property
    def running(self) -> bool:
        """Whether there is something left to train."""
        return self.status == RUNNING

    @property
    def epoch(self) -> int:
        """Epochs trained that count."""
        return len(self.rows)

    # ---- learning ------------------------------------------------------------------------------------

    def take(self, progress: MemberUpdate) -> None:
        """Take over what the device has recorded, and notice the end."""
        if not self.running:
            return
        del self.rows[progress.first :]
        self.rows += progress.rows
        self.end, self.best_epoch, self.best_score = progress.end, progress.best_epoch, progress.best_score
        if not self._notice_divergence(progress) and self.epoch >= self.end:
            self.status = "finished" if self.end >= self.task.epochs else "stopped"

    def charge(self, seconds: float, epochs: int, steady: bool) -> None:
        """Count ``seconds`` for ``epochs``; set-up and the first poll are not ``steady``."""
        self.seconds += seconds
        if steady:
            self.steady_seconds += seconds
            self.steady_epochs += epochs

    def stop(self, status: str, message: str) -> None:
        """End here, by a decision."""
        self.status, self.message, self.end = status, message, self.epoch

    def _notice_divergence(self, progress: MemberUpdate) -> bool:
        losses = [i for i, name in enumerate(self.columns) if name.endswith("loss")]
        for offset, row in enumerate(progress.rows):
            epoch = progress.first + offset
            evaluated = not math.isnan(row[-1]) or self.end == epoch + 1
            bad = [i for i in (losses if evaluated else losses[:1]) if not math.isfinite(row[i])]
            if bad:
                del self.rows[epoch + 1 :]
                self.stop("diverged", self._what_diverged(epoch, self.columns[bad[0]], row[bad[0]]))
                return True
        return False

    def _what_diverged(self, epoch: int, column: str, value: float) -> str:
        kept = "no epoch was usable"
        if self.best_epoch >= 0:
            kept = f"the best weights so far (epoch {self.best_epoch + 1}) are kept"
        return (
            f"task {self.name!r}: {column} became {value} at epoch {epoch + 1} of {self.task.epochs}; "
            f"{kept}; {self._advice(epoch == 0 and column == 'loss' and self.steps == 1)}"
        )

    def _advice(self, with_first_weights: bool) -> str:
        """What to look at; a loss ``with_first_weights`` is from before any update, so no rate is to blame."""
        task = self.task
        own = [f"objective {function_name(task.objective)}"] if task.has_own("objective") else []
        own += [f"what model {task.model_name} computes"] if task.traits is None else []
        look = f"look at {' and '.join(own)}" if own else ""
        if with_first_weights:
            return f"{look or 'look at the features'}: no weight had been updated yet"
        lower = f"try a lower lr than {task.lr:g}"
        return f"{look}, or {lower}" if own else lower

    # ---- reporting -----------------------------------------------------------------------------------

    def update(self, first: int, **of_the_group: Any) -> Update:
        """The update for a driver: the rows from epoch ``first`` (counted from 0) on, and how it stands."""
        return Update(
            self.name,
            first,
            tuple(map(tuple, self.rows[first:])),
            self.end,
            self.best_epoch,
            self.best_score,
            self.status == "diverged",
            status=self.status,
            **of_the_group,
        )

    @property
    def watched(self) -> str:
        """The column that members are compared by."""
        return f"val_{self.metric}"

    def row(self, epoch: int) -> dict[str, float]:
        """What was measured at ``epoch`` (counted from 0), by column."""
        return dict(zip(self.columns, self.rows[epoch], strict=True))

    def standing(self) -> dict[str, Any]:
        """Where it is: the epoch, what was measured last, the best so far."""
        data: dict[str, Any] = {"epoch": self.epoch, "epochs": self.task.epochs}
        if self.rows:
            row = self.row(self.epoch - 1)
            data |= {key: short(value) for key, value in row.items() if not math.isnan(value)}
        if 0 <= self.best_epoch < self.epoch:
            best = self.row(self.best_epoch)
            data["best_epoch"] = self.best_epoch + 1
            if self.watched in best:
                data[f"best_{self.watched}"] = short(best[self.watched])
        return data

    def metrics(self) -> dict[str, Any]:
        """What a :class:`Result` says: every split at the best epoch, epochs and seconds."""
        metrics: dict[str, Any] = {"metric": self.metric, "objective": self.objective}
        if 0 <= self.best_epoch < self.epoch:
            metrics |= {key: short(value) for key, value in self.row(self.best_epoch).items() if key != "loss"}
        return metrics | {
            "best_epoch": self.best_epoch + 1,
            "epochs_run": self.epoch,
            "seconds": self.seconds,
            "seconds_per_epoch": self.seconds_per_epoch,
        }

    @property
    def seconds_per_epoch(self) -> float:
        """Mean seconds of an epoch, without set-up and the first poll if there were others."""
        if self.steady_epochs:
            return self.steady_seconds / self.steady_epochs
        return self.seconds / max(self.epoch, 1)

    def history(self) -> dict[str, list[float]]:
        """A list a column."""
        columns: dict[str, list[Any]] = {"epoch": list(range(1, self.epoch + 1))}
        return columns | {name: [row[index] for row in self.rows] for index, name in enumerate(self.columns)}

    # ---- saving --------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """What a checkpoint holds of this member besides its tensors."""
        return {"status": self.status, "message": self.message, "seconds": self.seconds, "epoch": self.epoch}

    def resume(self, about: dict[str, Any], progress: MemberUpdate) -> None:
        """Go on from a checkpoint."""
        self.seconds = float(about.get("seconds", 0.0))
        self.take(progress)
        if about.get("status", RUNNING) != RUNNING:
            del self.rows[int(about["epoch"]) :]
            self.status, self.message = about["status"], about.get("message", "")


def short(value: float) -> float:
    """The shortest number that is ``value`` in float32, as it was measured: 0.856, not 0.8560000061988831."""
    return float(str(np.float32(value)))
