"""SweepResult: the outcome of a sweep, in memory and on disk."""

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
from weft.core.files import write_json
from weft.core.plan import Plan
from weft.core.settings import ARGS, identity, lower_is_better
from weft.core.sweep import Sweep, setting_of
from weft.engine.result import Result, SettingsScore, settings_scores, sweep_html

if TYPE_CHECKING:
    import pandas


LONGEST_FOLDER = 100  # characters; file systems end at 255 bytes


@dataclass(repr=False)
class SweepResult:
    """A trained sweep: a :class:`Result` for every member, those that diverged or failed included.

    ``tasks``: the Results in the order of ``sweep.tasks()``. ``plan``: one :class:`Plan` a group. ``seconds``: of the
    whole. ``graphs``: name and size of every graph, by what ``sweep.graphs`` calls it. Scores on different graphs do
    not compare: members are ranked on one graph at a time.
    """

    sweep: Sweep
    tasks: list[Result]
    plan: tuple[Plan, ...]
    environment: dict[str, Any]
    seconds: float = 0.0
    graphs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        ends = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        best = "".join(f"; best {words}" for words in map(SweepResult._best_words, self.by_graph().values()) if words)
        return f"<SweepResult {self.sweep.label!r}: {len(self.tasks)} tasks, {ends}{best}>"

    def _repr_html_(self) -> str:
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
        """The members on ``graph`` alone: its name in ``sweep.graphs``, or what the tasks were given."""
        name = next((self.sweep.graph_of(r.task) for r in self.tasks if self._is_on(r, graph)), None)
        if name is None:
            raise SpecError(f"graph={graph!r} is not in {self.sweep.label!r}; its graphs: {self._graph_names()}")
        return self.by_graph()[name]

    def by_graph(self) -> dict[str, SweepResult]:
        """The members on every graph as a result of their own, by the name of the graph."""
        names = self.sweep.graphs
        if len(names) == 1:
            return {names[0]: self}
        graph_of = {result.name: self.sweep.graph_of(result.task) for result in self.tasks}
        own: dict[str, list[Result]] = {name: [] for name in names}
        for result in self.tasks:
            own[graph_of[result.name]].append(result)
        plans: dict[str, list[Plan]] = {name: [] for name in names}
        for plan in self.plan:  # a group trains on one graph
            homes = {graph_of.get(member) for member in plan.members}
            if len(homes) == 1 and None not in homes:
                plans[homes.pop()].append(plan)
        return {name: self._part(name, own[name], plans[name]) for name in names}

    def _is_on(self, result: Result, graph: Any) -> bool:
        return self.sweep.graph_of(result.task) == graph or identity(result.task.graph) == identity(graph)

    def _part(self, graph: str, own: list[Result], plans: list[Plan]) -> SweepResult:
        return SweepResult(
            Sweep.from_tasks([result.task for result in own], self.sweep.name),
            own,
            tuple(plans),
            self.environment,
            sum(float(result.metrics.get("seconds", 0.0)) for result in own),
            {graph: self.graphs[graph]} if graph in self.graphs else {},
        )

    def _graph_names(self) -> str:
        return ", ".join(map(repr, self.sweep.graphs))

    @property
    def metric(self) -> str:
        """What members are compared by: the validation metric, or the training one if there are no such nodes."""
        names = [result.metrics["metric"] for result in self.tasks if "metric" in result.metrics]
        name = names[0] if names else "accuracy"
        measured = any(f"val_{name}" in result.history or f"val_{name}" in result.metrics for result in self.tasks)
        return f"val_{name}" if measured or not names else f"train_{name}"

    def best(self, metric: str | None = None, graph: Any = None) -> Result:
        """The member with the highest ``metric`` (the validation metric where left out), or the lowest loss.

        Metrics are those of a member's own best epoch, so that ``best("test_accuracy")`` is over test nodes. Where
        there are several graphs, ``graph`` says on which.
        """
        return self.tasks[self.ranking(metric, graph)[0]]

    def best_settings(self, metric: str | None = None, graph: Any = None) -> SettingsScore:
        """The settings with the best mean of ``metric`` over their seeds: :meth:`best` is one lucky run, these are not.

        Where there are several graphs, ``graph`` says on which.
        """
        found = self.settings_table(metric, graph)
        if not found:
            raise SpecError(f"no member of {self.sweep.label!r} has the metric {metric or self.metric!r}")
        return found[0]

    def settings_table(self, metric: str | None = None, graph: Any = None) -> list[SettingsScore]:
        """Mean and deviation over seeds of every choice of settings, best first."""
        self._check_one_graph(graph)
        part = self if graph is None else self.on(graph)
        return settings_scores(part, metric or part.metric)

    def ranking(self, metric: str | None = None, graph: Any = None) -> list[int]:
        """Positions of the members that have ``metric``, best first; of equal ones the earlier.

        Where there are several graphs, ``graph`` says on which.
        """
        self._check_one_graph(graph)
        if graph is None:
            return self._ranking(metric or self.metric)
        part = self.on(graph)
        place = {result.name: index for index, result in enumerate(self.tasks)}
        return [place[part.tasks[index].name] for index in part._ranking(metric or part.metric)]

    def _check_one_graph(self, graph: Any) -> None:
        if graph is None and len(self.sweep.graphs) > 1:
            raise SpecError(
                f"{self.sweep.label!r} has {len(self.sweep.graphs)} graphs, whose scores do not compare; "
                f"say which with graph=, one of {self._graph_names()}"
            )

    def _ranking(self, metric: str) -> list[int]:
        sign = 1 if lower_is_better(metric) else -1
        values = {i: value for i, r in enumerate(self.tasks) if _is_number(value := r.metrics.get(metric))}
        if not values:
            known = sorted({key for r in self.tasks for key, v in r.metrics.items() if _is_number(v)})
            what = f"they have {', '.join(known)}" if known else "no member has any"
            raise SpecError(f"no member of {self.sweep.label!r} has the metric {metric!r}; {what}")
        return sorted(values, key=lambda index: (sign * values[index], index))

    def _ranked(self) -> list[int]:
        """The ranking on one graph, empty if no member has a score."""
        metric = self.metric
        return self._ranking(metric) if any(_is_number(r.metrics.get(metric)) for r in self.tasks) else []

    def _best_name(self) -> str | None:
        ranked = self._ranked()
        return self.tasks[ranked[0]].name if ranked else None

    def _best_words(self) -> str:
        name = self._best_name()
        return "" if name is None else f"{name!r}, {self.metric}={self[name].metrics[self.metric]:.4f}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A flat row for every member: name, status, the settings that vary, the metrics, and the message if any."""
        return [self._row(result) for result in self.tasks]

    def _row(self, result: Result) -> dict[str, Any]:
        described = result.task.to_dict()
        described["graph"] = self.sweep.graph_of(result.task)
        arguments = {f"{ARGS}{key}": value for key, value in described["model_args"].items()}
        settings = {key.removeprefix(ARGS): (described | arguments).get(key) for key in self.sweep.varying}
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
        return {
            "sweep": self.sweep.to_dict(),
            **self.summary(),
            "varying": list(self.sweep.varying),
            "tasks": self.to_dicts(),
            "graph": self.graph if len(self.sweep.graphs) == 1 else None,
            "environment": self.environment,
            "plan": [plan.to_dict() for plan in self.plan],
        }

    def summary(self) -> dict[str, Any]:
        """How it went as a whole and on every graph, as plain data, without the members."""
        parts = self.by_graph()
        alone = len(parts) == 1
        return {
            "metric": self.metric if alone else None,
            "best": self._best_name() if alone else None,
            "statuses": self.statuses,
            "seconds": self.seconds,
            "graphs": {name: part._about() for name, part in parts.items()},
        }

    def _about(self) -> dict[str, Any]:
        """One graph: its name and size, what its members are compared by, and which is best."""
        return {**self.graph, "tasks": len(self), "metric": self.metric, "best": self._best_name()}

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
        if plain.lower() in taken:  # some file systems ignore case
            plain = f"{plain}-{index}"
        taken.add(plain.lower())
        result.append(plain)
    return result


def value_of(result: Result, setting: str) -> Any:
    """A hashable value of a member's setting, equal for equal settings."""
    return identity(setting_of(result.task, setting))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
