"""Learning curves of a sweep's members as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from weft.engine.report.html import text
from weft.engine.report.line_chart import nice_ticks
from weft.engine.report.scales import Scale, back_to_front, linear, mark, scores_of, span_of
from weft.engine.results.sweep_result import SweepResult

POINTS = 160  # of a curve; a screen shows no more
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 34


def curves(result: SweepResult, column: str, best: Collection[int]) -> str:
    """An SVG with ``column`` of every member's history over epochs; "" where nothing was measured."""
    histories = [_points(member.history, column) for member in result.tasks]
    known = [value for points in histories for _, value in points]
    if not known:
        return ""
    low, high = _visible(histories, known, column.endswith("loss"))
    ticks = nice_ticks(low, high)
    epochs = max(points[-1][0] for points in histories if points)
    to_x = linear(1, max(epochs, 2), LEFT, WIDTH - RIGHT)
    to_y = linear(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    scores, span = scores_of(result), span_of(result)
    lines = [
        f'<polyline {mark(i, scores[i], span, best)} points="{_path(histories[i], to_x, to_y, ticks)}"/>'
        for i in back_to_front(scores, best)
        if histories[i]
    ]
    return (
        f'<svg class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(column)} by epoch">'
        f"{_rows(ticks, to_y)}{_epochs(epochs, to_x)}{''.join(lines)}</svg>"
    )


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
    stride = max(1, math.ceil(len(points) / POINTS))
    kept = list(points[::stride])
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    inside = ((epoch, min(max(value, ticks[0]), ticks[-1])) for epoch, value in kept)
    return " ".join(f"{to_x(epoch):.1f},{to_y(value):.1f}" for epoch, value in inside)


def _rows(ticks: Sequence[float], to_y: Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" y1="{to_y(tick):.1f}" x2="{WIDTH - RIGHT}" y2="{to_y(tick):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{to_y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
        for tick in ticks
    )


def _epochs(epochs: int, to_x: Scale) -> str:
    marks = sorted({1, *(round(epochs * share) for share in (0.25, 0.5, 0.75)), epochs} - {0})
    shown = "".join(f'<text x="{to_x(e):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{e}</text>' for e in marks)
    return shown + f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">epoch</text>'
