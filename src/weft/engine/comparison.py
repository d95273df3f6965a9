"""Compare the runs in several folders: the best settings of each, the settings in which they differ, their curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

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


class ComparedRun(NamedTuple):
    """The best settings of a run on one graph; ``row``: plain data for JSON, of all trainings there the ``seconds``."""

    row: dict[str, Any]
    part: SweepResult
    score: SettingsScore
    members: list[Result]  # with the best settings


def read_run(folder: Path) -> list[ComparedRun]:
    """The best settings of the run in ``folder`` on every graph; :class:`SpecError` if there are none."""
    result, runs = read_result(folder, AnyModel()), []
    if isinstance(result, Result):
        seconds = result.metrics.get("seconds", 0.0)
        result = SweepResult(Sweep.from_tasks([result.task]), [result], (), result.environment, seconds)
    for part in result.by_graph().values():
        for score in part.settings_table()[:1]:
            members = [part.tasks[position] for position in score.positions]
            best = score.name if part.sweep.varying else members[0].task.model_name
            names = {"run": str(folder), "graph": members[0].task.graph_name, "metric": score.metric}
            epochs = fmean(member.metrics["epochs_run"] for member in members)
            costs = {"epochs": epochs, "seconds": part.seconds}
            runs.append(ComparedRun({**names, "best_settings": best, **score.to_dict(), **costs}, part, score, members))
    if not runs:
        raise SpecError(f"{folder}: no training reached an evaluation, so there is no score to compare")
    return runs


def comparable(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """The runs on the same graph with the same metric together, best first; rows get the values that ``differ``."""
    groups: dict[Any, list[ComparedRun]] = {}
    for run in runs:
        stats, task = run.members[0].trained_on, run.members[0].task
        graph = task.graph_name if stats is None else stats.fingerprint().digest
        settings = with_args_apart(task.to_dict()).items()
        own = {k: v for k, v in settings if k not in NOT_COMPARED and gives(task, k) and not task.ignores(k)}
        groups.setdefault((graph, run.score.metric), []).append(run)
        run.row["differs"] = own
    for (_, metric), group in groups.items():
        settings = [run.row["differs"] for run in group]
        keys = dict.fromkeys(key for own in settings for key in own)
        varying = [key for key in keys if distinct(own[key] for own in settings if key in own) > 1]
        for run, own in zip(group, settings, strict=True):
            run.row["differs"] = {key: own[key] for key in varying if key in own}
        group.sort(key=lambda run: run.score.mean, reverse=not lower_is_better(metric))
    return list(groups.values())


def table_of(runs: Sequence[ComparedRun]) -> tuple[str, list[list[str]], str]:
    """A title, the cells with their headings, and how clear the lead of the first run is."""
    metric, differs = runs[0].score.metric.replace("_", " "), [run.row["differs"] for run in runs]
    keys = list(dict.fromkeys(key for own in differs for key in own))
    labels = Labels({key: [own.get(key) for own in differs] for key in keys})
    cells = [["run", "best settings", metric, "test", "over", "epochs", "time", "differs in"]]
    for row, _, score, members in runs:
        means = plus_minus(score.mean, score.deviation), plus_minus(score.test_mean, score.test_deviation)
        costs = f"{row['epochs']:.4g}", show_seconds(row["seconds"])
        over = score.repeats if len(members) > 1 else "1 seed"
        cells.append([row["run"], row["best_settings"], *means, over, *costs, labels.name(row["differs"], keys)])
    lead = verdict(runs[0].part, [replace(run.score, name=run.row["run"]) for run in runs])
    lead = f"{runs[0].row['run']}: {lead}" if len(runs) > 1 else ""
    return f"{metric} on {runs[0].row['graph']}", cells, lead


def render_comparison(tables: Sequence[Sequence[ComparedRun]], left_out: Sequence[str] = ()) -> str:
    """The page: per graph and metric a table, and the curves of every run's best settings in its colour."""
    title = f"{len({run.row['run'] for table in tables for run in table})} runs compared"
    style = "\n" + package_file("sweep.css") + '.runs span::before { content: "\\2501\\00a0"; }\n'
    page = [f"{head(title, style)}<h1>{text(title)}</h1>"]
    for table in tables:
        heading, (heads, *rows), lead = table_of(table)
        coloured = [(run, GROUP_COLOURS[number % len(GROUP_COLOURS)]) for number, run in enumerate(table)]
        legend = " ".join(f'<span style="color:{colour}">{text(run.row["run"])}</span>' for run, colour in coloured)
        charts = ""
        for column in (table[0].score.metric, "loss"):
            drawn = [(f'style="stroke:{colour}"', member.history) for run, colour in coloured for member in run.members]
            lines = [(style, finite_points(history.get(column, []))) for style, history in drawn]
            charts += card(column.replace("_", " "), curves(column, lines))
        body = f'<p>{text(lead)}</p><div class="scroll">{columns(heads, rows)}</div>'
        page += [card(heading, body, "settings"), f'<p class="runs">{legend}</p><div class="row">{charts}</div>']
    return "\n".join([*page, *(f"<p>{text(words)}</p>" for words in left_out), "</body></html>\n"])
