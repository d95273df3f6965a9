"""Rank the settings of a sweep: by how much they differ, how certain that is, and the effect of each setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from weft.core.settings import Labels, lower_is_better
from weft.core.sweep import REPEATS, setting_of
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult, value_of

# Standard errors from which on a difference of two means is called clear: Student's t, 95 %, by degrees of freedom.
CLEAR = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04, 120: 1.98}
MOST_VALUES = 8  # of a setting that are compared one by one; more numbers are compared by ranges
BINS = 5


@dataclass(frozen=True)
class Standing:
    """Settings that differ from others in more than the seed: positions of the ``members``, score over their seeds.

    ``error`` is the standard error of ``score`` over seeds, None with one seed; ``test`` and ``test_error`` alike.
    """

    name: str
    members: tuple[int, ...]
    score: float
    error: float | None
    test: float | None
    test_error: float | None


@dataclass(frozen=True)
class Effect:
    """What one setting does: a label for every value in order, the members that had it, and their scores.

    A setting with many numbers is ``binned``: its labels are ranges of about equally many members.
    """

    setting: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]
    members: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    binned: bool = False
    lower: bool = False  # less is better

    @property
    def means(self) -> tuple[float, ...]:
        """The mean score of every value."""
        return tuple(fmean(scores) for scores in self.scores)

    @property
    def span(self) -> float:
        """Between the best and the worst mean."""
        return max(self.means) - min(self.means)

    @property
    def best(self) -> int:
        """Position of the value with the best mean."""
        return (min if self.lower else max)(range(len(self.means)), key=lambda index: self.means[index])

    @property
    def worst(self) -> int:
        """Position of the value with the worst mean."""
        return (max if self.lower else min)(range(len(self.means)), key=lambda index: self.means[index])

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers."""
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)

    @property
    def clear(self) -> bool:
        """Whether the best and the worst mean differ by more than their standard errors explain."""
        first, last = self.scores[self.best], self.scores[self.worst]
        errors = [_mean(scores)[1] for scores in (first, last)]
        if None in errors:
            return False
        return self.span > _clear(len(first), len(last)) * math.hypot(*(error or 0.0 for error in errors))


def score_of(result: Result, metric: str) -> float | None:
    """The member's score, None if it has none."""
    value = result.metrics.get(metric)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def labels_of(result: SweepResult) -> Labels:
    """Words for the values of the settings that vary."""
    tasks = [member.task for member in result.tasks]
    return Labels({key: [setting_of(task, key) for task in tasks] for key in result.sweep.varying})


def chosen_settings(result: SweepResult) -> tuple[str, ...]:
    """The settings that vary and are a choice: all but the seed, unless the seed is all there is."""
    varying = result.sweep.varying
    return tuple(key for key in varying if key not in REPEATS) or varying


def standings(result: SweepResult) -> list[Standing]:
    """All settings with a score, best first."""
    metric, labels = result.metric, labels_of(result)
    keys = [key for key in result.sweep.varying if key not in REPEATS]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, member in enumerate(result.tasks):
        groups.setdefault(tuple(value_of(member, key) for key in keys), []).append(index)
    found = [_standing(result, members, metric, keys, labels) for members in groups.values()]
    sign = 1.0 if lower_is_better(metric) else -1.0
    return sorted((one for one in found if one is not None), key=lambda one: (sign * one.score, one.members))


def _standing(
    result: SweepResult, members: Sequence[int], metric: str, keys: Sequence[str], labels: Labels
) -> Standing | None:
    known = [(i, score) for i in members if (score := score_of(result.tasks[i], metric)) is not None]
    if not known:
        return None
    task = result.tasks[known[0][0]].task
    name = labels.name({key: setting_of(task, key) for key in keys}, keys)
    name = name or (task.label if len(members) == 1 else task.model_name)
    tests = [score_of(result.tasks[i], "test_" + metric.partition("_")[2]) for i, _ in known]
    test, test_error = _mean([value for value in tests if value is not None])
    score, error = _mean([value for _, value in known])
    assert score is not None
    return Standing(name, tuple(i for i, _ in known), score, error, test, test_error)


def _mean(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error, each None if there are too few values."""
    if not values:
        return None, None
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def effects(result: SweepResult) -> list[Effect]:
    """The settings that vary, those that moved the score most first; seeds are not among them."""
    labels = labels_of(result)
    found = [_effect(result, key, labels) for key in result.sweep.varying if key not in REPEATS]
    return sorted((one for one in found if one is not None), key=lambda one: -one.span)


def _effect(result: SweepResult, key: str, labels: Labels) -> Effect | None:
    groups: dict[Any, list[tuple[int, float]]] = {}
    values: dict[Any, Any] = {}
    metric = result.metric
    for index, member in enumerate(result.tasks):
        score = score_of(member, metric)
        if score is not None:
            values[value_of(member, key)] = setting_of(member.task, key)
            groups.setdefault(value_of(member, key), []).append((index, score))
    if len(groups) < 2:
        return None
    order = sorted(groups, key=lambda value: _sort_key(values[value]))
    if len(order) > MOST_VALUES and all(isinstance(values[value], (int, float)) for value in order):
        found = [(values[value], index, score) for value in order for index, score in groups[value]]
        return _binned(key, found, lower_is_better(metric))
    return Effect(
        key,
        tuple(labels.word(key, values[value]) for value in order),
        tuple(values[value] for value in order),
        tuple(tuple(index for index, _ in groups[value]) for value in order),
        tuple(tuple(score for _, score in groups[value]) for value in order),
        lower=lower_is_better(metric),
    )


def _binned(key: str, found: Sequence[tuple[float, int, float]], lower: bool) -> Effect:
    """Ranges of about equally many members each, from ``(value, member, score)`` in ascending order."""
    edges = [len(found) * position // BINS for position in range(BINS + 1)]
    bins = [found[begin:end] for begin, end in pairwise(edges) if end > begin]
    return Effect(
        key,
        tuple(f"{one[0][0]:.2g} to {one[-1][0]:.2g}" for one in bins),
        tuple(one[len(one) // 2][0] for one in bins),
        tuple(tuple(index for _, index, _ in one) for one in bins),
        tuple(tuple(score for _, _, score in one) for one in bins),
        binned=True,
        lower=lower,
    )


def _sort_key(value: Any) -> tuple[int, Any]:
    if isinstance(value, (int, float)):
        return 1, value
    return (0, "") if value is None else (2, str(value))


# ---- how sure that is -----------------------------------------------------------------------------------


def _clear(first: int, second: int) -> float:
    """Standard errors beyond which means of so many values differ by more than chance."""
    freedom = max(first + second - 2, 1)
    return next((CLEAR[known] for known in sorted(CLEAR, reverse=True) if known <= freedom), CLEAR[1])


def lead(first: Standing, second: Standing) -> tuple[float, float | None]:
    """How far ``first`` is ahead, and the standard error of that difference if there are seeds."""
    ahead = abs(first.score - second.score)  # whichever way is better
    if first.error is None or second.error is None:
        return ahead, None
    return ahead, math.hypot(first.error, second.error)


def within(first: Standing, other: Standing) -> bool:
    """Whether ``other`` is level with ``first``: as far as seeds show, not behind."""
    ahead, error = lead(first, other)
    return error is not None and ahead <= _clear(len(first.members), len(other.members)) * error


# ---- Put the ranking of a sweep into sentences that claim no more than the numbers show.

ENOUGH = 30  # members from which on the best tenth says something
NARROW = 0.6  # share of all members below which a range of values is narrow


def verdict(result: SweepResult, ranked: Sequence[Standing]) -> str:
    """One sentence: by how much the best settings lead, and whether that is more than chance."""
    if len(ranked) < 2:
        return "There was nothing to compare it with."
    ahead, error = lead(ranked[0], ranked[1])
    if ahead == 0:
        return f"Level with {ranked[1].name}: as good as equal."
    gap = f"{ahead:.4f} ahead of {ranked[1].name}"
    if error is None:
        return f"{gap}. {_without_seeds(result, ranked[0].score)}"
    seeds = f"{min(len(ranked[0].members), len(ranked[1].members))} {repeats(result)}"
    noise = f"(standard error of the difference: {error:.4f})"
    if not within(ranked[0], ranked[1]):
        return f"{gap}, more than chance between {seeds} explains {noise}. {_same_nodes(result, ranked[0].score)}"
    level = sum(1 for other in ranked[1:] if within(ranked[0], other))
    others = "1 other setting is" if level == 1 else f"{level} other settings are"
    return f"{gap}, which is within the noise of {seeds} {noise}; {others} level with it."


def repeats(result: SweepResult) -> str:
    """What settings are repeated over: seeds, splits, or both."""
    varying = [key for key in REPEATS if key in result.sweep.varying]
    return {("split",): "splits", ("split", "seed"): "runs"}.get(tuple(varying), "seeds")


def _same_nodes(result: SweepResult, score: float) -> str:
    """What more seeds do not show."""
    known = _known_to(result, score)
    return (
        f"All were measured on the same {known[0]:,} nodes (a share of them is known to ± {known[1]:.4f})."
        if known
        else ""
    )


def _without_seeds(result: SweepResult, score: float) -> str:
    known = _known_to(result, score)
    if known is None:
        return "Every setting ran with one seed, so how much of that is chance is not known."
    return f"One seed each; a share of {known[0]:,} nodes is known to ± {known[1]:.4f}. Vary the seed to be surer."


def _known_to(result: SweepResult, score: float) -> tuple[int, float] | None:
    """The nodes that an accuracy was measured on, and its standard error as a share of them."""
    nodes = result.graph.get(result.metric.partition("_")[0])
    if "split" in result.sweep.varying or not nodes or not result.metric.endswith("accuracy") or not 0 < score < 1:
        return None
    return nodes, math.sqrt(score * (1 - score) / nodes)


def what_mattered(found: Sequence[Effect]) -> list[str]:
    """Sentences on which settings moved the score, and where a list should have gone on."""
    said = []
    for effect in found:
        means = _means(effect)
        if effect.clear:
            best = f"{effect.setting}{' from ' if effect.binned else '='}{effect.labels[effect.best]}"
            side = "below" if effect.lower else "above"
            said.append(f"{best} was best on average, {effect.span:.4f} {side} the worst ({means})")
            said += _at_the_edge(effect)
        else:
            said.append(f"{effect.setting} made no clear difference ({means})")
    return said


def _means(effect: Effect) -> str:
    """The mean of every value, or of the best and the worst of many."""
    pairs = [f"{label}: {mean:.4f}" for label, mean in zip(effect.labels, effect.means, strict=True)]
    if len(pairs) <= 4 and not effect.binned:
        return ", ".join(pairs)
    return f"{pairs[effect.best]}; {pairs[effect.worst]}"


def in_common(result: SweepResult) -> str:
    """What the best tenth of many members have in common, which means over all the others may hide; "" if nothing."""
    ranked = result.ranking()
    top = ranked[: max(len(ranked) // 10, 3)]
    if len(ranked) < ENOUGH:
        return ""
    words = [word for key in chosen_settings(result) if (word := _narrow(result, key, top))]
    return f"the best {len(top)} have {', '.join(words)}" if words else ""


def _narrow(result: SweepResult, key: str, top: Sequence[int]) -> str:
    labels = labels_of(result)
    every = [setting_of(member.task, key) for member in result.tasks]
    those = [every[i] for i in top]
    if len({labels.word(key, value) for value in those}) == 1:
        return f"{key}={labels.word(key, those[0])}"
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in every):
        return ""
    inside = sum(min(those) <= value <= max(those) for value in every) / len(every)
    return f"{key} from {min(those):.3g} to {max(those):.3g}" if inside < NARROW else ""


def _at_the_edge(effect: Effect) -> list[str]:
    if effect.binned or not effect.numeric or len(effect.values) < 3:
        return []
    if effect.best not in (0, len(effect.values) - 1):
        return []
    end, more = ("smallest", "smaller") if effect.best == 0 else ("largest", "larger")
    return [f"the best {effect.setting} is the {end} that was tried: {more} ones may be better still"]
