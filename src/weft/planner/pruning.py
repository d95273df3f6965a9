"""Pruning: decide which members of a sweep to stop early.

A policy is a callable ``policy(epoch, scores, running) -> names``. ``scores`` has the validation metric (higher is
better; of an error its negative) of every member that has begun on the same graph, one value per evaluated epoch
up to ``epoch``; members that ended earlier keep what they had. ``running`` are the names that may be returned. It is
called every ``policy.every`` epochs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.core.decision import Requests
from weft.core.errors import SpecError
from weft.core.member import Member

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


# ---- Members of one sweep that several processes train at once, as a queue does.

AGAIN_SECONDS = 1.0  # between two signs of life of a process that waits for others


@dataclass(frozen=True)
class Rival:
    """A member that another process trains or has trained: its best score by every so many epochs, and by its last."""

    peers: str
    bests: Sequence[float | None]
    running: bool


class Rivals:
    """Exchanges scores with other processes that train members of the same sweep; two threads call it.

    ``tell`` sends the scores of this process, ``requests`` are those to the run. A decision at an epoch compares scores
    at that epoch: it waits until all that run have come so far, whichever of them is faster.
    """

    def __init__(self, prune: Any, tell: Callable[[dict[str, Any]], None], requests: Callable[[], Requests]) -> None:
        self.policy = policy_for(prune)
        self._tell, self._requests, self._changed = tell, requests, threading.Condition()
        self._others: dict[str, Rival] = {}
        self._own: list[Member] = []

    def take(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Learn how others stand, by name."""
        with self._changed:
            self._others |= {name: Rival(**facts) for name, facts in members.items()}
            self._changed.notify_all()

    def standing(self) -> dict[str, Any]:
        """The scores of the members of this process, for the others."""
        step = every(self.policy) if self.policy else EVERY
        return {
            member.name: {
                "peers": member.peers,
                "bests": [max(member.scores(end), default=None) for end in range(step, member.epoch + step, step)],
            }
            for member in self._own
        }

    def at(self, epoch: int, own: Iterable[Member], peers: str) -> dict[str, list[float]] | None:
        """Scores of the others up to ``epoch``, once all that run have come so far; None if the run is to leave."""
        self._own = list(own)
        count = epoch // (every(self.policy) if self.policy else EVERY)
        self._tell(self.standing())
        with self._changed:
            while any(rival.running and len(rival.bests) < count for rival in self._others.values()):
                asked = self._requests()
                all_cancelled = all(asked.cancelled(member.name) for member in self._own if member.running)
                if asked.interrupt or asked.preempt or asked.pause or all_cancelled:
                    return None
                if not self._changed.wait(AGAIN_SECONDS):
                    self._tell(self.standing())
        rivals = {name: rival for name, rival in self._others.items() if rival.peers == peers}
        return {name: [best for best in one.bests[:count] if best is not None] for name, one in rivals.items()}
