"""report.html: one self-contained page about one training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.core.files import write_text
from weft.core.task import Task
from weft.engine.report.html import bullets, head, table, text
from weft.engine.report.line_chart import Curve, chart
from weft.engine.report.predicted_vs_measured import predicted_and_measured
from weft.engine.results.result import Result

SPLIT_NAMES = {"test": "test", "val": "validation", "train": "training"}


def write_report(result: Result, path: Path) -> None:
    """Write the page for ``result`` to ``path``, in one piece."""
    write_text(path, render_report(result))


def render_report(result: Result) -> str:
    """The page: headline numbers, curves, settings, environment, and why it was run the way it was."""
    task = result.task
    title = f"{task.label} on {task.graph_name}"
    return f"""{head(title)}
<h1>{text(title)}</h1>
<p>{text(_sentence(result))}</p>
<div class="row short">{_headlines(result)}</div>
<div class="row">{_charts(result)}</div>
<div class="row">
<div class="card"><h2>Settings</h2>{_settings(task)}</div>
<div class="card"><h2>At the best epoch</h2>{table(result.metrics)}</div>
<div><div class="card" style="margin-bottom:16px"><h2>Why it ran this way</h2>{bullets(result.plan.why)}
{predicted_and_measured(result.plan)}</div>
<div class="card"><h2>Environment</h2>{table(result.environment)}</div></div>
</div></body></html>
"""


def _sentence(result: Result) -> str:
    metrics = result.metrics
    ends = {"stopped": "stopped early", "diverged": "diverged", "finished": "finished"}
    how = ends.get(result.status, result.status)
    return (
        f"{how.capitalize()} after {metrics['epochs_run']} of {result.task.epochs} epochs "
        f"in {metrics['seconds']:.1f} s ({metrics['seconds_per_epoch'] * 1e3:.2f} ms per epoch); {_best(metrics)}."
    )


def _best(metrics: dict[str, Any]) -> str:
    if not metrics["best_epoch"]:
        return "no epoch was usable"
    if f"val_{metrics['metric']}" not in metrics:
        return f"no validation nodes, so the weights are those of epoch {metrics['best_epoch']}"
    return f"best on validation at epoch {metrics['best_epoch']}"


def _headlines(result: Result) -> str:
    name = result.metrics["metric"]
    cards = []
    for split in SPLIT_NAMES:
        value = result.metrics.get(f"{split}_{name}")
        if value is not None:
            words = f"{SPLIT_NAMES[split]} {name.replace('_', ' ')}"
            cards.append(f'<div class="card"><div class="big">{value:.4f}</div><div class="small">{words}</div></div>')
    return "".join(cards)


def _charts(result: Result) -> str:
    history, name = result.history, result.metrics["metric"]
    best = result.metrics["best_epoch"] or None
    losses = [Curve("training step", history["loss"], "train")]
    losses += [_curve(history, split, "loss") for split in _splits(history) if split == "val"]
    scores = [_curve(history, split, name) for split in _splits(history)]
    drawn = [chart("loss", losses, best), chart(name.replace("_", " "), scores, best)]
    return "".join(f'<div class="card">{svg}</div>' for svg in drawn if svg)


def _curve(history: dict[str, list[float]], split: str, column: str) -> Curve:
    return Curve(SPLIT_NAMES[split], history[f"{split}_{column}"], split)


def _splits(history: dict[str, list[float]]) -> list[str]:
    return [split for split in ("train", "val", "test") if f"{split}_loss" in history]


def _settings(task: Task) -> str:
    """What was chosen for this task, and the defaults of the rest behind a fold."""
    usual = Task(graph="any").to_dict()
    given = {key: value for key, value in task.to_dict().items() if value is not None and key != "given"}
    chosen = {key: value for key, value in given.items() if usual[key] != value and key != "name"}
    rest = {key: value for key, value in given.items() if usual[key] == value}
    return f"{table(chosen)}<details><summary>defaults</summary>{table(rest)}</details>"
