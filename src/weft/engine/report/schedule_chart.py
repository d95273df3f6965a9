"""Draw the simulated schedule of an epoch's first batches as a Gantt chart: a row per resource, a bar per phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from weft.core.errors import SpecError
from weft.core.files import write_text
from weft.core.units import show_seconds
from weft.engine.report.html import text
from weft.planner.division.simulator import Activity, Simulation

WIDTH, LEFT, RIGHT, TITLE, ROW, AXIS = 960, 120, 16, 56, 22, 34
BATCHES = 40  # that are drawn
COLOURS = {"batching": "#2f6fde", "transfer": "#d9822b", "training": "#2e9d6a"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#667085}.title{font-weight:600;font-size:14px;fill:#1d2433}"
    ".bar{stroke:#fff;stroke-width:.5}.on{fill:#fff;font-size:10px}.grid{stroke:#e4e7ec}"
)


def check_simulate(path: Path) -> None:
    """A clear error, before any work, for a name that says neither page nor picture."""
    if path.suffix.lower() not in (".html", ".htm", ".svg"):
        raise SpecError(f"--simulate {path}: the name must end in .html or .svg")


def write_schedules(schedules: Mapping[str, Simulation], file: Path) -> None:
    """Write the charts of ``schedules``, by title, to ``file``: a page with all of them, or the first as a picture."""
    charts = [schedule_svg(title, simulation) for title, simulation in schedules.items()]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>schedules</title>{"".join(charts)}</html>'
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(file, charts[0] if file.suffix.lower() == ".svg" else page)
    except OSError as error:
        raise SpecError(f"--simulate {file}: cannot be written ({error.strerror}); choose another place") from None


def schedule_svg(title: str, simulation: Simulation) -> str:
    """The first batches of a simulated epoch."""
    shown = [one for one in simulation.activities if one.batch < BATCHES]
    rows = _rows(shown)
    end = max((one.end for one in shown), default=1.0)
    height = TITLE + ROW * len(rows) + AXIS
    used = ", ".join(f"{name} {share:.0%}" for name, share in simulation.utilisation().items())
    told = f"{show_seconds(simulation.seconds)} per epoch of {simulation.batches} batches; busy: {used}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(title)}"><style>{STYLE}</style>',
        f'<text class="title" x="8" y="20">{text(title)}</text><text x="8" y="40">{text(told)}</text>',
        *_axis(end, height),
    ]
    for place, (name, activities) in enumerate(rows.items()):
        top = TITLE + ROW * place
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{text(name)}</text>')
        parts += [_bar(one, top, end) for one in activities]
    return "\n".join([*parts, "</svg>"])


def _rows(activities: Iterable[Activity]) -> dict[str, list[Activity]]:
    """A row per resource, and one per worker of a resource that has several."""
    by_resource: dict[str, list[list[Activity]]] = {}
    for one in sorted(activities, key=lambda one: one.begin):
        for resource in one.resources:
            lanes = by_resource.setdefault(resource, [])
            lane = next((some for some in lanes if some[-1].end <= one.begin + 1e-9), None)
            if lane is None:
                lanes.append([one])
            else:
                lane.append(one)
    return {
        resource if len(lanes) == 1 else f"{resource} {number}": lane
        for resource, lanes in by_resource.items()
        for number, lane in enumerate(lanes, 1)
    }


def _x(time: float, end: float) -> float:
    return LEFT + time / (end or 1.0) * (WIDTH - LEFT - RIGHT)


def _bar(one: Activity, top: float, end: float) -> str:
    begin = max(one.begin, 0.0)  # it may have begun while the epoch before ended
    x, width = _x(begin, end), max(_x(one.end, end) - _x(begin, end), 0.5)
    told = f"batch {one.batch}: {one.key}, {show_seconds(one.end - one.begin)}"
    colour = COLOURS.get(one.key.partition("_")[0], "#98a2b3")
    bar = (
        f'<rect class="bar" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 4}" rx="2" fill="{colour}">'
        f"<title>{text(told)}</title></rect>"
    )
    return bar + (f'<text class="on" x="{x + 2:.1f}" y="{top + 15}">{one.batch}</text>' if width > 16 else "")


def _axis(end: float, height: float) -> Sequence[str]:
    times = [end * part / 5 for part in range(6)]
    return [
        f'<line class="grid" x1="{_x(at, end):.1f}" x2="{_x(at, end):.1f}" y1="{TITLE}" y2="{height - AXIS}"/>'
        f'<text x="{_x(at, end):.1f}" y="{height - 12}" text-anchor="middle">{show_seconds(at) if at else "0"}</text>'
        for at in times
    ]
