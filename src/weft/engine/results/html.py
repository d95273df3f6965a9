"""Results as HTML, for notebooks: small tables that need no style of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from weft.engine.results.settings_scores import plus_minus

if TYPE_CHECKING:
    from weft.engine.results.result import Result
    from weft.engine.results.sweep_result import SweepResult

MOST_ROWS = 30


def result_html(result: Result) -> str:
    """One training: how it ended, and every split at the best epoch."""
    metrics, name = result.metrics, str(result.metrics.get("metric", ""))
    rows = [
        (split, _number(metrics.get(f"{split}_{name}")), _number(metrics.get(f"{split}_loss")))
        for split in ("train", "val", "test")
        if f"{split}_{name}" in metrics
    ]
    ran = f"best epoch {metrics.get('best_epoch', 0)} of {metrics.get('epochs_run', 0)} run, "
    ran += f"{metrics.get('seconds', 0.0):.1f} s"
    message = f"<p>{escape(result.message)}</p>" if result.message else ""
    heading = f"<p><b>{escape(result.name)}</b>: {escape(result.status)}, {ran}</p>"
    return heading + message + html_table(("split", name.replace("_", " "), "loss"), rows)


def sweep_html(result: SweepResult) -> str:
    """A sweep: how its members ended, and the settings of every graph with their scores over seeds."""
    ends = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
    heading = f"<p><b>{escape(result.sweep.label)}</b>: {len(result)} tasks, {escape(ends)}; {result.seconds:.1f} s</p>"
    parts = result.by_graph()
    return heading + "".join(_graph_html(part, graph if len(parts) > 1 else "") for graph, part in parts.items())


def _graph_html(result: SweepResult, graph: str) -> str:
    found = result.settings_table()
    rows = [
        (rank, one.name, plus_minus(one.mean, one.deviation), _mean(one.test_mean, one.test_deviation),
         one.repeats if one.splits > 1 else len(one.members), one.pruned or "")
        for rank, one in enumerate(found[:MOST_ROWS], 1)
    ]  # fmt: skip
    more = f"<p>... and {len(found) - MOST_ROWS} more</p>" if len(found) > MOST_ROWS else ""
    heading = f"<p>{escape(graph)}</p>" if graph else ""
    columns = (
        "",
        "settings",
        result.metric.replace("_", " "),
        "test",
        "over" if any(one.splits > 1 for one in found) else "seeds",
        "pruned",
    )
    return heading + html_table(columns, rows) + more


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of plain cells."""
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "–"


def _mean(mean: float | None, deviation: float | None) -> str:
    return "–" if mean is None else plus_minus(mean, deviation)
