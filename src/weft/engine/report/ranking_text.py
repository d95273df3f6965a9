"""Put the ranking of a sweep into sentences that claim no more than the numbers show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.core.settings.grid.values import REPEATS, setting_of
from weft.engine.report.ranking import Effect, Standing, chosen_settings, labels_of, lead, within
from weft.engine.results.sweep_result import SweepResult

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
