"""Compare the runs in several folders: the best settings of each, the settings in which they differ, their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.core.errors import SpecError
from weft.core.settings import Labels, lower_is_better
from weft.core.sweep import REPEATS, Sweep, distinct, gives, with_args_apart
from weft.core.units import show_seconds
from weft.engine.charts import GROUP_COLOURS, curves, finite_points, head, package_file, text
from weft.engine.loading import read_result
from weft.engine.page import card, columns
from weft.engine.ranking import SettingsScore, plus_minus, verdict
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult

NOT_COMPARED = ("graph", "name", "given", *REPEATS)


class AnyModel(dict[str, Any]):
    """A class by the name of every model that was given as an object: scores are compared without the model."""

    def get(self, name: str, default: Any = None) -> Any:
        """The class called ``name``."""
        return self.setdefault(name, type(name, (), {"__call__": default}))


@dataclass(frozen=True)
class ComparedRun:
    """The best settings of a run on one graph; ``differs``: their values where the compared runs differ."""

    run: str
    part: SweepResult
    score: SettingsScore
    differs: dict[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> list[Result]:
        """The trainings with the best settings."""
        return [self.part.tasks[position] for position in self.score.positions]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``seconds`` are of all trainings of the run on the graph."""
        task, score = self.members[0].task, self.score.to_dict()
        best = self.score.name if self.part.sweep.varying else task.model_name
        epochs = fmean(member.metrics["epochs_run"] for member in self.members)
        row = {"run": self.run, "graph": task.graph_name, "metric": self.score.metric, "best_settings": best, **score}
        return row | {"epochs": epochs, "seconds": self.part.seconds, "differs": self.differs}


def read_run(folder: Path) -> list[ComparedRun]:
    """The best settings of the run in ``folder`` on every graph; :class:`SpecError` if there are none."""
    result = read_result(folder, AnyModel())
    if isinstance(result, Result):
        seconds = result.metrics.get("seconds", 0.0)
        result = SweepResult(Sweep.from_tasks([result.task]), [result], (), result.environment, seconds)
    parts = [(part, part.settings_table()) for part in result.by_graph().values()]
    if not any(ranked for _, ranked in parts):
        raise SpecError(f"{folder}: no training reached an evaluation, so there is no score to compare")
    return [ComparedRun(str(folder), part, ranked[0]) for part, ranked in parts if ranked]


def comparable(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """The runs on the same graph with the same metric together, best first."""
    groups: dict[Any, list[ComparedRun]] = {}
    for run in runs:
        stats, task = run.members[0].trained_on, run.members[0].task
        graph = task.graph_name if stats is None else stats.fingerprint().digest
        settings = with_args_apart(task.to_dict()).items()
        own = {key: value for key, value in settings if gives(task, key) and not task.ignores(key)}
        groups.setdefault((graph, run.score.metric), []).append(replace(run, differs=own))
    for (_, metric), group in groups.items():
        keys = [key for key in dict.fromkeys(key for run in group for key in run.differs) if key not in NOT_COMPARED]
        keys = [key for key in keys if distinct(run.differs[key] for run in group if key in run.differs) > 1]
        group[:] = [replace(run, differs={k: run.differs[k] for k in keys if k in run.differs}) for run in group]
        group.sort(key=lambda run: run.score.mean, reverse=not lower_is_better(metric))
    return list(groups.values())


def table_of(runs: Sequence[ComparedRun]) -> tuple[str, list[list[str]], str]:
    """A title, the cells with their headings, and how clear the lead of the first run is."""
    metric, keys = (
        runs[0].score.metric.replace("_", " "),
        list(dict.fromkeys(key for run in runs for key in run.differs)),
    )
    labels = Labels({key: [run.differs.get(key) for run in runs] for key in keys})
    cells = [["run", "best settings", metric, "test", "over", "epochs", "time", "differs in"]]
    for run in runs:
        row, score = run.to_dict(), run.score
        means = plus_minus(score.mean, score.deviation), plus_minus(score.test_mean, score.test_deviation)
        over = score.repeats if len(run.members) > 1 else "1 seed"
        costs = f"{row['epochs']:.4g}", show_seconds(row["seconds"])
        cells.append([run.run, row["best_settings"], *means, over, *costs, labels.name(run.differs, keys)])
    lead = verdict(runs[0].part, [replace(run.score, name=run.run) for run in runs])
    return f"{metric} on {runs[0].to_dict()['graph']}", cells, f"{runs[0].run}: {lead}" if len(runs) > 1 else ""


def render_comparison(tables: Sequence[Sequence[ComparedRun]], left_out: Sequence[str] = ()) -> str:
    """The page: per graph and metric a table, and the curves of every run's best settings in its colour."""
    title = f"{len({run.run for table in tables for run in table})} runs compared"
    style = "\n" + package_file("sweep.css") + '.runs span::before { content: "\\2501\\00a0"; }\n'
    page = [f"{head(title, style)}<h1>{text(title)}</h1>"]
    for table in tables:
        heading, (heads, *rows), lead = table_of(table)
        coloured = [(run, GROUP_COLOURS[number % len(GROUP_COLOURS)]) for number, run in enumerate(table)]
        legend = " ".join(f'<span style="color:{colour}">{text(run.run)}</span>' for run, colour in coloured)
        charts = ""
        for column in (table[0].score.metric, "loss"):
            drawn = [(f'style="stroke:{colour}"', member.history) for run, colour in coloured for member in run.members]
            lines = [(style, finite_points(history.get(column, []))) for style, history in drawn]
            charts += card(column.replace("_", " "), curves(column, lines))
        body = f'<p>{text(lead)}</p><div class="scroll">{columns(heads, rows)}</div>'
        page += [card(heading, body, "settings"), f'<p class="runs">{legend}</p><div class="row">{charts}</div>']
    return "\n".join([*page, *(f"<p>{text(words)}</p>" for words in left_out), "</body></html>\n"])
