"""Draw a simulated queue as a self-contained SVG: a row per worker, a bar per group, memory over time below."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.units import show_bytes, show_seconds
from weft.sched.simulator import SimulatedGroup, Simulation

WIDTH, LEFT, RIGHT = 960, 96, 16
TITLE, ROW, GAP, MEMORY, AXIS = 34, 22, 8, 64, 34
LABEL_PIXELS = 6.5  # per character of a bar's label
COLOURS = ("#2f6fde", "#2e9d6a", "#d9822b", "#8e6bbf", "#d4537e", "#5b6b8c", "#7fb2f0", "#b08a2e")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#667085}.title{font-weight:600;font-size:14px;fill:#1d2433}"
    ".grid{stroke:#e4e7ec}.bar{stroke:#fff;stroke-width:.5}.on{fill:#fff;font-size:11px}.memory{fill:#b9c4d9}"
    ".budget{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:6 4}"
)


@dataclass(frozen=True)
class _Panel:
    """One simulation's part of the chart: where it begins, and the scale of its axes."""

    run: Simulation
    top: float
    begin: float
    end: float

    @property
    def rows(self) -> list[tuple[str, int]]:
        return sorted({(group.device, group.worker) for group in self.run.groups})

    @property
    def height(self) -> float:
        return TITLE + len(self.rows) * ROW + GAP + MEMORY + AXIS

    def x(self, time: float) -> float:
        return LEFT + (time - self.begin) / ((self.end - self.begin) or 1.0) * (WIDTH - LEFT - RIGHT)


def gantt_svg(simulations: Sequence[Simulation]) -> str:
    """The Gantt charts of ``simulations``, one below another on the same time axis."""
    groups = [group for run in simulations for group in run.groups]
    begin = min((group.start for group in groups), default=0.0)
    end = max((group.end for group in groups), default=1.0)
    panels: list[_Panel] = []
    top = 0.0
    for run in simulations:
        panels.append(_Panel(run, top, begin, end))
        top += panels[-1].height
    names = html.escape(", ".join(run.policy for run in simulations))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img" '
        f'aria-label="Gantt chart of {names}"><style>{STYLE}</style>'
    )
    return "\n".join([head, *(part for panel in panels for part in _panel(panel)), "</svg>"])


def _panel(panel: _Panel) -> list[str]:
    figures = panel.run.metrics()
    title = f"{panel.run.policy}: makespan {show_seconds(figures.makespan)}, mean JCT {show_seconds(figures.mean_jct)}"
    parts = [f'<text class="title" x="{LEFT}" y="{panel.top + 20:.0f}">{html.escape(title)}</text>']
    tops = {row: panel.top + TITLE + number * ROW for number, row in enumerate(panel.rows)}
    for (device, worker), y in tops.items():
        label = html.escape(f"{device} {worker}")
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15:.1f}" text-anchor="end">{label}</text>')
    parts += [_bar(panel, group, tops[group.device, group.worker]) for group in panel.run.groups]
    bottom = panel.top + panel.height - AXIS
    return [*parts, *_memory(panel, bottom), *_axis(panel, bottom)]


def _bar(panel: _Panel, group: SimulatedGroup, y: float) -> str:
    x, width = panel.x(group.start), max(panel.x(group.end) - panel.x(group.start), 0.5)
    count = len(group.members)
    name = group.members[0] if count == 1 else f"{count} fused"
    title = f"{', '.join(group.members[:8])}: {show_seconds(group.end - group.start)}, {show_bytes(group.bytes)}"
    colour = COLOURS[sum(map(ord, name if count == 1 else group.members[0])) % len(COLOURS)]
    bar = (
        f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 3}" rx="2" fill="{colour}">'
        f"<title>{html.escape(title)}</title></rect>"
    )
    if width > LABEL_PIXELS * len(name) + 8:
        bar += f'<text class="on" x="{x + 4:.1f}" y="{y + 14:.1f}">{html.escape(name)}</text>'
    return bar


def _memory(panel: _Panel, bottom: float) -> list[str]:
    """Bytes set aside over time, all devices together, against the budget."""
    budget = panel.run.budget_bytes * panel.run.devices
    steps = memory_steps(panel.run.groups)
    high = max([budget, *(size for _, size in steps)]) or 1
    points, last = [f"{panel.x(panel.begin):.1f},{bottom:.1f}"], 0
    for time, size in steps:
        x = panel.x(time)
        points += [f"{x:.1f},{bottom - last / high * MEMORY:.1f}", f"{x:.1f},{bottom - size / high * MEMORY:.1f}"]
        last = size
    y = bottom - budget / high * MEMORY
    return [
        f'<polygon class="memory" points="{" ".join(points)}"><title>bytes set aside</title></polygon>',
        f'<line class="budget" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text x="{LEFT - 8}" y="{y + 10:.1f}" text-anchor="end">{show_bytes(budget)}</text>',
    ]


def memory_steps(groups: Sequence[SimulatedGroup]) -> list[tuple[float, int]]:
    """Times at which the bytes set aside change, and the bytes from then on."""
    changes: dict[float, int] = {}
    for group in groups:
        changes[group.start] = changes.get(group.start, 0) + group.bytes
        changes[group.end] = changes.get(group.end, 0) - group.bytes
    steps, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        steps.append((time, total))
    return steps


def _axis(panel: _Panel, bottom: float) -> list[str]:
    parts = []
    for time in time_ticks(panel.begin, panel.end):
        x, label = panel.x(time), "0" if time == 0 else show_seconds(time)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{panel.top + TITLE:.0f}" y2="{bottom:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{label}</text>')
    return parts


def time_ticks(begin: float, end: float, count: int = 6) -> list[float]:
    """Round times between ``begin`` and ``end``."""
    span = end - begin
    if span <= 0:
        return [begin]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(begin / step)
    return [number * step for number in range(first, math.floor(end / step) + 1)]
