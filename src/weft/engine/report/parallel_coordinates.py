"""Draw parallel coordinates of a sweep as inline SVG: one axis per setting, one line per member."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.settings.grid.values import setting_of
from weft.engine.report.charts import Scale, linear, nice_ticks
from weft.engine.report.html import text
from weft.engine.report.ranking import MOST_VALUES, chosen_settings, labels_of
from weft.engine.report.scales import (
    Span,
    back_to_front,
    is_number,
    mark,
    rank_key,
    scores_of,
    span_of,
    warp,
)
from weft.engine.results.sweep_result import SweepResult, value_of

WIDE, TALL = 1120, 340
SIDE, ABOVE, BELOW = 70, 34, 16
SPREAD = 9.0  # half the height over which members with the same value are fanned out


@dataclass(frozen=True)
class Axis:
    """One vertical axis: where each member crosses it (None: nowhere), and the words beside it."""

    name: str
    heights: tuple[float | None, ...]
    ticks: tuple[tuple[float, str], ...]


def parallel(result: SweepResult, best: Collection[int]) -> str:
    """An SVG with an axis for every setting that varies and one for the score; one line per member."""
    settings = chosen_settings(result)
    if not settings:
        return ""
    scores, span = scores_of(result), span_of(result)
    axes = [_setting_axis(result, key, scores) for key in settings] + [_score_axis(result, scores, span)]
    step = (WIDE - 2 * SIDE) / (len(axes) - 1)
    places = [SIDE + step * position for position in range(len(axes))]
    lines = []
    for i in back_to_front(scores, best):
        crossed = [(x, axis.heights[i]) for x, axis in zip(places, axes, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in crossed if y is not None)
        lines.append(f'<polyline {mark(i, scores[i], span, best)} points="{path}"/>')
    drawn = "".join(_axis(axis, x, x > WIDE / 2 and axis is axes[-1]) for x, axis in zip(places, axes, strict=True))
    return (
        f'<svg class="lines" viewBox="0 0 {WIDE} {TALL}" role="img" aria-label="settings and score of every member">'
        f"{''.join(lines)}{drawn}</svg>"
    )


def _axis(axis: Axis, x: float, last: bool) -> str:
    side, anchor = (9, "start") if last else (-9, "end")
    ticks = "".join(
        f'<line class="tick" x1="{x - 3:.1f}" y1="{y:.1f}" x2="{x + 3:.1f}" y2="{y:.1f}"/>'
        f'<text class="halo" x="{x + side:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{text(word)}</text>'
        for y, word in axis.ticks
    )
    return (
        f'<line class="axis" x1="{x:.1f}" y1="{ABOVE - 8}" x2="{x:.1f}" y2="{TALL - BELOW + 8}"/>{ticks}'
        f'<text class="name" x="{x:.1f}" y="{ABOVE - 18}" text-anchor="middle">{text(axis.name)}</text>'
    )


def _setting_axis(result: SweepResult, key: str, scores: Sequence[float | None]) -> Axis:
    values = [setting_of(member.task, key) for member in result.tasks]
    distinct = {value_of(member, key): value for member, value in zip(result.tasks, values, strict=True)}
    numbers = all(is_number(value) for value in values)
    if numbers and len(distinct) > MOST_VALUES:
        return _number_axis(key, values, warp(result, key, values))
    labels = labels_of(result)
    order = sorted(distinct, key=lambda value: (not is_number(distinct[value]), _sortable(distinct[value])))
    to_y = linear(0, max(len(order) - 1, 1), TALL - BELOW - SPREAD, ABOVE + SPREAD)
    middle = (TALL - BELOW + ABOVE) / 2
    place = {value: to_y(index) if len(order) > 1 else middle for index, value in enumerate(order)}
    heights = _fanned(result, key, place, scores)
    ticks = tuple((place[value], labels.word(key, distinct[value])) for value in order)
    return Axis(key, heights, ticks)


def _fanned(
    result: SweepResult, key: str, place: dict[Any, float], scores: Sequence[float | None]
) -> tuple[float | None, ...]:
    """Heights with members of one value side by side, the best on top: lines that coincide would hide each other."""
    heights: list[float | None] = [None] * len(result.tasks)
    for value, y in place.items():
        members = [i for i, member in enumerate(result.tasks) if value_of(member, key) == value]
        members.sort(key=lambda i: rank_key(scores[i]))
        for rank, i in enumerate(members):
            share = rank / (len(members) - 1) if len(members) > 1 else 0.5
            heights[i] = y + SPREAD * (1 - 2 * share)
    return tuple(heights)


def _number_axis(key: str, values: Sequence[float], change: Scale) -> Axis:
    low, high = min(values), max(values)
    ticks = nice_ticks(low, high)
    if change is math.log10:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**power for power in powers for digit in (1, 3)]
    ticks = [tick for tick in ticks if low <= tick <= high] or [low, high]
    to_y = linear(change(low), change(high), TALL - BELOW, ABOVE)
    return Axis(
        key,
        tuple(to_y(change(value)) for value in values),
        tuple((to_y(change(tick)), f"{tick:.3g}") for tick in ticks),
    )


def _score_axis(result: SweepResult, scores: Sequence[float | None], span: Span) -> Axis:
    to_y = linear(0, 1, TALL - BELOW, ABOVE)
    cut = any(score is not None and score < span.low for score in scores)
    ticks = [tick for tick in nice_ticks(span.low, span.high) if span.low < tick < span.high]
    ends = [(to_y(0), f"{'≤ ' if cut else ''}{span.low:.4f}"), (to_y(1), f"{span.high:.4f}")]
    clear = [t for t in ticks if 0.06 < span.share(t) < 0.94]  # words would lie on those of the ends
    return Axis(
        result.metric.replace("_", " "),
        tuple(None if score is None else to_y(span.share(score)) for score in scores),
        (*ends, *((to_y(span.share(tick)), f"{tick:.4g}") for tick in clear)),
    )


def _sortable(value: Any) -> Any:
    return value if is_number(value) else str(value)
