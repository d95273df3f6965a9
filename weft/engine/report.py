"""report.html: one self-contained page about one training."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from weft.core.task import Task
from weft.engine.curves import Curve, chart
from weft.engine.result import Result, write_text

STYLE = """
:root { --ink: #1d2433; --soft: #667085; --line: #e4e7ec; --page: #fbfbfa; --card: #fff;
        --train: #8a94a6; --val: #2f6fde; --test: #d9822b; --best: #2e9d6a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #2b3242; --page: #12151c; --card: #191e28;
          --train: #7d879a; --val: #6ea0ff; --test: #f0a860; --best: #5fd39b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 24px; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 15px; margin: 0 0 10px; color: var(--soft); font-weight: 600; }
p { margin: 4px 0 24px; color: var(--soft); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); gap: 16px;
       margin-bottom: 16px; align-items: start; }
.row.short { grid-template-columns: repeat(auto-fit, minmax(100px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; }
.big { font-size: clamp(20px, 5vw, 32px); font-weight: 650; line-height: 1.2; } .small { color: var(--soft); }
figure { margin: 0; } figcaption { font-weight: 600; color: var(--soft); margin-bottom: 6px; }
.legend { float: right; font-weight: 400; font-size: 13px; } .legend span { margin-left: 14px; }
.legend span::before { content: "\\2501\\00a0"; }
.legend .best::before { content: "\\2506\\00a0"; color: var(--best); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .best { stroke: var(--best); stroke-dasharray: 4 3; }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
polyline.train { stroke: var(--train); } polyline.val { stroke: var(--val); }
polyline.test { stroke: var(--test); }
span.train::before { color: var(--train); } span.val::before { color: var(--val); }
span.test::before { color: var(--test); }
table { border-collapse: collapse; width: 100%; } td { padding: 3px 0; border-top: 1px solid var(--line); }
tr:first-child td { border-top: 0; } td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
h1, td:last-child { overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 18px; } li { margin-bottom: 4px; }
details { margin-top: 10px; } summary { color: var(--soft); cursor: pointer; margin-bottom: 6px; }
"""


SPLIT_NAMES = {"test": "test", "val": "validation", "train": "training"}


def write_report(result: Result, path: Path) -> None:
    """Write the page for ``result`` to ``path``, in one piece."""
    write_text(path, render_report(result))


def render_report(result: Result) -> str:
    """The page: headline numbers, curves, settings, environment, and why it was run the way it was."""
    task = result.task
    title = f"{task.label} on {task.graph_name}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>
<h1>{_text(title)}</h1>
<p>{_text(_sentence(result))}</p>
<div class="row short">{_headlines(result)}</div>
<div class="row">{_charts(result)}</div>
<div class="row">
<div class="card"><h2>Settings</h2>{_settings(task)}</div>
<div class="card"><h2>At the best epoch</h2>{_table(result.metrics)}</div>
<div><div class="card" style="margin-bottom:16px"><h2>Why it ran this way</h2>{_list(result.plan.why)}</div>
<div class="card"><h2>Environment</h2>{_table(result.environment)}</div></div>
</div></body></html>
"""


def _text(value: Any) -> str:
    return html.escape(str(value))


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
    given = {key: value for key, value in task.to_dict().items() if value is not None}
    chosen = {key: value for key, value in given.items() if usual[key] != value and key != "name"}
    rest = {key: value for key, value in given.items() if usual[key] == value}
    return f"{_table(chosen)}<details><summary>defaults</summary>{_table(rest)}</details>"


def _table(values: dict[str, Any]) -> str:
    rows = []
    for key, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        rows.append(f"<tr><td>{_text(key)}</td><td>{_text(shown)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _list(items: Any) -> str:
    return f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in items)}</ul>"
