"""Cumulative distributions of seconds as a self-contained SVG: a line per policy."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 56, 150, 34, 44
COLOURS = ("#2f6fde", "#2e9d6a", "#d9822b", "#8e6bbf", "#d4537e", "#5b6b8c", "#b08a2e", "#1d2433")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#667085}.title{font-weight:600;font-size:14px;fill:#1d2433}"
    ".grid{stroke:#e4e7ec}.line{fill:none;stroke-width:2}"
)


def cdf_svg(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """The share of tasks that took at most so many seconds, on a logarithmic axis."""
    positive = [value for values in series.values() for value in values if value > 0]
    low = 10 ** math.floor(math.log10(min(positive))) if positive else 0.1
    high = 10 ** math.ceil(math.log10(max(positive))) if positive else 1.0
    high = high if high > low else low * 10

    def x(value: float) -> float:
        share = (math.log10(max(value, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{STYLE}</style>',
        f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    decade = low
    while decade <= high * 1.001:
        parts.append(f'<text x="{x(decade):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{decade:g} s</text>')
        decade *= 10
    for place, (name, values) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<path class="line" stroke="{colour}" d="{_steps(sorted(values), x, y)}"/>')
        at = TOP + 18 * place
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{at}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{at + 10}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _steps(values: Sequence[float], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    if not values:
        return "M0 0"
    path = [f"M{x(values[0]):.1f} {y(0.0):.1f}"]
    for place, value in enumerate(values):
        path.append(f"L{x(value):.1f} {y(place / len(values)):.1f} L{x(value):.1f} {y((place + 1) / len(values)):.1f}")
    return " ".join(path)
