"""Draw the learning curves of a sweep's members as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from weft.engine.report.charts import Frame, Scale, nice_ticks, path, thinned
from weft.engine.report.scales import back_to_front, mark, scores_of, span_of
from weft.engine.results.sweep_result import SweepResult

POINTS = 160  # of a curve; a screen shows no more
FRAME = Frame(width=560, height=300, left=50, right=14, top=12, bottom=34)


def curves(result: SweepResult, column: str, best: Collection[int]) -> str:
    """An SVG with ``column`` of every member's history over epochs; "" where nothing was measured."""
    histories = [_points(member.history, column) for member in result.tasks]
    known = [value for points in histories for _, value in points]
    if not known:
        return ""
    low, high = _visible(histories, known, column.endswith("loss"))
    ticks = nice_ticks(low, high)
    epochs = max(points[-1][0] for points in histories if points)
    to_x, to_y = FRAME.across(1, max(epochs, 2)), FRAME.up(ticks[0], ticks[-1])
    scores, span = scores_of(result), span_of(result)
    lines = [
        f'<polyline {mark(i, scores[i], span, best)} points="{_path(histories[i], to_x, to_y, ticks)}"/>'
        for i in back_to_front(scores, best)
        if histories[i]
    ]
    parts = [FRAME.grid(ticks, to_y), _epochs(epochs, to_x), *lines]
    return FRAME.svg(f"{column} by epoch", parts, 'class="lines"')


def _points(history: dict[str, list[float]], column: str) -> list[tuple[int, float]]:
    values = history.get(column, [])
    return [(epoch, value) for epoch, value in enumerate(values, 1) if value is not None and math.isfinite(value)]


def _visible(
    histories: Sequence[Sequence[tuple[int, float]]], known: Sequence[float], loss: bool
) -> tuple[float, float]:
    """The range to show: a loss that explodes leaves it at the top, the first steps of a metric at the bottom."""
    ordered = sorted(known)
    if not loss:
        return ordered[int(0.08 * (len(ordered) - 1))], ordered[-1]
    starts = [points[0][1] for points in histories if points]
    highest = max(ordered[int(0.98 * (len(ordered) - 1))], median(starts))
    return ordered[0], min(ordered[-1], 1.25 * highest if highest > 0 else highest)


def _path(points: Sequence[tuple[int, float]], to_x: Scale, to_y: Scale, ticks: Sequence[float]) -> str:
    inside = ((epoch, min(max(value, ticks[0]), ticks[-1])) for epoch, value in thinned(points, POINTS))
    return path(inside, to_x, to_y)


def _epochs(epochs: int, to_x: Scale) -> str:
    marks = sorted({1, *(round(epochs * share) for share in (0.25, 0.5, 0.75)), epochs} - {0})
    shown = "".join(FRAME.word(to_x(epoch), FRAME.height - 16, epoch) for epoch in marks)
    return shown + FRAME.word((FRAME.left + FRAME.end) / 2, FRAME.height - 2, "epoch")
