"""Pruning: decide which members of a sweep to stop early.

A policy is a callable ``policy(epoch, scores, running) -> names``. ``scores`` has the validation metric (higher is
better; of an error its negative) of every member that has begun on the same graph, one value per evaluated epoch
up to ``epoch``; members that ended earlier keep what they had. ``running`` are the names that may be returned. It is
called every ``policy.every`` epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.core.errors import SpecError

Policy = Callable[[int, Mapping[str, Sequence[float]], Collection[str]], Iterable[str]]
EVERY = 10  # epochs between questions, for policies that do not say


@dataclass(frozen=True)
class MedianPruner:
    """Ends members whose best score so far is below the median of the others' at the same epoch.

    Not before ``warmup`` epochs, and not with fewer than ``least`` others. Members that were pruned keep counting
    with the score they had, so that the median does not climb over the survivors.
    """

    warmup: int = 30
    every: int = EVERY
    least: int = 3

    def __post_init__(self) -> None:
        for name in ("warmup", "every", "least"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"MedianPruner: {name}={value!r} must be a whole number of at least 1")

    def __call__(self, epoch: int, scores: Mapping[str, Sequence[float]], running: Collection[str]) -> list[str]:
        """The names in ``running`` to end at ``epoch``."""
        best = {name: max(values) for name, values in scores.items() if values}
        if epoch < self.warmup or len(best) <= self.least:
            return []
        rivals = {name: [score for rival, score in best.items() if rival != name] for name in running}
        return [name for name in running if name in best and best[name] < median(rivals[name])]


def policy_for(prune: Any) -> Policy | None:
    """The policy of ``prune=``: None, ``"median"``, or a user's policy."""
    if prune is None or prune is False:
        return None
    if prune == "median":
        return MedianPruner()
    if callable(prune):
        chosen: Policy = prune
        return chosen
    raise SpecError(
        f"prune={prune!r} must be 'median' or a callable (epoch, scores, running) -> names, such as weft.MedianPruner()"
    )


def every(policy: Policy) -> int:
    """Epochs between two questions to ``policy``."""
    return int(getattr(policy, "every", EVERY))
