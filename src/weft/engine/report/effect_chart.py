"""Draw the effect of one setting on the score as inline SVG: one dot per member, one mean per value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean, pstdev

from weft.core.settings.grid.values import setting_of
from weft.engine.report.charts import Frame, Scale, linear, nice_ticks
from weft.engine.report.ranking import Effect
from weft.engine.report.scales import Span, mark, warp
from weft.engine.results.sweep_result import SweepResult

FRAME = Frame(width=340, height=210, left=52, right=10, top=12, bottom=30)


def effect_chart(result: SweepResult, effect: Effect, span: Span, best: Collection[int]) -> str:
    """An SVG: a dot for every member over the value it had, and the mean of every value (or range) with its spread."""
    ticks = nice_ticks(span.low, span.high, 4)
    to_y = _clamped(ticks[0], ticks[-1], FRAME.up(ticks[0], ticks[-1]))
    places, words = _binned(result, effect) if effect.binned else _listed(effect)
    dots, means = [], []
    for position, (members, scores) in enumerate(zip(effect.members, effect.scores, strict=True)):
        for rank, (i, score) in enumerate(zip(members, scores, strict=True)):
            x = places[i] + (0.0 if effect.binned else _aside(rank, len(members)))
            dots.append(f'<circle {mark(i, score, span, best)} cx="{x:.1f}" cy="{to_y(score):.1f}" r="3.4"/>')
        middle = fmean(places[i] for i in members) + (0 if effect.binned else 20)
        means.append(_mean_mark(middle, scores, to_y, position == effect.best))
    below = [FRAME.word(x, FRAME.height - 10, word) for x, word in words]
    parts = [FRAME.grid(ticks, to_y), *below, *dots, *means]
    return FRAME.svg(f"effect of {effect.setting}", parts, 'class="dots"')


def _listed(effect: Effect) -> tuple[dict[int, float], list[tuple[float, str]]]:
    """Where members stand, and the words below: every value has a place of the same width."""
    band = (FRAME.end - FRAME.left) / len(effect.labels)
    centre = [FRAME.left + band * (position + 0.5) for position in range(len(effect.labels))]
    places = {i: centre[position] - 6 for position, members in enumerate(effect.members) for i in members}
    return places, [(x, _short(label, band)) for x, label in zip(centre, effect.labels, strict=True)]


def _binned(result: SweepResult, effect: Effect) -> tuple[dict[int, float], list[tuple[float, str]]]:
    """Where members stand by the size of their value."""
    values = {i: float(setting_of(result.tasks[i].task, effect.setting)) for members in effect.members for i in members}
    low, high = min(values.values()), max(values.values())
    change = warp(result, effect.setting, list(values.values()))
    to_x = linear(change(low), change(high), FRAME.left + 12, FRAME.end - 14)
    middle = (low * high) ** 0.5 if change is not float else (low + high) / 2
    words = [(to_x(change(value)), f"{value:.2g}") for value in (low, middle, high)]
    return {i: to_x(change(value)) for i, value in values.items()}, words


def _short(word: str, room: float) -> str:
    most = max(int(room / 6.2), 3)
    return word if len(word) <= most else word[: most - 1] + "…"


def _aside(rank: int, count: int) -> float:
    """Dots of one value stand side by side, as far as there is room; 7 and 11 stir them."""
    width = min(26.0, 2.2 * count)
    return width * ((rank * (7 if count % 7 else 11) % count) / (count - 1) - 0.5) if count > 1 else 0.0


def _clamped(low: float, high: float, scale: Scale) -> Scale:
    return lambda value: scale(min(max(value, low), high))


def _mean_mark(x: float, scores: Sequence[float], to_y: Scale, best: bool) -> str:
    mean, spread = fmean(scores), pstdev(scores)
    kind = "mean top" if best else "mean"
    return (
        f'<g class="{kind}"><title>mean {mean:.4f}, spread {spread:.4f}</title>'
        f'<line x1="{x:.1f}" y1="{to_y(mean - spread):.1f}" x2="{x:.1f}" y2="{to_y(mean + spread):.1f}"/>'
        f'<rect x="{x - 3.5:.1f}" y="{to_y(mean) - 3.5:.1f}" width="7" height="7"/></g>'
    )
