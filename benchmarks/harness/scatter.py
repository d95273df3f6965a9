"""A scatter plot of estimates against measurements as a self-contained SVG, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

SIZE, MARGIN = 460, 64
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#2e4057")


@dataclass(frozen=True)
class Point:
    """One training: what was measured, what was estimated, to which set it belongs, and its name."""

    measured: float
    estimated: float
    group: str
    label: str


def write_scatter(path: Path, panels: Sequence[tuple[str, str, Sequence[Point]]]) -> None:
    """Panels side by side: each a title, the unit of both axes, and its points."""
    width = SIZE * max(len(panels), 1)
    body = "".join(_panel(place * SIZE, *panel) for place, panel in enumerate(panels))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{SIZE + 20}" font-family="sans-serif">'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head}<rect width="100%" height="100%" fill="white"/>{body}</svg>\n', encoding="utf-8")


class Axis:
    """Values to places between ``MARGIN`` and the far side, by powers of ten."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)

    def at(self, value: float) -> float:
        """From 0 to 1."""
        return (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """The powers of ten."""
        return [10.0**power for power in range(self.low, self.high + 1)]


def _panel(left: float, title: str, unit: str, points: Sequence[Point]) -> str:
    usable = [p for p in points if p.measured > 0 and p.estimated > 0]
    heading = _text(left + SIZE / 2, 24, f"{title} ({len(usable)} points)", size=14, anchor="middle")
    if not usable:
        return heading
    axis = Axis([value for point in usable for value in (point.measured, point.estimated)])
    room = SIZE - MARGIN - 24

    def x(value: float) -> float:
        return left + MARGIN + room * axis.at(value)

    def y(value: float) -> float:
        return SIZE - MARGIN + 8 - room * axis.at(value)

    parts = [heading, _frame(x, y, axis, unit, left)]
    groups = list(dict.fromkeys(point.group for point in usable))
    for point in usable:
        colour = COLOURS[groups.index(point.group) % len(COLOURS)]
        told = escape(f"{point.label}: measured {point.measured:.4g}, estimated {point.estimated:.4g} {unit}")
        parts.append(
            f'<circle cx="{x(point.measured):.1f}" cy="{y(point.estimated):.1f}" r="3" fill="{colour}" '
            f'fill-opacity="0.65"><title>{told}</title></circle>'
        )
    for place, group in enumerate(groups):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(_text(left + MARGIN + 8, 46 + 14 * place, f"● {group}", fill=colour))
    return "".join(parts)


def _frame(x, y, axis: Axis, unit: str, left: float) -> str:
    first, last = axis.ticks()[0], axis.ticks()[-1]
    parts = [_line(x(first), y(first), x(last), y(last), "#999", dash=True)]
    for tick in axis.ticks():
        parts += [
            _line(x(tick), y(first), x(tick), y(last), "#eee"),
            _line(x(first), y(tick), x(last), y(tick), "#eee"),
        ]
        parts.append(_text(x(tick), y(first) + 16, f"{tick:g}", anchor="middle"))
        parts.append(_text(x(first) - 6, y(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((x(first) + x(last)) / 2, y(first) + 34, f"measured, {unit}", anchor="middle"))
    middle = (y(first) + y(last)) / 2
    label = _text(0, 0, f"estimated, {unit}", anchor="middle")
    parts.append(f'<g transform="translate({left + 14:.1f},{middle:.1f}) rotate(-90)">{label}</g>')
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", fill: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )
