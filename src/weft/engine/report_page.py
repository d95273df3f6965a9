"""report.html of a sweep: one self-contained page that says which settings won, by how much, and why.

Every graph has a section of its own, since scores on different graphs do not compare.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.event import finite
from weft.core.files import write_text
from weft.core.plan import Plan
from weft.core.sweep import setting_of
from weft.core.task import Task
from weft.core.units import show_bytes, show_loss, show_seconds
from weft.engine.charts import (
    Curve,
    Span,
    bullets,
    chart,
    curves,
    effect_chart,
    head,
    package_file,
    parallel,
    rank_key,
    scores_of,
    span_of,
    table,
    text,
)
from weft.engine.ranking import (
    Standing,
    chosen_settings,
    effects,
    in_common,
    labels_of,
    repeats,
    score_of,
    standings,
    verdict,
    what_mattered,
)
from weft.engine.result import Result, plus_minus
from weft.engine.sweep_result import SweepResult

# ---- Predicted and measured time and memory of a group, as a small table for the reports.

ROWS = {
    "epoch": ("epoch_seconds", show_seconds),
    "tensors at the peak": ("peak_bytes", show_bytes),
    "held by the allocator": ("reserved_bytes", show_bytes),
    "the whole process": ("process_bytes", show_bytes),
    "rows from the feature cache": ("feature_hit_rate", "{:.1%}".format),
    "lists from the cache": ("list_hit_rate", "{:.1%}".format),
}


def predicted_and_measured(plan: Plan) -> str:
    """A row for everything that is known from one side at least; nothing if there is none."""
    rows = [(words, _shown(plan.cost, *how), _shown(plan.measured, *how)) for words, how in ROWS.items()]
    cells = "".join(
        f"<tr><td>{text(words)}</td><td>{text(predicted or '–')}</td><td>{text(measured or '–')}</td></tr>"
        for words, predicted, measured in rows
        if predicted or measured
    )
    head = "<tr><td></td><td>predicted</td><td>measured</td></tr>"
    return f"<table>{head}{cells}</table>" if cells else ""


def _shown(amounts: Mapping[str, Any], key: str, show: Any) -> str:
    value = amounts.get(key)
    return show(value) if isinstance(value, (int, float)) and value > 0 else ""


def cache_words(plan: Plan) -> str:
    """What caches had, in a sentence; empty without any."""
    found = plan.measured
    parts = [
        f"{found[rate]:.1%} of {found[count]:,.0f} {what}"
        for rate, count, what in (
            ("feature_hit_rate", "rows_read", "feature rows"),
            ("list_hit_rate", "lists_read", "neighbour lists"),
        )
        if rate in found
    ]
    return f"from the cache: {', '.join(parts)}" if parts else ""


MOST_NAMED = 4  # graphs in a title
MOST_SETTINGS = 50
ENDS = {"stopped": "stopped early"}
SPLITS = {"val": "validation", "test": "test", "train": "training"}


def write_sweep_report(result: SweepResult, path: Path) -> None:
    """Write the page for ``result`` to ``path``, in one piece."""
    write_text(path, render_sweep_report(result))


def render_sweep_report(result: SweepResult) -> str:
    """The page: what won on every graph and why, every member, plan, environment."""
    parts = result.by_graph()
    title = f"{result.sweep.label}: {_count(len(result), 'training')} on {_where(result)}"
    sections = [
        _section(part, name if len(parts) > 1 else "", place) for place, (name, part) in enumerate(parts.items())
    ]
    page = [
        f"<h1>{text(title)}</h1><p>{text(_sentence(result))}</p>",
        _overview(parts) if len(parts) > 1 else "",
        *sections,
        _trouble(result),
        f'<div class="row">{_plan(result.plan)}{_about(result)}</div>',
        f'<div id="tip" hidden></div><script>\n{package_file("sweep.js")}</script></body></html>\n',
    ]
    return head(title, "\n" + package_file("sweep.css")) + "\n".join(part for part in page if part)


def _where(result: SweepResult) -> str:
    names = result.sweep.graphs
    if len(names) == 1:
        return str(result.graph.get("name", "a graph"))
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} graphs"


def _section(result: SweepResult, heading: str, place: int) -> str:
    """What there is to see of one graph: the winner, what mattered, charts, every member."""
    ranked = standings(result)
    best = ranked[0].members if ranked else ()
    parts = [
        f'<h1 class="graph">{text(heading)} <span class="small">{text(_size(result))}</span></h1>' if heading else "",
        _winner(result, ranked),
        _settings_table(result),
        _card("parallel", "Settings and score", _legend(result), parallel(result, best)),
        f'<div class="row">{_curves(result, best)}</div>',
        _effects(result, best),
        _members(result, best),
        f'<script class="data" type="application/json">{_data(result)}</script>',
    ]
    return f'<section id="graph-{place}">' + "\n".join(part for part in parts if part) + "</section>"


def _size(result: SweepResult) -> str:
    return ", ".join(f"{result.graph[key]:,} {key}" for key in ("nodes", "edges") if key in result.graph)


def _overview(parts: Mapping[str, SweepResult]) -> str:
    """A row a graph: the best settings there, and the way to its section."""
    rows = []
    for place, (name, part) in enumerate(parts.items()):
        first = next(iter(standings(part)), None)
        link = f'<a href="#graph-{place}">{text(name)}</a>'
        best = "no member reached an evaluation" if first is None else first.name
        score = "–" if first is None else f"{part.metric.replace('_', ' ')} {first.score:.4f}"
        rows.append(f"<tr><td>{link}</td><td>{len(part)}</td><td>{text(best)}</td><td>{text(score)}</td></tr>")
    heads = "<tr><th>graph</th><th>trainings</th><th>best settings</th><th>score</th></tr>"
    title = 'Graphs <span class="small">scores on different graphs do not compare</span>'
    return f'<div class="card graphs"><h2>{title}</h2><table>{heads}{"".join(rows)}</table></div>'


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _sentence(result: SweepResult) -> str:
    ends = ", ".join(f"{count} {ENDS.get(status, status)}" for status, count in result.statuses.items())
    epochs = sum(member.metrics.get("epochs_run", 0) for member in result.tasks)
    speed = f" ({epochs / result.seconds:,.0f} epochs per second, all together)" if result.seconds > 0 else ""
    groups = _count(len(result.plan), "group")
    return f"{ends}; {epochs:,} epochs in {result.seconds:.1f} s{speed}, trained in {groups}."


# ---- the winner --------------------------------------------------------------------------------------


def _winner(result: SweepResult, ranked: Sequence[Standing]) -> str:
    if not ranked:
        return '<div class="card winner"><h2>No winner</h2>No member reached an evaluation.</div>'
    first = ranked[0]
    common = in_common(result)
    said = ([common] if common else []) + what_mattered(effects(result))
    why = f"<h2>What mattered</h2>{bullets(said[:6])}" if said else ""
    alone = len(first.members) == 1
    single = result.best()
    value = f"{score_of(single, result.metric):.4f}"
    pick = "" if alone else f"<p>Best single training: <b>{text(single.name)}</b>, {value}.</p>"
    return (
        f'<div class="card winner"><div><h2>{_winner_words(result)}</h2><div class="big">{text(first.name)}</div>'
        f'<div class="figures">{_figures(result, first)}</div><p>{text(verdict(result, ranked))}</p>{pick}'
        f"{_settings(result.tasks[first.members[0]].task)}</div><div>{why}</div></div>"
    )


def _winner_words(result: SweepResult) -> str:
    split = result.metric.partition("_")[0]
    return f"Best settings, by {SPLITS.get(split, split)} {text(result.metric.partition('_')[2].replace('_', ' '))}"


def _figures(result: SweepResult, first: Standing) -> str:
    split, _, metric = result.metric.partition("_")
    seeds = f", mean of {len(first.members)} {repeats(result)} ± its standard error" if first.error is not None else ""
    shown = [_figure(first.score, first.error, f"{SPLITS.get(split, split)} {metric}{seeds}")]
    if first.test is not None and split != "test":
        shown.append(_figure(first.test, first.test_error, f"test {metric}, not used to choose"))
    return "".join(shown)


def _figure(value: float, error: float | None, words: str) -> str:
    more = "" if error is None else f' <span class="pm">± {error:.4f}</span>'
    return f'<div><b>{value:.4f}{more}</b><span class="small">{text(words.replace("_", " "))}</span></div>'


def _settings(task: Task) -> str:
    usual = Task(graph="any").to_dict()
    hidden = ("name", "seed", "split", "given")
    chosen = {key: value for key, value in task.to_dict().items() if usual.get(key) != value and key not in hidden}
    return f"<details><summary>all its settings that are not defaults</summary>{table(chosen)}</details>"


# ---- charts ------------------------------------------------------------------------------------------


def _card(kind: str, title: str, extra: str, body: str) -> str:
    return f'<div class="card {kind}"><h2>{text(title)}{extra}</h2>{body}</div>' if body else ""


def _legend(result: SweepResult) -> str:
    span = span_of(result)
    ramp = f'{span.low:.3f}<i class="ramp"></i>{span.high:.3f}'
    return f'<span class="legend">{ramp}<span class="best">best settings</span></span>'


def _curves(result: SweepResult, best: Collection[int]) -> str:
    drawn = [(result.metric.replace("_", " "), curves(result, result.metric, best))]
    drawn.append(("training loss", curves(result, "loss", best)))
    return "".join(_card("", title, "", svg) for title, svg in drawn)


def _effects(result: SweepResult, best: Collection[int]) -> str:
    span = span_of(result)
    cards = [_card("", effect.setting, "", effect_chart(result, effect, span, best)) for effect in effects(result)]
    if not cards:
        return ""
    words = "one dot per member; the square is the mean per value, the bar one standard deviation"
    return (
        f'<h2 class="above">Effect of each setting on {text(result.metric.replace("_", " "))} '
        f'<span class="small">{words}</span></h2><div class="row small-multiples">{"".join(cards)}</div>'
    )


# ---- every member ------------------------------------------------------------------------------------


def _settings_table(result: SweepResult) -> str:
    """Mean and deviation over seeds of every choice of settings, where there are several seeds or many choices."""
    found = result.settings_table() if result.sweep.varying else []
    several = any(one.splits > 1 for one in found)
    if len(found) < 2 and not several:
        return ""
    heads = ("#", "settings", result.metric.replace("_", " "), "test", "over" if several else "seeds", "pruned")
    rows = [
        (rank, one.name, plus_minus(one.mean, one.deviation),
         "–" if one.test_mean is None else plus_minus(one.test_mean, one.test_deviation),
         one.repeats if several else len(one.members), one.pruned or "")
        for rank, one in enumerate(found[:MOST_SETTINGS], 1)
    ]  # fmt: skip
    more = f"<p>and {len(found) - MOST_SETTINGS} more</p>" if len(found) > MOST_SETTINGS else ""
    over = f"mean ± standard deviation over {repeats(result)}; pruned runs count apart"
    title = f'Settings <span class="small">{over}</span>'
    body = "".join("<tr>" + "".join(f"<td>{text(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    head_row = "".join(f"<th>{text(name)}</th>" for name in heads)
    table_html = f"<table><thead><tr>{head_row}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="card settings"><h2>{title}</h2><div class="scroll">{table_html}</div>{more}</div>'


def _members(result: SweepResult, best: Collection[int]) -> str:
    split, _, metric = result.metric.partition("_")
    scored = [result.metric] + [f"test_{metric}"] * (split == "val")
    columns = ["#", *(result.sweep.varying or ("name",)), "status", *scored, "best epoch", "epochs", "final loss"]
    scores = scores_of(result)
    order = sorted(range(len(result)), key=lambda i: (-rank_key(scores[i]), i))
    rows = _rows(result, order, scored, best)
    heads = "".join(f'<th tabindex="0">{text(column.replace("_", " "))}</th>' for column in columns)
    return (
        '<div class="card members"><h2>Every training <span class="small">click a heading to sort, a row to mark it'
        f'</span></h2><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _rows(result: SweepResult, order: Sequence[int], scored: Sequence[str], best: Collection[int]) -> list[str]:
    labels, settings, span = labels_of(result), result.sweep.varying, span_of(result)
    rows = []
    for rank, i in enumerate(order, 1):
        member = result.tasks[i]
        values = [(key, setting_of(member.task, key)) for key in settings]
        cells = [_cell(rank), *(_cell(labels.word(key, value), value) for key, value in values)]
        cells += [] if settings else [_cell(member.name)]
        cells.append(f'<td class="{text(member.status)}">{text(member.status)}</td>')
        cells += [_score(member, scored[0], span), *(_score(member, key, None) for key in scored[1:])]
        cells += [_cell(member.metrics.get("best_epoch") or "–"), _cell(member.metrics.get("epochs_run", 0))]
        cells.append(_cell(_final_loss(member)))
        kind = ' class="best"' if i in best else ""
        rows.append(f'<tr data-i="{i}"{kind} title="{text(member.name)}">{"".join(cells)}</tr>')
    return rows


def _cell(shown: Any, value: Any = None) -> str:
    """A cell; ``value`` is what it is sorted by, where that is a number that its text is not."""
    number = f' data-v="{value}"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return f"<td{number}>{text(shown)}</td>"


def _score(member: Result, key: str, span: Span | None) -> str:
    """A cell with a score, and a bar behind it for its place in ``span``."""
    value = score_of(member, key)
    if value is None:
        return "<td>–</td>"
    if span is None:
        return f'<td data-v="{value}">{value:.4f}</td>'
    return f'<td data-v="{value}" class="score" style="--s:{100 * span.share(value):.0f}%">{value:.4f}</td>'


def _final_loss(member: Result) -> str:
    losses = [value for value in member.history.get("loss", ()) if value is not None]
    return show_loss(losses[-1]) if losses else "–"


def _trouble(result: SweepResult) -> str:
    said = [member.message for member in result.tasks if member.status in ("diverged", "failed")]
    more = [f"... and {len(said) - 12} more, in the files of their tasks"] if len(said) > 12 else []
    return _card("", "What went wrong", "", bullets(said[:12] + more)) if said else ""


# ---- how it was run ----------------------------------------------------------------------------------


def _plan(plans: Sequence[Plan]) -> str:
    shown = [
        f"<details{' open' if len(plans) == 1 else ''}><summary>{text(_group_words(plan))}</summary>"
        f"{bullets(plan.why)}{predicted_and_measured(plan)}</details>"
        for plan in plans
    ]
    return f'<div class="card"><h2>How it ran, and why</h2>{"".join(shown)}</div>'


def _group_words(plan: Plan) -> str:
    stacks = f" in {len(plan.stacks)} stacks" if len(plan.stacks) > 1 else ""
    more = ", ..." if len(plan.members) > 1 else ""
    return f"{_count(len(plan.members), 'task')}, {plan.join}{stacks} on {plan.device}: {plan.members[0]}{more}"


def _about(result: SweepResult) -> str:
    graph = {f"graph {key}" if key != "name" else "graph": value for key, value in result.graph.items()}
    if not graph:
        graph = {f"graph {name}": _size(part) for name, part in result.by_graph().items()}
    return f'<div class="card"><h2>Environment</h2>{table({**result.environment, **graph})}</div>'


def _data(result: SweepResult) -> str:
    """What the script shows beside the pointer. ``<`` is written so that no value can end the script."""
    metric = result.metric
    rows = [
        {"name": member.name, "status": member.status, "score": score_of(member, metric)} for member in result.tasks
    ]
    data = {"metric": metric.replace("_", " "), "tasks": rows, "settings": list(chosen_settings(result))}
    return json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c")


# ---- report.html: one self-contained page about one training.

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
<p>{text(_task_sentence(result))}</p>
<div class="row short">{_headlines(result)}</div>
<div class="row">{_charts(result)}</div>
<div class="row">
<div class="card"><h2>Settings</h2>{_task_settings(task)}</div>
<div class="card"><h2>At the best epoch</h2>{table(result.metrics)}</div>
<div><div class="card" style="margin-bottom:16px"><h2>Why it ran this way</h2>{bullets(result.plan.why)}
{predicted_and_measured(result.plan)}</div>
<div class="card"><h2>Environment</h2>{table(result.environment)}</div></div>
</div></body></html>
"""


def _task_sentence(result: Result) -> str:
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


def _task_settings(task: Task) -> str:
    """What was chosen for this task, and the defaults of the rest behind a fold."""
    usual = Task(graph="any").to_dict()
    given = {key: value for key, value in task.to_dict().items() if value is not None and key != "given"}
    chosen = {key: value for key, value in given.items() if usual[key] != value and key != "name"}
    rest = {key: value for key, value in given.items() if usual[key] == value}
    return f"{table(chosen)}<details><summary>defaults</summary>{table(rest)}</details>"
