"""Rank the settings of a sweep: scores over seeds, how certain a lead is, the effect of each setting, in words.

No sentence claims more than the numbers show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from weft.core.settings import ARGS, Labels, identity, lower_is_better
from weft.core.sweep import REPEATS, setting_of

if TYPE_CHECKING:
    from weft.engine.result import Result
    from weft.engine.sweep_result import SweepResult

# Standard errors from which a difference of two means is clear: Student's t, 95 %, by degrees of freedom.
CLEAR = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04, 120: 1.98}
MOST_VALUES = 8  # of a setting that are compared one by one; more numbers are compared by ranges
BINS = 5
ENOUGH_MEMBERS = 30  # from which on the best tenth is informative
NARROW = 0.6  # share of all members below which a range of values is narrow


@dataclass(frozen=True)
class SettingsScore:
    """One choice of settings: ``mean`` and ``deviation`` of ``metric`` over members that differ in seed and split.

    ``deviation`` is the standard deviation, None for one member. ``test_mean``, ``test_deviation``: on the test nodes,
    at the same epochs. ``splits``: how many splits of the graph the members have. ``pruned``: members that ended early,
    which are not part of the mean unless all were pruned. ``positions``: of ``members`` in the sweep.
    """

    name: str
    settings: dict[str, Any]
    members: tuple[str, ...]
    metric: str
    mean: float
    deviation: float | None
    test_mean: float | None = None
    test_deviation: float | None = None
    pruned: int = 0
    splits: int = 1
    positions: tuple[int, ...] = ()

    def __str__(self) -> str:
        seeds = f"; mean ± standard deviation over {self.repeats}" if len(self.members) > 1 else ""
        words = f"{self.metric.replace('_', ' ')} {plus_minus(self.mean, self.deviation)}"
        if self.test_mean is not None:
            words += f", test {plus_minus(self.test_mean, self.test_deviation)}"
        return f"{self.name} ({words}{seeds})"

    @property
    def repeats(self) -> str:
        """What the mean is over: ``"3 seeds"``, ``"10 splits"``, ``"10 splits x 3 seeds"``."""
        seeds, rest = divmod(len(self.members), self.splits)
        if self.splits == 1:
            return f"{seeds} seeds"
        if rest:
            return f"{len(self.members)} runs on {self.splits} splits"
        return f"{self.splits} splits" if seeds == 1 else f"{self.splits} splits x {seeds} seeds"

    def error_of(self, deviation: float | None) -> float | None:
        """The standard error of a mean over the members with this deviation."""
        return None if deviation is None else deviation / math.sqrt(len(self.members))

    def to_dict(self) -> dict[str, Any]:
        """A flat row, for a table."""
        scores = {f"{self.metric}_mean": self.mean, f"{self.metric}_deviation": self.deviation}
        tests = {"test_mean": self.test_mean, "test_deviation": self.test_deviation}
        return {**self.settings, **scores, **tests, "members": len(self.members), "pruned": self.pruned}


Row = tuple[Any, int, float]  # the value of a setting, the member that had it, its score


@dataclass(frozen=True)
class Effect:
    """The effect of one setting: a label for every value in order, and the rows of the members that had it.

    A setting with many numbers is ``binned``: its labels are ranges of about equally many members.
    """

    setting: str
    labels: tuple[str, ...]
    groups: tuple[Sequence[Row], ...]
    binned: bool = False
    lower: bool = False  # less is better

    @property
    def scores(self) -> tuple[tuple[float, ...], ...]:
        """The scores of every value."""
        return tuple(tuple(score for _, _, score in rows) for rows in self.groups)

    @property
    def means(self) -> tuple[float, ...]:
        """The mean score of every value."""
        return tuple(fmean(scores) for scores in self.scores)

    @property
    def span(self) -> float:
        """The difference of the best and the worst mean."""
        return max(self.means) - min(self.means)

    @property
    def ends(self) -> tuple[int, int]:
        """Positions of the values with the best and the worst mean."""
        means = self.means
        lowest, highest = (pick(range(len(means)), key=lambda index: means[index]) for pick in (min, max))
        return (lowest, highest) if self.lower else (highest, lowest)

    @property
    def clear(self) -> bool:
        """True if the best and the worst mean differ by more than their standard errors explain."""
        first, last = (self.scores[position] for position in self.ends)
        if min(len(first), len(last)) < 2:
            return False
        errors = [stdev(scores) / math.sqrt(len(scores)) for scores in (first, last)]
        return self.span > _clear_errors(len(first), len(last)) * math.hypot(*errors)


def is_number(value: Any) -> bool:
    """True for a finite or infinite number; False for true and false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def score_of(result: Result, metric: str) -> float | None:
    """The score of a member, None without a finite one."""
    value = result.metrics.get(metric)
    return float(value) if is_number(value) and math.isfinite(value) else None


def plus_minus(mean: float | None, deviation: float | None) -> str:
    """``0.812 ± 0.004``, a dash for None."""
    if mean is None:
        return "–"
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def labels_of(result: SweepResult) -> Labels:
    """Words for the values of the settings that vary."""
    return Labels({key: [setting_of(member.task, key) for member in result.tasks] for key in result.sweep.varying})


def chosen_settings(result: SweepResult) -> tuple[str, ...]:
    """The settings that vary and are a choice: all except the seed, unless only the seed varies."""
    varying = result.sweep.varying
    return tuple(key for key in varying if key not in REPEATS) or varying


def repeats(result: SweepResult) -> str:
    """What settings are repeated over: seeds, splits, or both."""
    varying = [key for key in REPEATS if key in result.sweep.varying]
    return {("split",): "splits", ("split", "seed"): "runs"}.get(tuple(varying), "seeds")


def settings_scores(result: SweepResult, metric: str) -> list[SettingsScore]:
    """Every choice of settings that has a score, best first; all members are on one graph."""
    keys, labels = [key for key in result.sweep.varying if key not in REPEATS], labels_of(result)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, member in enumerate(result.tasks):
        groups.setdefault(tuple(identity(setting_of(member.task, key)) for key in keys), []).append(index)
    test, scores = "test_" + metric.partition("_")[2], []
    for members in groups.values():
        whole = [index for index in members if result.tasks[index].status != "pruned"]
        counted = [index for index in whole or members if score_of(result.tasks[index], metric) is not None]
        if not counted:
            continue
        task = result.tasks[counted[0]].task
        settings = {key: setting_of(task, key) for key in keys}
        means = []
        for name in (metric, test) if test != metric else (metric,):
            values = [value for i in counted if (value := score_of(result.tasks[i], name)) is not None]
            means += [fmean(values) if values else None, stdev(values) if len(values) > 1 else None]
        score = SettingsScore(
            labels.name(settings, keys) or (task.label if len(members) == 1 else task.model_name),
            {key.removeprefix(ARGS): value for key, value in settings.items()},
            tuple(result.tasks[index].name for index in counted),
            metric,
            *means,  # type: ignore[arg-type]  # the first mean is there: every counted member has a score
            pruned=len(members) - len(whole),
            splits=len({result.tasks[index].task.split for index in counted}),
            positions=tuple(counted),
        )
        scores.append(score)
    sign = 1.0 if lower_is_better(metric) else -1.0
    return sorted(scores, key=lambda score: (sign * score.mean, score.positions))


def effects(result: SweepResult) -> list[Effect]:
    """The effects of the settings that vary, except seeds; those that moved the score most first.

    Pruned members count only if every member was pruned.
    """
    labels, lower, ranked = labels_of(result), lower_is_better(result.metric), list[Effect]()
    whole = [index for index, member in enumerate(result.tasks) if member.status != "pruned"]
    counted = whole or range(len(result.tasks))  # a pruned member's score is of an early epoch
    scores = [(index, score_of(result.tasks[index], result.metric)) for index in counted]
    for key in result.sweep.varying:
        groups: dict[Any, list[Row]] = {}
        for index, score in scores:
            if score is not None:
                value = setting_of(result.tasks[index].task, key)
                groups.setdefault(identity(value), []).append((value, index, score))
        if key in REPEATS or len(groups) < 2:
            continue
        ordered = sorted(groups.values(), key=lambda rows: sort_key(rows[0][0]))
        binned = len(ordered) > MOST_VALUES and all(isinstance(rows[0][0], (int, float)) for rows in ordered)
        if binned:  # ranges of about equally many members
            rows = [row for group in ordered for row in group]
            edges = [len(rows) * position // BINS for position in range(BINS + 1)]
            ordered = [rows[begin:end] for begin, end in pairwise(edges) if end > begin]
            words = [f"{rows[0][0]:.2g} to {rows[-1][0]:.2g}" for rows in ordered]
        else:
            words = [labels.word(key, rows[0][0]) for rows in ordered]
        ranked.append(Effect(key, tuple(words), tuple(ordered), binned, lower))
    return sorted(ranked, key=lambda effect: -effect.span)


def sort_key(value: Any) -> tuple[int, Any]:
    """Sorts values of a setting: None, numbers, then the rest by name."""
    if isinstance(value, (int, float)):
        return 1, value
    return (0, "") if value is None else (2, str(value))


def _clear_errors(first: int, second: int) -> float:
    """Standard errors beyond which means of so many values differ by more than chance."""
    freedom = max(first + second - 2, 1)
    return next(CLEAR[degrees] for degrees in sorted(CLEAR, reverse=True) if degrees <= freedom)


def _lead(first: SettingsScore, second: SettingsScore) -> tuple[float, float | None, bool]:
    """How far ``first`` is ahead, the standard error of that difference if there are seeds, and if that is noise."""
    ahead = abs(first.mean - second.mean)  # whichever way is better
    errors = [score.error_of(score.deviation) for score in (first, second)]
    if None in errors:
        return ahead, None, False
    error = math.hypot(*errors)  # type: ignore[arg-type]
    return ahead, error, ahead <= _clear_errors(len(first.members), len(second.members)) * error


def verdict(result: SweepResult, ranked: Sequence[SettingsScore]) -> str:
    """One sentence: by how much the best settings lead, and whether that is more than chance."""
    if len(ranked) < 2:
        return "There was nothing to compare it with."
    first, second = ranked[:2]
    ahead, error, noise = _lead(first, second)
    if ahead == 0:
        return f"Level with {second.name}: as good as equal."
    gap = f"{ahead:.4f} ahead of {second.name}"
    nodes = result.graph.get(result.metric.partition("_")[0])
    share = ""
    if nodes and "split" not in result.sweep.varying and result.metric.endswith("accuracy") and 0 < first.mean < 1:
        # A share of so many nodes has a standard error of its own, which more seeds do not reduce.
        share = f"has a standard error of {math.sqrt(first.mean * (1 - first.mean) / nodes):.4f}"
    if error is None and not share:
        return f"{gap}. Without several seeds of each, how much of that is chance is not known."
    if error is None:
        return f"{gap}. One seed each; a share of {nodes:,} nodes {share}. Vary the seed to be surer."
    seeds = f"{min(len(first.members), len(second.members))} {repeats(result)}"
    spread = f"(standard error of the difference: {error:.4f})"
    if not noise:
        same = f"All were measured on the same {nodes:,} nodes (a share of them {share})." if share else ""
        return f"{gap}, more than chance between {seeds} explains {spread}. {same}"
    level = sum(_lead(first, score)[2] for score in ranked[1:])
    words = "1 other setting is" if level == 1 else f"{level} other settings are"
    return f"{gap}, which is within the noise of {seeds} {spread}; {words} level with it."


def what_mattered(effects: Sequence[Effect]) -> list[str]:
    """Sentences on which settings moved the score, and which lists may have ended too early."""
    sentences = []
    for effect in effects:
        means = [f"{label}: {mean:.4f}" for label, mean in zip(effect.labels, effect.means, strict=True)]
        best, worst = effect.ends
        few = len(means) <= 4 and not effect.binned
        shown = ", ".join(means) if few else f"{means[best]}; {means[worst]}"
        if not effect.clear:
            sentences.append(f"{effect.setting} made no clear difference ({shown})")
            continue
        name = f"{effect.setting}{' from ' if effect.binned else '='}{effect.labels[best]}"
        side = "below" if effect.lower else "above"
        sentences.append(f"{name} was best on average, {effect.span:.4f} {side} the worst ({shown})")
        values = [rows[0][0] for rows in effect.groups]
        edge = best in (0, len(values) - 1) and len(values) >= 3
        if edge and not effect.binned and all(map(is_number, values)):
            end, more = ("smallest", "smaller") if best == 0 else ("largest", "larger")
            sentences.append(f"the best {effect.setting} is the {end} that was tried: {more} ones may be better still")
    return sentences


def pruned_words(result: SweepResult) -> str:
    """How many members were pruned, and which values of settings have no other member; "" without any."""
    pruned, words, labels = result.statuses.get("pruned", 0), [], labels_of(result)
    for key in chosen_settings(result):
        values = [(labels.word(key, setting_of(member.task, key)), member.status) for member in result.tasks]
        unpruned = {word for word, status in values if status != "pruned"}
        words += [f"{key}={word}" for word in dict.fromkeys(word for word, _ in values) if word not in unpruned]
    if pruned in (0, len(result)):
        return f"all {pruned} trainings were pruned: these are scores of early epochs" if pruned else ""
    every = f": all with {', '.join(words[:MOST_VALUES])}" if words else ""
    return f"{pruned} of {len(result)} trainings were pruned and do not count here{every}"


def in_common(result: SweepResult) -> str:
    """What the best tenth of many members have in common, which means over all members may hide; "" if nothing."""
    ranked = result.ranking()
    top = ranked[: max(len(ranked) // 10, 3)]
    if len(ranked) < ENOUGH_MEMBERS:
        return ""
    words, labels = [], labels_of(result)
    for key in chosen_settings(result):
        values = [setting_of(member.task, key) for member in result.tasks]
        best = [values[index] for index in top]
        if len({labels.word(key, value) for value in best}) == 1:
            words.append(f"{key}={labels.word(key, best[0])}")
        elif all(map(is_number, values)):
            inside = sum(min(best) <= value <= max(best) for value in values) / len(values)
            words += [f"{key} from {min(best):.3g} to {max(best):.3g}"] if inside < NARROW else []
    return f"the best {len(top)} have {', '.join(words)}" if words else ""
