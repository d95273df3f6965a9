"""Scales of a sweep's charts, and the colour of a member by its score.

Every line and dot of a member carries ``data-i``, its position in the sweep, which the page's script uses to light
up the same member everywhere, and ``--s``, its place between the worst and the best score, which colours it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.core.settings.grid.values import with_args_apart
from weft.core.settings.loop_settings import lower_is_better
from weft.core.settings.search_space import Range
from weft.engine.report.charts import Scale
from weft.engine.report.ranking import score_of
from weft.engine.results.sweep_result import SweepResult

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
