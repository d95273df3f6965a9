"""SweepResult: the outcome of a sweep, in memory and on disk."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.core.errors import SpecError
from weft.core.files import file_name, write_json
from weft.core.plan import Plan
from weft.core.settings import ARGS, identity, lower_is_better
from weft.core.sweep import Sweep
from weft.engine.ranking import SettingsScore, score_of, settings_scores
from weft.engine.result import FORMAT, Result

if TYPE_CHECKING:
    import pandas


@dataclass(repr=False)
class SweepResult:
    """A trained sweep: a :class:`Result` for every member, those that diverged or failed included.

    ``tasks``: the Results in the order of ``sweep.tasks()``. ``plan``: one :class:`Plan` a group. ``seconds``: of the
    whole. ``graphs``: name and size of every graph, by what ``sweep.graphs`` calls it. Scores on different graphs do
    not compare: members are ranked on one graph at a time. ``importance``: of the settings, if an Optuna study chose
    them; the shares add up to 1.
    """

    sweep: Sweep
    tasks: list[Result]
    plan: tuple[Plan, ...]
    environment: dict[str, Any]
    seconds: float = 0.0
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)
    importance: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        best = ""
        for part in self.by_graph().values():
            if (name := part._best_name()) is not None:
                best += f"; best {name!r}, {part.metric}={part[name].metrics[part.metric]:.4f}"
        return f"<SweepResult {self.sweep.label!r}: {len(self.tasks)} tasks, {ends}{best}>"

    def _repr_html_(self) -> str:
        from weft.engine.page import sweep_html

        return sweep_html(self)

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
    def graph(self) -> dict[str, Any]:
        """Name and size of the graph; empty if there are several."""
        return next(iter(self.graphs.values())) if len(self.graphs) == 1 else {}

    def on(self, graph: Any) -> SweepResult:
        """The members on ``graph`` alone: its name in ``sweep.graphs``, or the graph that the tasks had."""
        for result in self.tasks:
            name = self.sweep.graph_of(result.task)
            if name == graph or identity(result.task.graph) == identity(graph):
                return self.by_graph()[name]
        names = ", ".join(map(repr, self.sweep.graphs))
        raise SpecError(f"graph={graph!r} is not in {self.sweep.label!r}; its graphs: {names}")

    def by_graph(self) -> dict[str, SweepResult]:
        """The members on every graph as a result of their own, by the name of the graph."""
        names = self.sweep.graphs
        if len(names) == 1:
            return {names[0]: self}
        graph_of = {result.name: self.sweep.graph_of(result.task) for result in self.tasks}
        parts = {}
        for name in names:
            members = [result for result in self.tasks if graph_of[result.name] == name]
            plans = [plan for plan in self.plan if {graph_of.get(member) for member in plan.members} == {name}]
            seconds = sum(float(result.metrics.get("seconds", 0.0)) for result in members)
            size = {name: self.graphs[name]} if name in self.graphs else {}
            sweep = Sweep.from_tasks([result.task for result in members], self.sweep.name)
            parts[name] = SweepResult(sweep, members, tuple(plans), self.environment, seconds, size)
        return parts

    @property
    def metric(self) -> str:
        """What members are compared by: the validation metric, or the training one if there are no such nodes."""
        names = [result.metrics["metric"] for result in self.tasks if "metric" in result.metrics]
        name = names[0] if names else "accuracy"
        measured = any(f"val_{name}" in result.history or f"val_{name}" in result.metrics for result in self.tasks)
        return f"val_{name}" if measured or not names else f"train_{name}"

    def best(self, metric: str | None = None, graph: Any = None) -> Result:
        """The member with the highest ``metric`` (the validation metric by default), or the lowest loss.

        Metrics are those of a member's own best epoch, so that ``best("test_accuracy")`` is over test nodes. If
        there are several graphs, ``graph`` names one of them.
        """
        return self.tasks[self.ranking(metric, graph)[0]]

    def best_settings(self, metric: str | None = None, graph: Any = None) -> SettingsScore:
        """The settings with the best mean of ``metric`` over their seeds: :meth:`best` is one lucky run, these are not.

        If there are several graphs, ``graph`` names one of them.
        """
        scores = self.settings_table(metric, graph)
        if not scores:
            raise SpecError(f"no member of {self.sweep.label!r} has the metric {metric or self.metric!r}")
        return scores[0]

    def settings_table(self, metric: str | None = None, graph: Any = None) -> list[SettingsScore]:
        """Mean and deviation over seeds of every choice of settings, best first."""
        part = self._on_one_graph(graph)
        return settings_scores(part, metric or part.metric)

    def ranking(self, metric: str | None = None, graph: Any = None) -> list[int]:
        """Positions of the members that have ``metric``, best first; of equal ones the earlier.

        If there are several graphs, ``graph`` names one of them.
        """
        part = self._on_one_graph(graph)
        metric = metric or part.metric
        sign = 1 if lower_is_better(metric) else -1
        names = {result.name for result in part.tasks}
        scores = {
            i: sign * score
            for i, result in enumerate(self.tasks)
            if result.name in names and (score := score_of(result, metric)) is not None
        }
        if not scores:
            measured = sorted({key for r in part.tasks for key in r.metrics if score_of(r, key) is not None})
            what = f"they have {', '.join(measured)}" if measured else "no member has any"
            raise SpecError(f"no member of {self.sweep.label!r} has the metric {metric!r}; {what}")
        return sorted(scores, key=lambda index: (scores[index], index))

    def _on_one_graph(self, graph: Any) -> SweepResult:
        """The part on ``graph``, or all of a sweep on one graph."""
        if graph is not None:
            return self.on(graph)
        if len(self.sweep.graphs) > 1:
            raise SpecError(
                f"{self.sweep.label!r} has {len(self.sweep.graphs)} graphs, whose scores do not compare; "
                f"say which with graph=, one of {', '.join(map(repr, self.sweep.graphs))}"
            )
        return self

    def _best_name(self) -> str | None:
        """The best member on one graph, None if no member has a score."""
        metric = self.metric
        scored = any(score_of(result, metric) is not None for result in self.tasks)
        return self.best(metric).name if scored else None

    def to_dicts(self) -> list[dict[str, Any]]:
        """A flat row for every member: name, status, the settings that vary, the metrics, and the message if any."""
        rows = []
        for result in self.tasks:
            described = {**result.task.to_dict(), "graph": self.sweep.graph_of(result.task)}
            described |= {f"{ARGS}{key}": value for key, value in described["model_args"].items()}
            settings = {key.removeprefix(ARGS): described.get(key) for key in self.sweep.varying}
            row = {"name": result.name, "status": result.status, **settings, **result.metrics}
            rows.append({**row, "message": result.message})
        return rows

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of :meth:`to_dicts` as a table of pandas, which has to be installed."""
        try:
            import pandas
        except ImportError:
            raise SpecError("to_pandas() needs pandas: pip install pandas; to_dicts() does without") from None
        return pandas.DataFrame(self.to_dicts())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the weights; histories are in the files of the members."""
        return {
            "format": FORMAT,
            "sweep": self.sweep.to_dict(),
            **self.summary(),
            "varying": list(self.sweep.varying),
            "tasks": self.to_dicts(),
            **({"importance": self.importance} if self.importance else {}),
            "graph": self.graph if len(self.sweep.graphs) == 1 else None,
            "environment": self.environment,
            "plan": [plan.to_dict() for plan in self.plan],
        }

    def summary(self) -> dict[str, Any]:
        """How it went as a whole and on every graph, as plain data, without the members."""
        parts = self.by_graph()
        alone = len(parts) == 1
        graphs = {
            name: {**part.graph, "tasks": len(part), "metric": part.metric, "best": part._best_name()}
            | {"best_settings": next((str(score) for score in part.settings_table()), None)}
            for name, part in parts.items()
        }
        return {
            "metric": self.metric if alone else None,
            "best": self._best_name() if alone else None,
            "best_settings": next(iter(graphs.values()))["best_settings"] if alone else None,
            "statuses": self.statuses,
            "seconds": self.seconds,
            "graphs": graphs,
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
        stem = plain = file_name(name)
        while plain.lower() in taken:  # some file systems ignore case
            plain, index = f"{stem}-{index}", index + 1
        taken.add(plain.lower())
        result.append(plain)
    return result
