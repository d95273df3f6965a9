"""Every chart as SVG: lines over epochs, parallel coordinates, effects of settings, memory over a step, Gantt charts.

They share one :class:`Frame` with margins, scales, grid lines and labels. Charts inside a page take their colours from
its style sheet; those that are files of their own carry :data:`STYLE`. Lines and dots of a sweep's member have
``data-i``, its position, by which the script of the page highlights the member everywhere, and ``--s``, its place
between the worst and the best score, which colours it. No torch is needed here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

from weft.core.errors import SpecError
from weft.core.files import write_text
from weft.core.search_space import Range
from weft.core.settings import identity, lower_is_better
from weft.core.sweep import setting_of, with_args_apart
from weft.core.units import show_bytes, show_seconds
from weft.engine.ranking import MOST_VALUES, Effect, chosen_settings, is_number, labels_of, score_of, sort_key
from weft.planner.report.plan_text import KINDS

if TYPE_CHECKING:
    from weft.engine.sweep_result import SweepResult
    from weft.planner.division.simulator import Activity, Simulation
    from weft.planner.report.plan_report import GroupEstimate, PlanReport
    from weft.sched.simulator import Simulation as QueueSimulation

Scale = Callable[[float], float]

STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#667085}.title{font-weight:600;font-size:14px;fill:currentColor}"
    ".grid{stroke:#e4e7ec}.budget{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:6 4}"
    ".phase{stroke:#98a2b3;stroke-dasharray:2 4}.bar{stroke:#fff;stroke-width:.5}.on{fill:#fff;font-size:11px}"
    ".memory{fill:#b9c4d9}</style>"
)
NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


# ---- Pages and elements. Every value is escaped.


def package_file(name: str) -> str:
    """A style sheet or script of this package, to be written into a page."""
    return (resources.files("weft.engine") / "static" / name).read_text(encoding="utf-8")


def head(title: str, style: str = "") -> str:
    """The page up to its body, which is left open; it loads nothing from elsewhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
{package_file("page.css")}{style}</style></head><body>"""


def text(value: Any) -> str:
    """``value`` as HTML text or attribute."""
    return html.escape(str(value))


def check_picture(option: str, path: Path) -> None:
    """Refuse, before any work, a file name that is neither a page nor a picture."""
    if path.suffix.lower() not in (".html", ".htm", ".svg"):
        raise SpecError(f"{option} {path}: the name must end in .html or .svg")


def write_charts(option: str, file: Path, title: str, charts: Sequence[str], largest: int = 0, words: str = "") -> None:
    """Write a page with all charts and ``words``, or the picture of the largest alone, by the ending of ``file``."""
    check_picture(option, file)
    style = "pre{overflow-x:auto;font-size:13px}"
    page = f"{head(title, style)}<h1>{text(title)}</h1>\n" + "\n".join(charts)
    page += (f"\n<pre>{text(words)}</pre>" if words else "") + "</body></html>\n"
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(file, charts[largest] if file.suffix.lower() == ".svg" else page)
    except OSError as error:
        raise SpecError(f"{option} {file}: cannot be written ({error.strerror}); choose another place") from None


# ---- The scaffold: scales, ticks, frame.


def linear(low: float, high: float, begin: float, end: float) -> Scale:
    """``low`` becomes ``begin``, ``high`` becomes ``end``."""
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover ``[low, high]``: about ``count`` steps of 1, 2 or 5 times a power of 10."""
    span = (high - low) or max(abs(high), 1.0)
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def path(points: Iterable[tuple[float, float]], to_x: Scale = float, to_y: Scale = float) -> str:
    """The ``points`` attribute of a polyline or polygon."""
    return " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def word(x: float, y: float, value: object, anchor: str = "middle", style: str = "") -> str:
    """Text whose start, middle or end is at ``x``."""
    kind = f'class="{style}" ' if style else ""
    return f'<text {kind}x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(value)}</text>'


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
        """The chart; ``label`` is for screen readers."""
        opening = f'<svg {attributes} viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{text(label)}">'
        return "\n".join([opening.replace("<svg  ", "<svg "), *parts, "</svg>"])

    def grid(self, ticks: Iterable[float], to_y: Scale, show: Callable[[float], str] = "{:.4g}".format) -> str:
        """A line across the plot at every tick, with its number on the left."""
        return "".join(
            line("grid", self.left, to_y(tick), self.end, to_y(tick))
            + word(self.left - 8, to_y(tick) + 4, show(tick), "end")
            for tick in ticks
        )

    def cut_off(self, noun: str, spans: Sequence[tuple[float, float]], ticks: Sequence[float]) -> str:
        """Says at the edges of the plot how many lines or dots, given by their ends, go beyond the lowest or highest
        tick; "" if none does.
        """
        below, above = sum(low < ticks[0] for low, _ in spans), sum(high > ticks[-1] for _, high in spans)
        shown = [(below, f"▾ {below} {noun}{'s' * (below > 1)} below {ticks[0]:.4g}", self.floor - 6)]
        shown.append((above, f"▴ {above} {noun}{'s' * (above > 1)} above {ticks[-1]:.4g}", self.top + 13))
        return "".join(word(self.end, y, words, "end", "halo") for count, words, y in shown if count)


# ---- Members of a sweep: scores, colours, order of drawing.

LOG_RATIO = 20.0  # of the largest to the smallest value, from which an axis is logarithmic


@dataclass(frozen=True)
class Span:
    """A range of scores that leaves out far outliers at the bad end (diverged members), for colours and axes."""

    low: float
    high: float
    lower: bool = False  # less is better

    @classmethod
    def of(cls, scores: Sequence[float], lower: bool = False) -> Span:
        """The span of ``scores``; ``lower``: less is better."""
        if lower:
            turned = cls.of([-score for score in scores])
            return cls(-turned.high, -turned.low, lower=True)
        if not scores:
            return cls(0.0, 1.0)
        ordered = sorted(scores)
        quarter, half = ordered[len(ordered) // 4], median(ordered)
        low = max(ordered[0], quarter - 3 * max(half - quarter, ordered[-1] - half))
        return cls(low, ordered[-1]) if ordered[-1] > low else cls(low - 0.5e-3, ordered[-1] + 0.5e-3)

    def share(self, score: float) -> float:
        """0 for the worst, 1 for the best."""
        share = min(max((score - self.low) / (self.high - self.low), 0.0), 1.0)
        return 1.0 - share if self.lower else share


class Members:
    """The members of a sweep as its charts draw them; ``best`` are positions of those with the best settings."""

    def __init__(self, result: SweepResult, best: Collection[int] = ()) -> None:
        self.result, self.best = result, best
        self.scores = [score_of(member, result.metric) for member in result.tasks]
        reached = [score for score in self.scores if score is not None]
        self.span = Span.of(reached, lower=lower_is_better(result.metric))
        # Missing scores first, the best settings last: they are drawn on top.
        self.order = sorted(range(len(self.scores)), key=lambda i: (i in best, self.rank(i)))

    def rank(self, index: int) -> float:
        """The score of a member for sorting, missing ones lowest."""
        score = self.scores[index]
        return -math.inf if score is None else score

    def mark(self, index: int) -> str:
        """The attributes of a member's line or dot."""
        score = self.scores[index]
        kind = "m best" if index in self.best else "m" if score is not None else "m none"
        share = 0.0 if score is None else self.span.share(score)
        return f'class="{kind}" data-i="{index}" style="--s:{100 * share:.0f}%"'

    def warp(self, key: str, values: Sequence[float]) -> Scale:
        """The logarithm for a setting that was drawn by it or spans decades, else the number itself."""
        source = with_args_apart(self.result.sweep.settings).get(key)
        low, high = min(values), max(values)
        wide = source.log if isinstance(source, Range) else low > 0 and high / low > LOG_RATIO
        return math.log10 if wide and low > 0 else float


# ---- Lines over epochs.

# Margins leave room for the larger letters of narrow screens.
LINES = Frame(width=560, height=310, left=58, right=22, top=12, bottom=44)
MOST_POINTS, MOST_POINTS_OF_MANY = 400, 160  # of a line; a screen shows no more


def finite_points(values: Sequence[float | None]) -> list[tuple[int, float]]:
    """``(epoch, value)`` of the epochs that were measured."""
    return [(epoch, value) for epoch, value in enumerate(values, 1) if value is not None and math.isfinite(value)]


def line_chart(
    label: str,
    lines: Sequence[tuple[str, Sequence[tuple[int, float]]]],
    shown: tuple[float, float] | None = None,
    marked: int | None = None,
) -> str:
    """Lines over epochs, each with the attributes of its polyline; "" where nothing was measured.

    ``shown``: lowest and highest value to show; lines that go beyond are drawn at the edge, which says how many do.
    ``marked``: an epoch to mark.
    """
    lines = [(attributes, points) for attributes, points in lines if points]
    if not lines:
        return ""
    values = [value for _, points in lines for _, value in points]
    ticks = nice_ticks(*(shown or (min(values), max(values))))
    epochs = max(points[-1][0] for _, points in lines)
    to_x, to_y = LINES.across(1, max(epochs, 2)), LINES.up(ticks[0], ticks[-1])
    labelled = sorted({1, *(round(epochs * share) for share in (0.25, 0.5, 0.75)), epochs} - {0})
    parts = [LINES.grid(ticks, to_y), *(word(to_x(epoch), LINES.floor + 19, epoch) for epoch in labelled)]
    parts.append(word((LINES.left + LINES.end) / 2, LINES.height - 3, "epoch"))
    if marked:
        parts.append(line("best", to_x(marked), LINES.top, to_x(marked), LINES.floor))
    most = MOST_POINTS if len(lines) <= 4 else MOST_POINTS_OF_MANY
    for attributes, points in lines:
        thinned = list(points[:: max(1, math.ceil(len(points) / most))])
        thinned += [points[-1]] if thinned[-1] != points[-1] else []
        inside = ((epoch, min(max(value, ticks[0]), ticks[-1])) for epoch, value in thinned)
        parts.append(f'<polyline {attributes} points="{path(inside, to_x, to_y)}"/>')
    spans = [(min(drawn), max(drawn)) for drawn in ([value for _, value in points] for _, points in lines)]
    parts.append(LINES.cut_off("line", spans, ticks))
    return LINES.svg(label, parts, 'class="lines"')


def curves(column: str, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> str:
    """``column`` of histories over epochs: for every line the attributes of its polyline and its points."""
    ordered = sorted(value for _, points in lines for _, value in points)
    if not ordered:
        return ""
    # A loss that explodes leaves the plot at the top, the first steps of a metric at the bottom.
    low, high = ordered[int(0.08 * (len(ordered) - 1))], ordered[-1]
    if column.endswith("loss"):
        highest = max(ordered[int(0.98 * (len(ordered) - 1))], median(points[0][1] for _, points in lines if points))
        low, high = ordered[0], min(high, 1.25 * highest if highest > 0 else highest)
    return line_chart(f"{column} by epoch", lines, (low, high))


def member_curves(members: Members, column: str) -> str:
    """``column`` of every member's history over epochs."""
    tasks = members.result.tasks
    return curves(column, [(members.mark(i), finite_points(tasks[i].history.get(column, []))) for i in members.order])


# ---- The effect of one setting on the score: one dot per member, one mean per value.

EFFECT = Frame(width=340, height=210, left=52, right=10, top=12, bottom=30)


def effect_chart(members: Members, effect: Effect) -> str:
    """A dot for every member over the value it had, and the mean of every value (or range) with its spread."""
    spans = [(score, score) for scores in effect.scores for score in scores]
    span = Span.of([score for score, _ in spans], effect.lower)
    ticks = nice_ticks(span.low, span.high, 4)
    scale = EFFECT.up(ticks[0], ticks[-1])

    def to_y(score: float) -> float:
        return scale(min(max(score, ticks[0]), ticks[-1]))

    if effect.binned:  # by the size of the value
        values = {i: float(value) for rows in effect.groups for value, i, _ in rows}
        low, high = min(values.values()), max(values.values())
        warp = members.warp(effect.setting, list(values.values()))
        to_x = linear(warp(low), warp(high), EFFECT.left + 12, EFFECT.end - 14)
        middle = (low + high) / 2 if warp is float else (low * high) ** 0.5
        position = {i: to_x(warp(value)) for i, value in values.items()}
        words = [(to_x(warp(value)), f"{value:.2g}") for value in (low, middle, high)]
    else:  # a band of the same width for every value, its dots next to each other as far as there is room
        band = (EFFECT.end - EFFECT.left) / len(effect.labels)
        position, words, most = {}, [], max(int(band / 6.2), 3)
        for number, (rows, label) in enumerate(zip(effect.groups, effect.labels, strict=True)):
            centre, count, width = EFFECT.left + band * (number + 0.5), len(rows), min(26.0, 2.2 * len(rows))
            words.append((centre, label if len(label) <= most else label[: most - 1] + "…"))
            for rank, (_, i, _) in enumerate(rows):  # 7 and 11 stir them
                stirred = rank * (7 if count % 7 else 11) % count
                position[i] = centre - 6 + (width * (stirred / (count - 1) - 0.5) if count > 1 else 0.0)
    parts = [EFFECT.grid(ticks, to_y), *(word(x, EFFECT.height - 10, label) for x, label in words)]
    means = []
    for number, (rows, scores) in enumerate(zip(effect.groups, effect.scores, strict=True)):
        for _, i, score in rows:
            parts.append(f'<circle {members.mark(i)} cx="{position[i]:.1f}" cy="{to_y(score):.1f}" r="3.4"/>')
        mean, spread = fmean(scores), stdev(scores) if len(scores) > 1 else 0.0
        x = fmean(position[i] for _, i, _ in rows) if effect.binned else words[number][0] + 14
        means.append(
            f'<g class="{"mean top" if number == effect.ends[0] else "mean"}">'
            f"<title>mean {mean:.4f}, standard deviation {spread:.4f}</title>"
            f'<line x1="{x:.1f}" y1="{to_y(mean - spread):.1f}" x2="{x:.1f}" y2="{to_y(mean + spread):.1f}"/>'
            f'<rect x="{x - 3.5:.1f}" y="{to_y(mean) - 3.5:.1f}" width="7" height="7"/></g>'
        )
    parts = [*parts, *means, EFFECT.cut_off("dot", spans, ticks)]
    return EFFECT.svg(f"effect of {effect.setting}", parts, 'class="dots"')


# ---- Parallel coordinates: one axis per setting, one line per member.

PARALLEL = Frame(width=1120, height=340, left=70, right=70, top=34, bottom=16)
FAN = 9.0  # half the height over which members with the same value are fanned out

Axis = tuple[str, Sequence[float | None], Sequence[tuple[float, str]]]  # name, height of every member, ticks


def parallel(members: Members) -> str:
    """An axis for every setting that varies and one for the score; one line per member; "" if nothing varies."""
    result, span = members.result, members.span
    settings = chosen_settings(result)
    if not settings:
        return ""
    axes = [_setting_axis(members, key) for key in settings]
    to_y = PARALLEL.up(0, 1)
    cut = any(score is not None and score < span.low for score in members.scores)
    ticks = [(to_y(0), f"{'≤ ' if cut else ''}{span.low:.4f}"), (to_y(1), f"{span.high:.4f}")]
    for tick in nice_ticks(span.low, span.high):
        if span.low < tick < span.high and 0.06 < span.share(tick) < 0.94:  # not on top of the words at the ends
            ticks.append((to_y(span.share(tick)), f"{tick:.4g}"))
    heights = [None if score is None else to_y(span.share(score)) for score in members.scores]
    axes.append((result.metric.replace("_", " "), heights, ticks))
    step = (PARALLEL.end - PARALLEL.left) / (len(axes) - 1)
    positions = [PARALLEL.left + step * number for number in range(len(axes))]
    parts = []
    for i in members.order:
        points = [(x, y) for x, (_, heights, _) in zip(positions, axes, strict=True) if (y := heights[i]) is not None]
        parts.append(f'<polyline {members.mark(i)} points="{path(points)}"/>')
    for x, (name, _, ticks) in zip(positions, axes, strict=True):
        side, anchor = (9, "start") if x == positions[-1] else (-9, "end")
        parts.append(line("axis", x, PARALLEL.top - 8, x, PARALLEL.floor + 8))
        for y, label in ticks:
            parts.append(line("tick", x - 3, y, x + 3, y) + word(x + side, y + 4, label, anchor, "halo"))
        parts.append(word(x, PARALLEL.top - 18, name, "middle", "name"))
    return PARALLEL.svg("settings and score of every member", parts, 'class="lines"')


def _setting_axis(members: Members, key: str) -> Axis:
    """An axis with a scale for many numbers, or with a place per value."""
    values = [setting_of(member.task, key) for member in members.result.tasks]
    distinct = {identity(value): value for value in values}
    if all(map(is_number, values)) and len(distinct) > MOST_VALUES:
        warp, low, high = members.warp(key, values), min(values), max(values)
        ticks = nice_ticks(low, high)
        if warp is math.log10:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in (1, 3)]
        to_y = PARALLEL.up(warp(low), warp(high))
        shown = [tick for tick in ticks if low <= tick <= high] or [low, high]
        return key, [to_y(warp(value)) for value in values], [(to_y(warp(tick)), f"{tick:.3g}") for tick in shown]
    order = sorted(distinct, key=lambda value: (not is_number(distinct[value]), sort_key(distinct[value])))
    to_y = linear(0, max(len(order) - 1, 1), PARALLEL.floor - FAN, PARALLEL.top + FAN)
    labels, heights, words = labels_of(members.result), [0.0] * len(values), []
    for number, value in enumerate(order):
        y = to_y(number) if len(order) > 1 else (PARALLEL.floor + PARALLEL.top) / 2
        words.append((y, labels.word(key, distinct[value])))
        # Members of one value next to each other, the best on top: lines that coincide would hide each other.
        alike = sorted((i for i, other in enumerate(values) if identity(other) == value), key=members.rank)
        for rank, i in enumerate(alike):
            heights[i] = y + FAN * (1 - 2 * (rank / (len(alike) - 1) if len(alike) > 1 else 0.5))
    return key, heights, words


# ---- Memory of a step over its operators, as a stacked area chart.

MEMORY = Frame(width=960, height=360, left=76, right=16, top=40, bottom=58)
COLOURS = {  # what stays below what comes and goes
    "graph": "#5b6b8c", "input": "#8fa3c7", "constant": "#b9c4d9", "weight": "#2f6fde", "state": "#7fb2f0",
    "gradient": "#d9822b", "activation": "#2e9d6a", "temporary": "#d4537e", "workspace": "#8e6bbf",
}  # fmt: skip
OTHER_COLOUR = "#98a2b3"
VISIBLE = 0.005  # of the largest kind


def write_timeline(report: PlanReport, file: Path) -> None:
    """Write the memory charts of ``report``: a page (``.html``), or the picture of the largest group (``.svg``)."""
    charts = []
    for number, group in enumerate(report.groups, 1):
        members = group.plan.members
        name = members[0] if len(members) == 1 else f"{len(members)} tasks, {group.plan.join}"
        charts.append(timeline_svg(f"group {number}: {name}", group, report.budget))
    largest = max(range(len(charts)), key=lambda i: report.groups[i].cost.total_bytes)
    write_charts("--plot", file, f"Memory of {report.name} on {report.machine.name}", charts, largest, str(report))


def timeline_svg(title: str, group: GroupEstimate, budget: int) -> str:
    """Live bytes by kind over the operators of one step, as an SVG of its own."""
    frame, steps, lines = MEMORY, len(group.phases), group.timeline
    peak = max((sum(sizes) for sizes in zip(*lines.values(), strict=True)), default=0)
    top, show_budget = max(peak, 1), budget <= 2.5 * max(peak, 1)  # one far above would flatten everything else
    high = max(top, budget) if show_budget else top
    unit = 1024.0 ** max((high.bit_length() - 1) // 10, 0)
    ticks = [tick * unit for tick in nice_ticks(0.0, high / unit)]
    to_x, to_y = frame.across(0, max(steps - 1, 1)), frame.up(0, ticks[-1])
    parts = [
        STYLE,
        word(frame.left, 20, f"{title}: peak {show_bytes(peak)} of tensors", "start", "title"),
        frame.grid(ticks, to_y, show_bytes),  # type: ignore[arg-type]
    ]
    most = max((max(sizes, default=0) for sizes in lines.values()), default=0)
    below, legend, x = [0] * steps, [], float(frame.left)
    for kind in sorted(lines, key=lambda kind: [*COLOURS, kind].index(kind)):  # each kind on top of the ones before
        if max(lines[kind], default=0) <= VISIBLE * most:
            continue
        above = [low + size for low, size in zip(below, lines[kind], strict=True)]
        edge = path([*enumerate(above), *reversed(list(enumerate(below)))], to_x, to_y)
        name, colour = KINDS.get(kind, kind), COLOURS.get(kind, OTHER_COLOUR)
        parts.append(f'<polygon fill="{colour}" points="{edge}"><title>{name}</title></polygon>')
        legend.append(f'<rect x="{x:.0f}" y="{frame.height - 24}" width="12" height="12" fill="{colour}"/>')
        legend.append(word(x + 17, frame.height - 14, name, "start"))
        below, x = above, x + 36 + 6.5 * len(name)
    begins = [i for i, phase in enumerate(group.phases) if i == 0 or group.phases[i - 1] != phase]
    for begin, end in zip(begins, [*begins[1:], steps], strict=True):
        parts.append(line("phase", to_x(begin), frame.top, to_x(begin), frame.floor))
        if to_x(end) - to_x(begin) > 7.0 * len(group.phases[begin]):  # room for the name
            parts.append(word(to_x(begin) + 4, frame.floor + 16, group.phases[begin], "start"))
    if show_budget:
        parts.append(line("budget", frame.left, to_y(budget), frame.end, to_y(budget)))
        parts.append(word(frame.end, to_y(budget) - 5, f"budget {show_bytes(budget)}", "end"))
    return frame.svg(title, [*parts, *legend], NAMESPACE)


# ---- Gantt charts: a row per resource or worker, a bar per phase or group, one time axis.

GANTT = Frame(width=960, height=0, left=120, right=16, top=56, bottom=34)
ROW, LABEL_PIXELS = 22, 6.5  # height of a row; width of a character of a bar's label
MEMORY_HEIGHT = 64
MOST_BATCHES = 40  # that are drawn
SCHEDULE_COLOURS = {"batching": "#2f6fde", "transfer": "#d9822b", "training": "#2e9d6a"}
GROUP_COLOURS = ("#2f6fde", "#2e9d6a", "#d9822b", "#8e6bbf", "#d4537e", "#5b6b8c", "#7fb2f0", "#b08a2e")


@dataclass(frozen=True)
class Bar:
    """A bar of a Gantt chart: times, colour, a label that is shown if there is room, and words on hovering."""

    begin: float
    end: float
    colour: str
    label: str
    tip: str


@dataclass(frozen=True)
class Panel:
    """A Gantt chart, or one of several below each other; ``memory``: bytes over time and the budget."""

    title: str
    words: str
    rows: Mapping[str, Sequence[Bar]]
    memory: tuple[Sequence[tuple[float, int]], int] | None = None


def gantt_svg(label: str, panels: Sequence[Panel]) -> str:
    """Gantt charts on the same time axis, one below another, as an SVG of its own."""
    bars = [bar for panel in panels for row in panel.rows.values() for bar in row]
    begin = max(min((bar.begin for bar in bars), default=0.0), 0.0)  # bars may have begun in the epoch before
    end = max((bar.end for bar in bars), default=1.0)
    to_x = GANTT.across(begin, end)
    parts, top = [STYLE], 0.0
    for panel in panels:
        parts.append(word(8, top + 20, panel.title, "start", "title"))
        parts += [word(8, top + 40, panel.words, "start")] if panel.words else []
        rows_end = top + GANTT.top + ROW * len(panel.rows)
        floor = rows_end + (MEMORY_HEIGHT + 8 if panel.memory else 0)
        for tick in nice_ticks(begin, end, 6):
            if begin <= tick <= end:
                parts.append(line("grid", to_x(tick), top + GANTT.top, to_x(tick), floor))
                parts.append(word(to_x(tick), floor + 16, show_seconds(tick) if tick else "0"))
        for number, (name, row) in enumerate(panel.rows.items()):
            y = top + GANTT.top + ROW * number
            parts.append(word(GANTT.left - 8, y + 15, name, "end"))
            for bar in row:
                x = to_x(max(bar.begin, begin))
                width = max(to_x(bar.end) - x, 0.5)
                parts.append(
                    f'<rect class="bar" x="{x:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{ROW - 3}" rx="2" '
                    f'fill="{bar.colour}"><title>{text(bar.tip)}</title></rect>'
                )
                if width > LABEL_PIXELS * len(bar.label) + 4:
                    parts.append(word(x + 3, y + 15, bar.label, "start", "on"))
        if panel.memory:
            steps, budget = panel.memory
            to_y = linear(0, max([budget, *(size for _, size in steps)]) or 1, floor, floor - MEMORY_HEIGHT)
            points, before = [(begin, 0)], 0
            for time, size in steps:
                points += [(time, before), (time, size)]
                before = size
            parts.append(f'<polygon class="memory" points="{path(points, to_x, to_y)}"><title>bytes set aside</title>')
            parts.append(f"</polygon>{line('budget', GANTT.left, to_y(budget), GANTT.end, to_y(budget))}")
            parts.append(word(GANTT.left - 8, to_y(budget) + 10, show_bytes(budget), "end"))
        top = floor + GANTT.bottom
    size = Frame(GANTT.width, round(top), GANTT.left, GANTT.right, GANTT.top, GANTT.bottom)
    return size.svg(label, parts, NAMESPACE)


def write_schedules(schedules: Mapping[str, Simulation], file: Path) -> None:
    """Write the charts of simulated epochs, by title: a page with all of them, or the first as a picture."""
    write_charts("--simulate", file, "schedules", [_schedule_svg(*item) for item in schedules.items()])


def _schedule_svg(title: str, simulation: Simulation) -> str:
    """The first batches of a simulated epoch: a row per resource, and per worker of a resource that has several."""
    lanes: dict[str, list[list[Activity]]] = {}
    for activity in sorted(simulation.activities, key=lambda activity: activity.begin):
        for resource in activity.resources if activity.batch < MOST_BATCHES else ():
            free = (lane for lane in lanes.setdefault(resource, []) if lane[-1].end <= activity.begin + 1e-9)
            lane = next(free, None)
            if lane is None:
                lanes[resource].append([activity])
            else:
                lane.append(activity)
    rows: dict[str, list[Bar]] = {}
    for resource, workers in lanes.items():
        for number, lane in enumerate(workers, 1):
            rows[resource if len(workers) == 1 else f"{resource} {number}"] = [
                Bar(
                    activity.begin,
                    activity.end,
                    SCHEDULE_COLOURS.get(activity.key.partition("_")[0], OTHER_COLOUR),
                    str(activity.batch),
                    f"batch {activity.batch}: {activity.key}, {show_seconds(activity.end - activity.begin)}",
                )
                for activity in lane
            ]
    busy = ", ".join(f"{name} {share:.0%}" for name, share in simulation.utilisation().items())
    words = f"{show_seconds(simulation.seconds)} per epoch of {simulation.batches} batches; busy: {busy}"
    return gantt_svg(title, [Panel(title, words, rows)])


def queue_svg(simulations: Sequence[QueueSimulation]) -> str:
    """Simulated queues: a row per worker, a bar per group, memory over time below."""
    panels = []
    for run in simulations:
        workers = sorted({(device, group.worker) for group in run.groups for device in group.places})
        rows: dict[str, list[Bar]] = {f"{device} {worker}": [] for device, worker in workers}
        changes: dict[float, int] = {}
        for group in run.groups:
            first, count = group.members[0], len(group.members)
            tip = f"{', '.join(group.members[:8])}: {show_seconds(group.end - group.start)}, {show_bytes(group.bytes)}"
            colour = GROUP_COLOURS[sum(map(ord, first)) % len(GROUP_COLOURS)]
            label = first if count == 1 else f"{count} fused"
            for device in dict.fromkeys(group.places):
                rows[f"{device} {group.worker}"].append(Bar(group.start, group.end, colour, label, tip))
            held = group.bytes * len(group.places)
            changes[group.start] = changes.get(group.start, 0) + held
            changes[group.end] = changes.get(group.end, 0) - held
        times = sorted(changes)
        memory = list(zip(times, accumulate(changes[time] for time in times), strict=True))
        figures = run.metrics()
        words = f"makespan {show_seconds(figures.makespan)}, mean JCT {show_seconds(figures.mean_jct)}"
        panels.append(Panel(f"{run.policy}: {words}", "", rows, (memory, run.budget_bytes * run.devices)))
    return gantt_svg(f"Gantt chart of {', '.join(run.policy for run in simulations)}", panels)
