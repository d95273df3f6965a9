"""The scaffold of every chart, as inline SVG: a frame with margins, scales, grid lines and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weft.engine.report.html import text

Scale = Callable[[float], float]


def linear(low: float, high: float, begin: float, end: float) -> Scale:
    """``low`` becomes ``begin``, ``high`` becomes ``end``."""
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover ``[low, high]``: about ``wanted`` steps of 1, 2 or 5 times a power of 10."""
    span = (high - low) or max(abs(high), 1.0)
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about ``most`` of ``points``, the last one always."""
    kept = list(points[:: max(1, math.ceil(len(points) / most))])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def path(points: Iterable[tuple[float, float]], to_x: Scale, to_y: Scale) -> str:
    """The ``points`` attribute of a polyline or polygon."""
    return " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)


@dataclass(frozen=True)
class Frame:
    """The size of a chart and the margins around its plot, in SVG units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def end(self) -> int:
        """The right edge of the plot."""
        return self.width - self.right

    @property
    def floor(self) -> int:
        """The lower edge of the plot."""
        return self.height - self.bottom

    def across(self, low: float, high: float) -> Scale:
        """From the left edge of the plot to its right edge."""
        return linear(low, high, self.left, self.end)

    def up(self, low: float, high: float) -> Scale:
        """From the lower edge of the plot to its upper edge."""
        return linear(low, high, self.floor, self.top)

    def svg(self, label: str, parts: Iterable[str], attributes: str = "") -> str:
        """The chart, with ``label`` for those who cannot see it."""
        opening = f'<svg {attributes} viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{text(label)}">'
        return "\n".join([opening.replace("<svg  ", "<svg "), *parts, "</svg>"])

    def grid(self, ticks: Iterable[float], to_y: Scale, show: Callable[[float], str] = "{:.4g}".format) -> str:
        """A line across the plot at every tick, and its number beside it."""
        return "".join(
            self.level(to_y(tick), "grid") + self.word(self.left - 8, to_y(tick) + 4, show(tick), "end")
            for tick in ticks
        )

    def level(self, y: float, style: str) -> str:
        """A horizontal line."""
        return f'<line class="{style}" x1="{self.left}" y1="{y:.1f}" x2="{self.end}" y2="{y:.1f}"/>'

    def mark(self, x: float, style: str) -> str:
        """A vertical line."""
        return f'<line class="{style}" x1="{x:.1f}" y1="{self.top}" x2="{x:.1f}" y2="{self.floor}"/>'

    def word(self, x: float, y: float, value: object, anchor: str = "middle") -> str:
        """Text at a place, which ``anchor`` says is its start, middle or end."""
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(value)}</text>'
