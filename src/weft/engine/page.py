"""Write report.html of a task or a sweep, one self-contained page, and the small tables that notebooks show.

The report of a sweep says which settings won, by how much, and why. Every graph has a section of its own, since scores
on different graphs do not compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.core.event import finite
from weft.core.plan import Plan
from weft.core.sweep import setting_of
from weft.core.task import Task
from weft.core.units import show_bytes, show_loss, show_seconds
from weft.engine.charts import (
    Members,
    effect_chart,
    finite_points,
    head,
    line_chart,
    member_curves,
    package_file,
    parallel,
    text,
)
from weft.engine.ranking import (
    SettingsScore,
    chosen_settings,
    effects,
    in_common,
    is_number,
    labels_of,
    plus_minus,
    pruned_words,
    repeats,
    score_of,
    verdict,
    what_mattered,
)
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult

COSTS = {
    "epoch": ("epoch_seconds", show_seconds),
    "tensors at the peak": ("peak_bytes", show_bytes),
    "held by the allocator": ("reserved_bytes", show_bytes),
    "the whole process": ("process_bytes", show_bytes),
    "rows from the feature cache": ("feature_hit_rate", "{:.1%}".format),
    "lists from the cache": ("list_hit_rate", "{:.1%}".format),
}
MOST_NAMED = 4  # graphs in a title
MOST_SETTINGS, MOST_SETTINGS_IN_NOTEBOOK = 50, 30
MOST_MESSAGES = 12
SPLITS = {"test": "test", "val": "validation", "train": "training"}


# ---- Elements


def row(cells: Iterable[Any]) -> str:
    """A row of plain cells."""
    return "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>"


def table(values: Mapping[str, Any]) -> str:
    """Two columns: a name and its value."""
    rows = (row((key, f"{value:.6g}" if isinstance(value, float) else value)) for key, value in values.items())
    return f"<table>{''.join(rows)}</table>"


def columns(heads: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain cells with a heading per column."""
    shown = "".join(f"<th>{text(name)}</th>" for name in heads)
    return f"<table><thead><tr>{shown}</tr></thead><tbody>{''.join(map(row, rows))}</tbody></table>"


def bullets(items: Iterable[Any]) -> str:
    """A list with bullets."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def card(title: str, body: str, kind: str = "", extra: str = "") -> str:
    """A framed part of the page; "" without a body."""
    return f'<div class="{f"card {kind}".strip()}"><h2>{text(title)}{extra}</h2>{body}</div>' if body else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _predicted_and_measured(plan: Plan) -> str:
    """A row for every cost that was predicted or measured; "" if there is none."""
    rows = []
    for name, (key, show) in COSTS.items():
        values = [amounts.get(key) for amounts in (plan.cost, plan.measured)]
        cells = [show(value) if is_number(value) and value > 0 else "–" for value in values]
        if cells != ["–", "–"]:
            rows.append(row((name, *cells)))
    return f"<table><tr><td></td><td>predicted</td><td>measured</td></tr>{''.join(rows)}</table>" if rows else ""


def cache_words(plan: Plan) -> str:
    """The hit rates of caches in a sentence; "" without any."""
    measured = plan.measured
    rates = {"feature_hit_rate": ("rows_read", "feature rows"), "list_hit_rate": ("lists_read", "neighbour lists")}
    parts = [
        f"{measured[rate]:.1%} of {measured[count]:,.0f} {noun}"
        for rate, (count, noun) in rates.items()
        if rate in measured
    ]
    return f"from the cache: {', '.join(parts)}" if parts else ""


def _settings_table(scores: Sequence[SettingsScore], metric: str, most: int, number: str) -> str:
    """The ``most`` best settings with mean and deviation over seeds; ``number``: the heading of their ranks."""
    several = any(score.splits > 1 for score in scores)
    rows = [
        (
            rank,
            score.name,
            plus_minus(score.mean, score.deviation),
            plus_minus(score.test_mean, score.test_deviation),
            score.repeats if several else len(score.members),
            score.pruned or "",
        )
        for rank, score in enumerate(scores[:most], 1)
    ]
    heads = (number, "settings", metric.replace("_", " "), "test", "over" if several else "seeds", "pruned")
    return columns(heads, rows)


# ---- One training


def render_report(result: Result) -> str:
    """The page: headline numbers, curves, settings, environment, and why it ran the way it did."""
    task, metrics, history = result.task, result.metrics, result.history
    name, best = metrics["metric"], metrics["best_epoch"] or None
    title = f"{task.label} on {task.graph_name}"
    how = {"stopped": "stopped early"}.get(result.status, result.status)
    if not best:
        chosen = "no epoch was usable"
    elif f"val_{name}" in metrics:
        chosen = f"best on validation at epoch {best}"
    else:
        chosen = f"no validation nodes, so the weights are those of epoch {best}"
    sentence = (
        f"{how.capitalize()} after {metrics['epochs_run']} of {task.epochs} epochs in {metrics['seconds']:.1f} s "
        f"({metrics['seconds_per_epoch'] * 1e3:.2f} ms per epoch); {chosen}."
    )
    headlines = "".join(
        f'<div class="card"><div class="big">{value:.4f}</div>'
        f'<div class="small">{words} {name.replace("_", " ")}</div></div>'
        for split, words in SPLITS.items()
        if (value := metrics.get(f"{split}_{name}")) is not None
    )
    splits = [split for split in ("train", "val", "test") if f"{split}_loss" in history]
    losses = {"train": ("training step", "loss"), **({"val": ("validation", "val_loss")} if "val" in splits else {})}
    scores = {split: (SPLITS[split], f"{split}_{name}") for split in splits}
    charts = ""
    for heading, lines in (("loss", losses), (name.replace("_", " "), scores)):
        drawn = [(f'class="{style}"', finite_points(history[column])) for style, (_, column) in lines.items()]
        chart = line_chart(heading, drawn, marked=best)
        entries = [(style, words) for style, (words, _) in lines.items()] + ([("best", "best epoch")] if best else [])
        legend = "".join(f'<span class="{style}">{text(words)}</span>' for style, words in entries)
        caption = f'<figcaption>{text(heading)}<span class="legend">{legend}</span></figcaption>'
        charts += f'<div class="card"><figure>\n{caption}\n{chart}</figure></div>' if chart else ""
    defaults = Task(graph="any").to_dict()
    settings = {key: value for key, value in task.to_dict().items() if value is not None and key != "given"}
    changed = {key: value for key, value in settings.items() if defaults[key] != value and key != "name"}
    rest = {key: value for key, value in settings.items() if defaults[key] == value}
    return f"""{head(title)}
<h1>{text(title)}</h1>
<p>{text(sentence)}</p>
<div class="row short">{headlines}</div>
<div class="row">{charts}</div>
<div class="row">
{card("Settings", f"{table(changed)}<details><summary>defaults</summary>{table(rest)}</details>")}
{card("At the best epoch", table(metrics))}
<div><div class="card" style="margin-bottom:16px"><h2>Why it ran this way</h2>{bullets(result.plan.why)}
{_predicted_and_measured(result.plan)}</div>
{card("Environment", table(result.environment))}</div>
</div></body></html>
"""


def result_html(result: Result) -> str:
    """One training in a notebook: how it ended, and every split at the best epoch."""
    metrics, name = result.metrics, str(result.metrics.get("metric", ""))
    rows = []
    for split in ("train", "val", "test"):
        if f"{split}_{name}" in metrics:
            values = [metrics.get(f"{split}_{column}") for column in (name, "loss")]
            rows.append((split, *(f"{value:.4f}" if isinstance(value, float) else "–" for value in values)))
    ran = f"best epoch {metrics.get('best_epoch', 0)} of {metrics.get('epochs_run', 0)} run, "
    ran += f"{metrics.get('seconds', 0.0):.1f} s"
    message = f"<p>{text(result.message)}</p>" if result.message else ""
    heading = f"<p><b>{text(result.name)}</b>: {text(result.status)}, {ran}</p>"
    return heading + message + columns(("split", name.replace("_", " "), "loss"), rows)


# ---- A sweep


def render_sweep_report(result: SweepResult) -> str:
    """The page: what won on every graph and why, every member, plan, environment."""
    graphs, names = result.by_graph(), result.sweep.graphs
    where = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} graphs"
    where = str(result.graph.get("name", "a graph")) if len(names) == 1 else where
    title = f"{result.sweep.label}: {_count(len(result), 'training')} on {where}"
    ends = {"stopped": "stopped early"}
    ended = ", ".join(f"{count} {ends.get(status, status)}" for status, count in result.statuses.items())
    epochs = sum(member.metrics.get("epochs_run", 0) for member in result.tasks)
    speed = f" ({epochs / result.seconds:,.0f} epochs per second, all together)" if result.seconds > 0 else ""
    groups = _count(len(result.plan), "group")
    sentence = f"{ended}; {epochs:,} epochs in {result.seconds:.1f} s{speed}, trained in {groups}."
    messages = [member.message for member in result.tasks if member.status in ("diverged", "failed")]
    if len(messages) > MOST_MESSAGES:
        more = len(messages) - MOST_MESSAGES
        messages[MOST_MESSAGES:] = [f"... and {more} more, in the files of their tasks"]
    sizes = {f"graph {key}" if key != "name" else "graph": value for key, value in result.graph.items()}
    sizes = sizes or {f"graph {name}": _size(part) for name, part in graphs.items()}
    page = [
        f"<h1>{text(title)}</h1><p>{text(sentence)}</p>",
        _overview(graphs) if len(graphs) > 1 else "",
        *(
            _section(part, name if len(graphs) > 1 else "", number)
            for number, (name, part) in enumerate(graphs.items())
        ),
        card("What went wrong", bullets(messages) if messages else ""),
        f'<div class="row">{card("How it ran, and why", _plans(result.plan) or " ")}',
        f"{card('Environment', table({**result.environment, **sizes}))}</div>",
        f'<div id="tip" hidden></div><script>\n{package_file("sweep.js")}</script></body></html>\n',
    ]
    return head(title, "\n" + package_file("sweep.css")) + "\n".join(part for part in page if part)


def _size(result: SweepResult) -> str:
    return ", ".join(f"{result.graph[key]:,} {key}" for key in ("nodes", "edges") if key in result.graph)


def _overview(graphs: Mapping[str, SweepResult]) -> str:
    """A row per graph: the best settings there, and a link to its section."""
    rows = []
    for number, (name, part) in enumerate(graphs.items()):
        first = next(iter(part.settings_table()), None)
        best = "no member reached an evaluation" if first is None else first.name
        score = "–" if first is None else f"{part.metric.replace('_', ' ')} {first.mean:.4f}"
        link = f'<a href="#graph-{number}">{text(name)}</a>'
        rows.append(f"<tr><td>{link}</td><td>{len(part)}</td><td>{text(best)}</td><td>{text(score)}</td></tr>")
    heads = "<tr><th>graph</th><th>trainings</th><th>best settings</th><th>score</th></tr>"
    remark = ' <span class="small">scores on different graphs do not compare</span>'
    return card("Graphs", f"<table>{heads}{''.join(rows)}</table>", "graphs", remark)


def _section(result: SweepResult, heading: str, number: int) -> str:
    """One graph: the winner, what mattered, charts, every member."""
    ranked = result.settings_table()
    members = Members(result, ranked[0].positions if ranked else ())
    moved, metric = effects(result), result.metric.replace("_", " ")
    ramp = f'{members.span.low:.3f}<i class="ramp"></i>{members.span.high:.3f}'
    legend = f'<span class="legend">{ramp}<span class="best">best settings</span></span>'
    curves = card(metric, member_curves(members, result.metric)) + card("training loss", member_curves(members, "loss"))
    cards = "".join(card(effect.setting, effect_chart(members, effect)) for effect in moved)
    words = "one dot per member; the square is the mean per value, the bar one standard deviation"
    words += "; without pruned members" if 0 < result.statuses.get("pruned", 0) < len(result) else ""
    rows = [
        {"name": member.name, "status": member.status, "score": score}
        for member, score in zip(result.tasks, members.scores, strict=True)
    ]
    data = {"metric": metric, "tasks": rows, "settings": list(chosen_settings(result))}
    # What the script shows at the pointer. ``<`` is written so that no value can end the script.
    script = json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c")
    parts = [
        f'<h1 class="graph">{text(heading)} <span class="small">{text(_size(result))}</span></h1>' if heading else "",
        _winner(result, ranked) if ranked else card("No winner", "No member reached an evaluation.", "winner"),
        _settings_card(result),
        card("Settings and score", parallel(members), "parallel", legend),
        f'<div class="row">{curves}</div>',
        f'<h2 class="above">Effect of each setting on {text(metric)} <span class="small">{words}</span></h2>'
        f'<div class="row small-multiples">{cards}</div>' if cards else "",
        _members_table(members),
        f'<script class="data" type="application/json">{script}</script>',
    ]  # fmt: skip
    return f'<section id="graph-{number}">' + "\n".join(part for part in parts if part) + "</section>"


def _winner(result: SweepResult, ranked: Sequence[SettingsScore]) -> str:
    """The best settings: their score, how certain the lead is, and what mattered."""
    first, task = ranked[0], result.tasks[ranked[0].positions[0]].task
    split, _, metric = result.metric.partition("_")
    by = f"{SPLITS.get(split, split)} {metric}"
    seeds = "" if first.deviation is None else f", mean ± standard deviation over {first.repeats}"
    figures = [(first.mean, first.deviation, f"{by}{seeds}")]
    if first.test_mean is not None and split != "test":
        figures.append((first.test_mean, first.test_deviation, f"test {metric}, not used to choose"))
    shown = ""
    for value, spread, words in figures:
        more = "" if spread is None else f' <span class="pm">± {spread:.4f}</span>'
        shown += f'<div><b>{value:.4f}{more}</b><span class="small">{text(words.replace("_", " "))}</span></div>'
    sentences = [words for words in (in_common(result), *what_mattered(effects(result))) if words][:6]
    if result.importance:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in result.importance.items())
        sentences.insert(0, f"importance of the settings for the best tenth, by PED-ANOVA of the study: {shares}")
    sentences += [pruned] if (pruned := pruned_words(result)) else []
    why = f"<h2>What mattered</h2>{bullets(sentences)}" if sentences else ""
    single, pick = result.best(), ""
    if len(first.members) > 1:
        pick = f"<p>Best single training: <b>{text(single.name)}</b>, {score_of(single, result.metric):.4f}.</p>"
    defaults, left_out = Task(graph="any").to_dict(), ("name", "seed", "split", "given")
    changed = {k: value for k, value in task.to_dict().items() if defaults.get(k) != value and k not in left_out}
    return (
        f'<div class="card winner"><div><h2>Best settings, by {text(by.replace("_", " "))}</h2>'
        f'<div class="big">{text(first.name)}</div><div class="figures">{shown}</div>'
        f"<p>{text(verdict(result, ranked))}</p>{pick}<details><summary>all its settings that are not defaults"
        f"</summary>{table(changed)}</details></div><div>{why}</div></div>"
    )


def _settings_card(result: SweepResult) -> str:
    """Every choice of settings, if there are several choices or splits."""
    scores = result.settings_table() if result.sweep.varying else []
    if len(scores) < 2 and not any(score.splits > 1 for score in scores):
        return ""
    more = f"<p>and {len(scores) - MOST_SETTINGS} more</p>" if len(scores) > MOST_SETTINGS else ""
    over = f"mean ± standard deviation over {repeats(result)}; pruned runs count apart"
    body = f'<div class="scroll">{_settings_table(scores, result.metric, MOST_SETTINGS, "#")}</div>{more}'
    return card("Settings", body, "settings", f' <span class="small">{over}</span>')


def _members_table(members: Members) -> str:
    """A row per training, the best first, which the page's script sorts by any column."""
    result, span = members.result, members.span
    split, _, metric = result.metric.partition("_")
    settings, labels = result.sweep.varying, labels_of(result)
    scored = [result.metric] + [f"test_{metric}"] * (split == "val")
    heads = ["#", *(settings or ("name",)), "status", *scored, "best epoch", "epochs", "final loss"]
    rows = []
    for rank, i in enumerate(sorted(range(len(result)), key=lambda i: (-members.rank(i), i)), 1):
        member = result.tasks[i]
        cells = [f"<td>{rank}</td>"]
        for key in settings:
            value = setting_of(member.task, key)
            number = f' data-v="{value}"' if is_number(value) else ""  # what the column is sorted by
            cells.append(f"<td{number}>{text(labels.word(key, value))}</td>")
        cells += [] if settings else [f"<td>{text(member.name)}</td>"]
        cells.append(f'<td class="{text(member.status)}">{text(member.status)}</td>')
        for key in scored:
            score = score_of(member, key)
            bar = f' class="score" style="--s:{100 * span.share(score or 0.0):.0f}%"' if key == scored[0] else ""
            cells.append("<td>–</td>" if score is None else f'<td data-v="{score}"{bar}>{score:.4f}</td>')
        losses = [value for value in member.history.get("loss", ()) if value is not None]
        last = show_loss(losses[-1]) if losses else "–"
        metrics = member.metrics
        cells += [
            f"<td>{text(cell)}</td>" for cell in (metrics.get("best_epoch") or "–", metrics.get("epochs_run", 0), last)
        ]
        kind = ' class="best"' if i in members.best else ""
        rows.append(f'<tr data-i="{i}"{kind} title="{text(member.name)}">{"".join(cells)}</tr>')
    shown = "".join(f'<th tabindex="0">{text(column.replace("_", " "))}</th>' for column in heads)
    body = f"<table><thead><tr>{shown}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    remark = ' <span class="small">click a heading to sort, a row to mark it</span>'
    return card("Every training", f'<div class="scroll">{body}</div>', "members", remark)


def _plans(plans: Sequence[Plan]) -> str:
    """A fold per group: why it ran the way it did, predicted and measured costs."""
    shown = []
    for plan in plans:
        stacks = f" in {len(plan.stacks)} stacks" if len(plan.stacks) > 1 else ""
        more = ", ..." if len(plan.members) > 1 else ""
        members = _count(len(plan.members), "task")
        words = f"{members}, {plan.join}{stacks} on {plan.device}: {plan.members[0]}{more}"
        shown.append(
            f"<details{' open' if len(plans) == 1 else ''}><summary>{text(words)}</summary>"
            f"{bullets(plan.why)}{_predicted_and_measured(plan)}</details>"
        )
    return "".join(shown)


def sweep_html(result: SweepResult) -> str:
    """A sweep in a notebook: how its members ended, and the settings of every graph with their scores over seeds."""
    ends = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
    page = f"<p><b>{text(result.sweep.label)}</b>: {len(result)} tasks, {text(ends)}; {result.seconds:.1f} s</p>"
    graphs = result.by_graph()
    for name, part in graphs.items():
        scores = part.settings_table()
        more = len(scores) - MOST_SETTINGS_IN_NOTEBOOK
        page += f"<p>{text(name)}</p>" if len(graphs) > 1 else ""
        page += _settings_table(scores, part.metric, MOST_SETTINGS_IN_NOTEBOOK, "")
        page += f"<p>... and {more} more</p>" if more > 0 else ""
    return page
