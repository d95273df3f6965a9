"""SweepResult: what the members of a sweep left behind, in memory and on disk."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import SpecError
from weft.core.labels import identity
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.engine.result import Result, write_json

if TYPE_CHECKING:
    import pandas

LONGEST_FOLDER = 100  # characters; file systems end at 255 bytes


@dataclass(repr=False)
class SweepResult:
    """A trained sweep: a :class:`Result` for every member, those that diverged or failed included.

    ``tasks``: the Results in the order of ``sweep.tasks()``. ``plan``: one :class:`Plan` a group. ``seconds``: of the
    whole. ``graph``: name and size of the graph (of the first one, should there be several).
    """

    sweep: Sweep
    tasks: list[Result]
    plan: tuple[Plan, ...]
    environment: dict[str, Any]
    seconds: float = 0.0
    graph: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        ranked = self._ranked()
        best = f"; best {self.tasks[ranked[0]].name!r}, {self.metric}={self._best_score():.4f}" if ranked else ""
        return f"<SweepResult {self.sweep.label!r}: {len(self.tasks)} tasks, {ends}{best}>"

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.tasks)

    def __getitem__(self, name: str | int) -> Result:
        """The member called ``name``, or the one at a position."""
        if isinstance(name, int):
            return self.tasks[name]
        for result in self.tasks:
            if result.name == name:
                return result
        raise KeyError(f"no member {name!r}; they are: {', '.join(r.name for r in self.tasks[:8])}, ...")

    @property
    def statuses(self) -> dict[str, int]:
        """How many members ended how."""
        return dict(Counter(result.status for result in self.tasks))

    @property
    def metric(self) -> str:
        """What members are compared by: the validation metric, or the training one where there are no such nodes."""
        names = [result.metrics["metric"] for result in self.tasks if "metric" in result.metrics]
        name = names[0] if names else "accuracy"
        measured = any(f"val_{name}" in result.history or f"val_{name}" in result.metrics for result in self.tasks)
        return f"val_{name}" if measured or not names else f"train_{name}"

    def best(self, metric: str | None = None) -> Result:
        """The member with the highest ``metric`` (the validation metric where left out), or the lowest loss.

        Metrics are those of a member's own best epoch, so that ``best("test_accuracy")`` looks at test nodes.
        """
        metric = metric or self.metric
        return self.tasks[self.ranking(metric)[0]]

    def ranking(self, metric: str | None = None) -> list[int]:
        """Positions of the members that have ``metric``, best first; of equal ones the earlier."""
        metric = metric or self.metric
        sign = 1 if metric.endswith("loss") or metric.startswith("seconds") else -1
        values = {i: value for i, r in enumerate(self.tasks) if _is_number(value := r.metrics.get(metric))}
        if not values:
            known = sorted({key for r in self.tasks for key, v in r.metrics.items() if _is_number(v)})
            what = f"they have {', '.join(known)}" if known else "no member has any"
            raise SpecError(f"no member of {self.sweep.label!r} has the metric {metric!r}; {what}")
        return sorted(values, key=lambda index: (sign * values[index], index))

    def _ranked(self) -> list[int]:
        """The ranking, empty where nobody has a score."""
        metric = self.metric
        return self.ranking(metric) if any(_is_number(r.metrics.get(metric)) for r in self.tasks) else []

    def _best_score(self) -> float:
        return float(self.best().metrics[self.metric])

    def to_dicts(self) -> list[dict[str, Any]]:
        """A flat row for every member: name, status, the settings that vary, the metrics, and the message if any."""
        return [self._row(result) for result in self.tasks]

    def _row(self, result: Result) -> dict[str, Any]:
        described = result.task.to_dict()
        settings = {key: described[key] for key in self.sweep.varying}
        return {"name": result.name, "status": result.status, **settings, **result.metrics, "message": result.message}

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of :meth:`to_dicts` as a table of pandas, which has to be installed."""
        try:
            import pandas
        except ImportError:
            raise SpecError("to_pandas() needs pandas: pip install pandas; to_dicts() does without") from None
        return pandas.DataFrame(self.to_dicts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the weights; histories are in the files of the members."""
        ranked = self._ranked()
        return {
            "sweep": self.sweep.to_dict(),
            "metric": self.metric,
            "best": self.tasks[ranked[0]].name if ranked else None,
            "statuses": self.statuses,
            "varying": list(self.sweep.varying),
            "tasks": self.to_dicts(),
            "seconds": self.seconds,
            "graph": self.graph,
            "environment": self.environment,
            "plan": [plan.to_dict() for plan in self.plan],
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``result.json`` and ``tasks/NAME/{result.json, model.safetensors}``, each file in one piece."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for result, name in zip(self.tasks, folder_names([r.name for r in self.tasks]), strict=True):
            result.save(folder / "tasks" / name)
        write_json(folder / "result.json", self.to_dict())
        return folder


def folder_names(names: Sequence[str]) -> list[str]:
    """Names that any file system takes, different ones for different members: ``hidden=16_lr=0.01``."""
    taken: set[str] = set()
    result = []
    for index, name in enumerate(names):
        plain = re.sub(r"[^\w=.+-]+", "_", name, flags=re.ASCII).strip("_.")[:LONGEST_FOLDER] or "task"
        if plain.lower() in taken:  # some file systems do not tell A from a
            plain = f"{plain}-{index}"
        taken.add(plain.lower())
        result.append(plain)
    return result


def value_of(result: Result, setting: str) -> Any:
    """A hashable value of a member's setting, equal for equal settings."""
    return identity(getattr(result.task, setting))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
