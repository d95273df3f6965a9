"""Draw the memory of a step over its operators as a stacked area chart: a self-contained SVG or page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.core.errors import SpecError
from weft.core.files import write_text
from weft.core.units import show_bytes
from weft.engine.report.charts import Frame, Scale, nice_ticks, path
from weft.engine.report.html import text
from weft.planner.report.plan_report import GroupEstimate, PlanReport
from weft.planner.report.plan_text import KINDS

FRAME = Frame(width=960, height=360, left=76, right=16, top=40, bottom=58)
ORDER = ("graph", "input", "constant", "weight", "state", "gradient", "activation", "temporary", "workspace")
COLOURS = {
    "graph": "#5b6b8c", "input": "#8fa3c7", "constant": "#b9c4d9", "weight": "#2f6fde", "state": "#7fb2f0",
    "gradient": "#d9822b", "activation": "#2e9d6a", "temporary": "#d4537e", "workspace": "#8e6bbf",
}  # fmt: skip
OTHER = "#98a2b3"
VISIBLE = 0.005  # of the largest kind
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#667085}.title{font-weight:600;font-size:14px;fill:#1d2433}"
    ".grid{stroke:#e4e7ec}.budget{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:6 4}"
    ".phase{stroke:#98a2b3;stroke-dasharray:2 4}"
)


def check_plot(path: Path) -> None:
    """A clear error, before any work, for a name that says neither page nor picture."""
    if path.suffix.lower() not in (".html", ".htm", ".svg"):
        raise SpecError(f"--plot {path}: the name must end in .html or .svg")


def write_timeline(report: PlanReport, file: Path) -> None:
    """Write the charts of ``report`` to ``file``: a page (``.html``), or the largest group's picture (``.svg``)."""
    check_plot(file)
    charts = [timeline_svg(f"group {i + 1}: {_name(g)}", g, report.budget) for i, g in enumerate(report.groups)]
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(file, charts[_largest(report)] if file.suffix.lower() == ".svg" else _page(report, charts))
    except OSError as error:
        raise SpecError(f"--plot {file}: cannot be written ({error.strerror}); choose another place") from None


def timeline_svg(title: str, group: GroupEstimate, budget: int) -> str:
    """Live bytes by kind over the operators of one step, as an SVG of its own."""
    steps = len(group.phases)
    totals = [sum(line[i] for line in group.timeline.values()) for i in range(steps)]
    peak = max(totals, default=0)
    top = max(peak, 1)
    shown_budget = budget <= 2.5 * top  # a budget far above would flatten everything else
    ticks = _round_ticks(max(top, budget) if shown_budget else top)
    to_x, to_y = FRAME.across(0, max(steps - 1, 1)), FRAME.up(0, ticks[-1])
    parts = [
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{FRAME.left}" y="20">{text(title)}: peak {show_bytes(peak)} of tensors</text>',
        FRAME.grid(ticks, to_y, show_bytes),
        *_areas(group, steps, to_x, to_y),
        *_phases(group.phases, to_x),
    ]
    if shown_budget:
        parts.append(FRAME.level(to_y(budget), "budget"))
        parts.append(FRAME.word(FRAME.end, to_y(budget) - 5, f"budget {show_bytes(budget)}", "end"))
    parts += _legend(group)
    return FRAME.svg(title, parts, 'xmlns="http://www.w3.org/2000/svg"')


def _round_ticks(high: int) -> list[float]:
    """Round numbers of the binary unit that ``high`` is shown in."""
    unit = 1024.0 ** max((high.bit_length() - 1) // 10, 0)
    return [tick * unit for tick in nice_ticks(0.0, high / unit)]


def _areas(group: GroupEstimate, steps: int, to_x: Scale, to_y: Scale) -> list[str]:
    """One polygon a kind, each on top of the ones before."""
    below = [0] * steps
    parts = []
    for kind in _kinds(group):
        line = group.timeline[kind]
        above = [low + size for low, size in zip(below, line, strict=True)]
        edge = path([*enumerate(above), *reversed(list(enumerate(below)))], to_x, to_y)
        name, colour = KINDS.get(kind, kind), COLOURS.get(kind, OTHER)
        parts.append(f'<polygon fill="{colour}" points="{edge}"><title>{name}</title></polygon>')
        below = above
    return parts


def _phases(phases: Sequence[str], to_x: Scale) -> list[str]:
    """A mark where one phase of the step ends and the next begins, named where there is room for the name."""
    parts = []
    begins = [i for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    for i, end in zip(begins, [*begins[1:], len(phases)], strict=True):
        x, phase = to_x(i), phases[i]
        parts.append(FRAME.mark(x, "phase"))
        if to_x(end) - x > 7.0 * len(phase):
            parts.append(FRAME.word(x + 4, FRAME.floor + 16, phase, "start"))
    return parts


def _legend(group: GroupEstimate) -> list[str]:
    parts, x = [], float(FRAME.left)
    for kind in _kinds(group):
        name, colour = KINDS.get(kind, kind), COLOURS.get(kind, OTHER)
        parts.append(f'<rect x="{x:.0f}" y="{FRAME.height - 24}" width="12" height="12" fill="{colour}"/>')
        parts.append(FRAME.word(x + 17, FRAME.height - 14, name, "start"))
        x += 36 + 6.5 * len(name)
    return parts


def _kinds(group: GroupEstimate) -> list[str]:
    """The kinds that can be seen: what stays below what comes and goes."""
    order = [kind for kind in ORDER if kind in group.timeline]
    order += [kind for kind in group.timeline if kind not in ORDER]
    most = max((max(line, default=0) for line in group.timeline.values()), default=0)
    return [kind for kind in order if max(group.timeline[kind], default=0) > VISIBLE * most]


def _name(group: GroupEstimate) -> str:
    members = group.plan.members
    return members[0] if len(members) == 1 else f"{len(members)} tasks, {group.plan.join}"


def _largest(report: PlanReport) -> int:
    return max(range(len(report.groups)), key=lambda i: report.groups[i].cost.total_bytes)


def _page(report: PlanReport, charts: Sequence[str]) -> str:
    title = text(f"Memory of {report.name} on {report.machine.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        "body{margin:0 auto;max-width:1000px;padding:32px 20px;font:15px/1.5 system-ui,sans-serif;color:#1d2433}"
        "svg{width:100%;height:auto;margin:0 0 24px}pre{background:#f6f7f9;padding:16px;overflow-x:auto;font-size:13px}"
        f"</style></head><body><h1>{title}</h1>\n" + "\n".join(charts) + f"\n<pre>{text(report)}</pre></body></html>\n"
    )
