"""Training speed over workers of the host as a self-contained SVG: a panel per group, a line per side."""

from __future__ import annotations

import html
from collections.abc import Mapping

PANEL, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 230, 210, 44, 58, 38, 26
COLOURS = {"host": "#d9822b", "device": "#2f6fde", "weft": "#2e9d6a"}
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#667085}.title{font-weight:600;fill:#1d2433}"
    ".grid{stroke:#e4e7ec}.line{fill:none;stroke-width:2}"
)
Lines = Mapping[str, Mapping[int, float]]  # batches per second by side and workers


def speed_svg(panels: Mapping[str, Lines], columns: int = 3) -> str:
    """Batches per second of every side of every panel."""
    rows = -(-len(panels) // columns)
    size = f"0 0 {columns * PANEL} {LEGEND + rows * HEIGHT}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img"><style>{STYLE}</style>']
    for place, (side, colour) in enumerate(COLOURS.items()):
        x = LEFT + 80 * place
        parts.append(f'<rect x="{x}" y="8" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="18">{side}</text>')
    for place, (title, lines) in enumerate(panels.items()):
        at = f"translate({place % columns * PANEL} {LEGEND + place // columns * HEIGHT})"
        parts.append(f'<g transform="{at}">{_panel(title, lines)}</g>')
    return "\n".join([*parts, "</svg>"])


def _panel(title: str, lines: Lines) -> str:
    most = max((speed for line in lines.values() for speed in line.values()), default=1.0) * 1.1
    counts = sorted({workers for line in lines.values() for workers in line}) or [1]

    def x(workers: int) -> float:
        return LEFT + (workers - counts[0]) / max(counts[-1] - counts[0], 1) * (PANEL - LEFT - 16)

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - speed / most * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="{TOP - 14}">{html.escape(title)}</text>']
    for speed in (0.0, most / 2, most):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{PANEL - 16}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:.3g}</text>')
    parts += [f'<text x="{x(one):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{one}</text>' for one in counts]
    for side, line in lines.items():
        path = " L".join(f"{x(workers):.1f} {y(speed):.1f}" for workers, speed in sorted(line.items()))
        parts.append(f'<path class="line" stroke="{COLOURS[side]}" d="M{path}"/>')
        parts += [
            f'<circle cx="{x(workers):.1f}" cy="{y(speed):.1f}" r="2.5" fill="{COLOURS[side]}"/>'
            for workers, speed in line.items()
        ]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">batches per second, by workers</text>')
    return "".join(parts)
