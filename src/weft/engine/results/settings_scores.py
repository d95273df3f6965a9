"""SettingsScore: what settings scored over their seeds, mean and deviation; runs that were pruned are counted apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from weft.core.settings.grid.values import REPEATS, setting_of
from weft.core.settings.loop_settings import lower_is_better
from weft.core.settings.value_names import ARGS, Labels, identity

if TYPE_CHECKING:
    from weft.engine.results.result import Result
    from weft.engine.results.sweep_result import SweepResult


@dataclass(frozen=True)
class SettingsScore:
    """One choice of settings: ``mean`` and ``deviation`` of ``metric`` over members that differ in seed and split.

    ``deviation`` is the standard deviation, None of one member. ``test_mean``, ``test_deviation``: of the test nodes,
    at the same epochs. ``splits``: how many splits of the graph the members have. ``pruned``: members
    that were ended early and count for nothing here, unless all were.
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

    def __str__(self) -> str:
        seeds = f" over {self.repeats}" if len(self.members) > 1 else ""
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

    def to_dict(self) -> dict[str, Any]:
        """A flat row, for a table."""
        scores = {f"{self.metric}_mean": self.mean, f"{self.metric}_deviation": self.deviation}
        tests = {"test_mean": self.test_mean, "test_deviation": self.test_deviation}
        return {**self.settings, **scores, **tests, "members": len(self.members), "pruned": self.pruned}


def plus_minus(mean: float, deviation: float | None) -> str:
    """``0.812 ± 0.004``."""
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def settings_scores(result: SweepResult, metric: str) -> list[SettingsScore]:
    """Every choice of settings that has a score, best first; all members are on one graph."""
    keys = [key for key in result.sweep.varying if key not in REPEATS]
    labels = Labels({key: [setting_of(member.task, key) for member in result.tasks] for key in result.sweep.varying})
    alike: dict[tuple[Any, ...], list[Result]] = {}
    for member in result.tasks:
        alike.setdefault(tuple(identity(setting_of(member.task, key)) for key in keys), []).append(member)
    found = [_score(members, metric, keys, labels) for members in alike.values()]
    sign = 1.0 if lower_is_better(metric) else -1.0
    return sorted((one for one in found if one is not None), key=lambda one: sign * one.mean)


def _score(members: Sequence[Result], metric: str, keys: Sequence[str], labels: Labels) -> SettingsScore | None:
    whole = [member for member in members if member.status != "pruned"]
    counted = [member for member in whole or members if _number(member, metric) is not None]
    if not counted:
        return None
    task = counted[0].task
    described = {key: setting_of(task, key) for key in keys}
    test = "test_" + metric.partition("_")[2]
    return SettingsScore(
        labels.name(described, keys) or (task.label if len(members) == 1 else task.model_name),
        {key.removeprefix(ARGS): value for key, value in described.items()},
        tuple(member.name for member in counted),
        metric,
        *_mean(_number(member, metric) for member in counted),
        *(_mean(_number(member, test) for member in counted) if test != metric else (None, None)),
        pruned=len(members) - len(whole),
        splits=len({member.task.split for member in counted}),
    )


def _number(member: Result, metric: str) -> float | None:
    value = member.metrics.get(metric)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


def _mean(values: Iterable[float | None]) -> tuple[Any, float | None]:
    known = [value for value in values if value is not None]
    return (fmean(known) if known else None), (stdev(known) if len(known) > 1 else None)
