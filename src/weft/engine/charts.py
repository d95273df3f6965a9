"""The scaffold of every chart, as inline SVG: a frame with margins, scales, grid lines and labels."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from weft.core.errors import SpecError
from weft.core.files import write_text
from weft.core.search_space import Range
from weft.core.settings import lower_is_better
from weft.core.sweep import setting_of, with_args_apart
from weft.core.units import show_bytes, show_seconds
from weft.engine.ranking import MOST_VALUES, Effect, chosen_settings, labels_of, score_of
from weft.engine.sweep_result import SweepResult, value_of
from weft.planner.division.simulator import Activity, Simulation
from weft.planner.report.plan_report import GroupEstimate, PlanReport
from weft.planner.report.plan_text import KINDS

# ---- Shared parts of report pages: style, light and dark, and plain elements. Every value is escaped.


def package_file(name: str) -> str:
    """A style sheet or script of this package, to be written into a page."""
    return (resources.files("weft.engine") / "static" / name).read_text(encoding="utf-8")


def head(title: str, style: str = "") -> str:
    """The page up to its body, which is left open; nothing in it is fetched from elsewhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
{package_file("page.css")}{style}</style></head><body>"""


def text(value: Any) -> str:
    """``value`` as HTML text or attribute."""
    return html.escape(str(value))


def table(values: Mapping[str, Any]) -> str:
    """Two columns: what, and its value."""
    rows = []
    for key, value in values.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        rows.append(f"<tr><td>{text(key)}</td><td>{text(shown)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def bullets(items: Iterable[Any]) -> str:
    """A list with points."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


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


# ---- Scales of a sweep's charts, and the colour of a member by its score.
#
# Every line and dot of a member carries ``data-i``, its position in the sweep, which the page's script uses to light
# up the same member everywhere, and ``--s``, its place between the worst and the best score, which colours it.

LOG_FROM = 20.0  # ratio of largest to smallest from which on an axis is logarithmic


@dataclass(frozen=True)
class Span:
    """A range of scores that leaves out far outliers at the bad end (diverged members), for colours and axes."""

    low: float
    high: float
    lower: bool = False

    @classmethod
    def of(cls, scores: Sequence[float], lower: bool = False) -> Span:
        """From the scores that there are; ``lower``: less is better."""
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


def scores_of(result: SweepResult) -> list[float | None]:
    """The score of every member by the metric of the sweep."""
    metric = result.metric
    return [score_of(member, metric) for member in result.tasks]


def span_of(result: SweepResult) -> Span:
    """The range of all scores."""
    scores = [score for score in scores_of(result) if score is not None]
    return Span.of(scores, lower=lower_is_better(result.metric))


def mark(index: int, score: float | None, span: Span, best: Collection[int]) -> str:
    """The attributes that every line and dot of a member has; ``best`` are those of the best settings."""
    kind = "m best" if index in best else "m" if score is not None else "m none"
    share = 0.0 if score is None else span.share(score)
    return f'class="{kind}" data-i="{index}" style="--s:{100 * share:.0f}%"'


def back_to_front(scores: Sequence[float | None], best: Collection[int]) -> list[int]:
    """Positions, good ones last so that they lie on top."""
    order = sorted(range(len(scores)), key=lambda i: rank_key(scores[i]))
    return [i for i in order if i not in best] + [i for i in order if i in best]


def rank_key(score: float | None) -> float:
    """Sorts scores, those that are missing first."""
    return -math.inf if score is None else score


def warp(result: SweepResult, key: str, values: Sequence[float]) -> Scale:
    """The logarithm for a setting that was drawn by it or spans decades, else the number itself."""
    source = with_args_apart(result.sweep.settings).get(key)
    low, high = min(values), max(values)
    wide = source.log if isinstance(source, Range) else low > 0 and high / low > LOG_FROM
    return math.log10 if wide and low > 0 else float


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- Line charts as inline SVG: no scripts, no files beside the page.

FRAME = Frame(width=560, height=260, left=52, right=12, top=14, bottom=30)
MOST_POINTS = 400  # more are not visible at this width


@dataclass(frozen=True)
class Curve:
    """A named line: ``values[i]`` at epoch ``i + 1``, NaN where unknown; ``style`` is a CSS class."""

    name: str
    values: Sequence[float]
    style: str


def chart(title: str, curves: Sequence[Curve], marked: int | None = None) -> str:
    """An SVG chart of ``curves`` over epochs, with a vertical line at epoch ``marked``."""
    known = [v for curve in curves for v in curve.values if math.isfinite(v)]
    if not known:
        return ""
    epochs = max(len(curve.values) for curve in curves)
    ticks = nice_ticks(min(known), max(known))
    to_x, to_y = FRAME.across(1, max(epochs, 2)), FRAME.up(ticks[0], ticks[-1])
    parts = [FRAME.grid(ticks, to_y)]
    parts += [FRAME.word(to_x(at), FRAME.height - 8, at) for at in sorted({1, max(epochs // 2, 1), epochs})]
    parts.append(FRAME.word(FRAME.end, FRAME.floor - 6, "epoch", "end"))
    if marked:
        parts.append(FRAME.mark(to_x(marked), "best"))
    parts += [_line(curve, to_x, to_y) for curve in curves]
    entries = [(curve.style, curve.name) for curve in curves] + ([("best", "best epoch")] if marked else [])
    legend = "".join(f'<span class="{style}">{text(name)}</span>' for style, name in entries)
    caption = f'<figcaption>{text(title)}<span class="legend">{legend}</span></figcaption>'
    return "\n".join(["<figure>", caption, FRAME.svg(title, parts) + "</figure>"])


def _line(curve: Curve, to_x: Scale, to_y: Scale) -> str:
    points = [(epoch, value) for epoch, value in enumerate(curve.values, 1) if math.isfinite(value)]
    return f'<polyline class="{curve.style}" points="{path(thinned(points, MOST_POINTS), to_x, to_y)}"/>'


# ---- Draw the effect of one setting on the score as inline SVG: one dot per member, one mean per value.

EFFECT_FRAME = Frame(width=340, height=210, left=52, right=10, top=12, bottom=30)


def effect_chart(result: SweepResult, effect: Effect, span: Span, best: Collection[int]) -> str:
    """An SVG: a dot for every member over the value it had, and the mean of every value (or range) with its spread."""
    ticks = nice_ticks(span.low, span.high, 4)
    to_y = _clamped(ticks[0], ticks[-1], EFFECT_FRAME.up(ticks[0], ticks[-1]))
    places, words = _binned(result, effect) if effect.binned else _listed(effect)
    dots, means = [], []
    for position, (members, scores) in enumerate(zip(effect.members, effect.scores, strict=True)):
        for rank, (i, score) in enumerate(zip(members, scores, strict=True)):
            x = places[i] + (0.0 if effect.binned else _aside(rank, len(members)))
            dots.append(f'<circle {mark(i, score, span, best)} cx="{x:.1f}" cy="{to_y(score):.1f}" r="3.4"/>')
        middle = fmean(places[i] for i in members) + (0 if effect.binned else 20)
        means.append(_mean_mark(middle, scores, to_y, position == effect.best))
    below = [EFFECT_FRAME.word(x, EFFECT_FRAME.height - 10, word) for x, word in words]
    parts = [EFFECT_FRAME.grid(ticks, to_y), *below, *dots, *means]
    return EFFECT_FRAME.svg(f"effect of {effect.setting}", parts, 'class="dots"')


def _listed(effect: Effect) -> tuple[dict[int, float], list[tuple[float, str]]]:
    """Where members stand, and the words below: every value has a place of the same width."""
    band = (EFFECT_FRAME.end - EFFECT_FRAME.left) / len(effect.labels)
    centre = [EFFECT_FRAME.left + band * (position + 0.5) for position in range(len(effect.labels))]
    places = {i: centre[position] - 6 for position, members in enumerate(effect.members) for i in members}
    return places, [(x, _short(label, band)) for x, label in zip(centre, effect.labels, strict=True)]


def _binned(result: SweepResult, effect: Effect) -> tuple[dict[int, float], list[tuple[float, str]]]:
    """Where members stand by the size of their value."""
    values = {i: float(setting_of(result.tasks[i].task, effect.setting)) for members in effect.members for i in members}
    low, high = min(values.values()), max(values.values())
    change = warp(result, effect.setting, list(values.values()))
    to_x = linear(change(low), change(high), EFFECT_FRAME.left + 12, EFFECT_FRAME.end - 14)
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


# ---- Draw the learning curves of a sweep's members as inline SVG.

POINTS = 160  # of a curve; a screen shows no more
CURVES_FRAME = Frame(width=560, height=300, left=50, right=14, top=12, bottom=34)


def curves(result: SweepResult, column: str, best: Collection[int]) -> str:
    """An SVG with ``column`` of every member's history over epochs; "" where nothing was measured."""
    histories = [_points(member.history, column) for member in result.tasks]
    known = [value for points in histories for _, value in points]
    if not known:
        return ""
    low, high = _visible(histories, known, column.endswith("loss"))
    ticks = nice_ticks(low, high)
    epochs = max(points[-1][0] for points in histories if points)
    to_x, to_y = CURVES_FRAME.across(1, max(epochs, 2)), CURVES_FRAME.up(ticks[0], ticks[-1])
    scores, span = scores_of(result), span_of(result)
    lines = [
        f'<polyline {mark(i, scores[i], span, best)} points="{_path(histories[i], to_x, to_y, ticks)}"/>'
        for i in back_to_front(scores, best)
        if histories[i]
    ]
    parts = [CURVES_FRAME.grid(ticks, to_y), _epochs(epochs, to_x), *lines]
    return CURVES_FRAME.svg(f"{column} by epoch", parts, 'class="lines"')


def _points(history: dict[str, list[float]], column: str) -> list[tuple[int, float]]:
    values = history.get(column, [])
    return [(epoch, value) for epoch, value in enumerate(values, 1) if value is not None and math.isfinite(value)]


def _visible(
    histories: Sequence[Sequence[tuple[int, float]]], known: Sequence[float], loss: bool
) -> tuple[float, float]:
    """The range to show: a loss that explodes leaves it at the top, the first steps of a metric at the bottom."""
    ordered = sorted(known)
    if not loss:
        return ordered[int(0.08 * (len(ordered) - 1))], ordered[-1]
    starts = [points[0][1] for points in histories if points]
    highest = max(ordered[int(0.98 * (len(ordered) - 1))], median(starts))
    return ordered[0], min(ordered[-1], 1.25 * highest if highest > 0 else highest)


def _path(points: Sequence[tuple[int, float]], to_x: Scale, to_y: Scale, ticks: Sequence[float]) -> str:
    inside = ((epoch, min(max(value, ticks[0]), ticks[-1])) for epoch, value in thinned(points, POINTS))
    return path(inside, to_x, to_y)


def _epochs(epochs: int, to_x: Scale) -> str:
    marks = sorted({1, *(round(epochs * share) for share in (0.25, 0.5, 0.75)), epochs} - {0})
    shown = "".join(CURVES_FRAME.word(to_x(epoch), CURVES_FRAME.height - 16, epoch) for epoch in marks)
    return shown + CURVES_FRAME.word((CURVES_FRAME.left + CURVES_FRAME.end) / 2, CURVES_FRAME.height - 2, "epoch")


# ---- Draw the memory of a step over its operators as a stacked area chart: a self-contained SVG or page.

MEMORY_FRAME = Frame(width=960, height=360, left=76, right=16, top=40, bottom=58)
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
    to_x, to_y = MEMORY_FRAME.across(0, max(steps - 1, 1)), MEMORY_FRAME.up(0, ticks[-1])
    parts = [
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{MEMORY_FRAME.left}" y="20">{text(title)}: peak {show_bytes(peak)} of tensors</text>',
        MEMORY_FRAME.grid(ticks, to_y, show_bytes),
        *_areas(group, steps, to_x, to_y),
        *_phases(group.phases, to_x),
    ]
    if shown_budget:
        parts.append(MEMORY_FRAME.level(to_y(budget), "budget"))
        parts.append(MEMORY_FRAME.word(MEMORY_FRAME.end, to_y(budget) - 5, f"budget {show_bytes(budget)}", "end"))
    parts += _legend(group)
    return MEMORY_FRAME.svg(title, parts, 'xmlns="http://www.w3.org/2000/svg"')


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
        parts.append(MEMORY_FRAME.mark(x, "phase"))
        if to_x(end) - x > 7.0 * len(phase):
            parts.append(MEMORY_FRAME.word(x + 4, MEMORY_FRAME.floor + 16, phase, "start"))
    return parts


def _legend(group: GroupEstimate) -> list[str]:
    parts, x = [], float(MEMORY_FRAME.left)
    for kind in _kinds(group):
        name, colour = KINDS.get(kind, kind), COLOURS.get(kind, OTHER)
        parts.append(f'<rect x="{x:.0f}" y="{MEMORY_FRAME.height - 24}" width="12" height="12" fill="{colour}"/>')
        parts.append(MEMORY_FRAME.word(x + 17, MEMORY_FRAME.height - 14, name, "start"))
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


# ---- Draw parallel coordinates of a sweep as inline SVG: one axis per setting, one line per member.

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


# ---- Draw the simulated schedule of an epoch's first batches as a Gantt chart: a row per resource, a bar per phase.

WIDTH, LEFT, RIGHT, TITLE, ROW, AXIS = 960, 120, 16, 56, 22, 34
BATCHES = 40  # that are drawn
SCHEDULE_COLOURS = {"batching": "#2f6fde", "transfer": "#d9822b", "training": "#2e9d6a"}
SCHEDULE_STYLE = (
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
        f'aria-label="{text(title)}"><style>{SCHEDULE_STYLE}</style>',
        f'<text class="title" x="8" y="20">{text(title)}</text><text x="8" y="40">{text(told)}</text>',
        *_time_axis(end, height),
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
    colour = SCHEDULE_COLOURS.get(one.key.partition("_")[0], "#98a2b3")
    bar = (
        f'<rect class="bar" x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{ROW - 4}" rx="2" fill="{colour}">'
        f"<title>{text(told)}</title></rect>"
    )
    return bar + (f'<text class="on" x="{x + 2:.1f}" y="{top + 15}">{one.batch}</text>' if width > 16 else "")


def _time_axis(end: float, height: float) -> Sequence[str]:
    times = [end * part / 5 for part in range(6)]
    return [
        f'<line class="grid" x1="{_x(at, end):.1f}" x2="{_x(at, end):.1f}" y1="{TITLE}" y2="{height - AXIS}"/>'
        f'<text x="{_x(at, end):.1f}" y="{height - 12}" text-anchor="middle">{show_seconds(at) if at else "0"}</text>'
        for at in times
    ]
