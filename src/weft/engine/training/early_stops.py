"""EarlyStops: who is to stop before their last epoch, by a pruning policy or because somebody asked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.compatibility import graph_key
from weft.core.errors import SpecError
from weft.engine.base.cancel import Cancel
from weft.engine.training.member_progress import MemberProgress
from weft.planner.pruning import Policy, every


@dataclass
class EarlyStops:
    """Decides at looks. ``board`` has the tracks of all members that have begun, in whichever group.

    A policy is asked after fixed epochs, so that what it decides does not depend on when the host happens to look.
    """

    policy: Policy | None = None
    cancel: Cancel | None = None
    board: dict[str, MemberProgress] = field(default_factory=dict)

    def until_next(self, epoch: int) -> int | None:
        """Epochs from ``epoch`` to the next question to the policy; None where there is none."""
        if self.policy is None:
            return None
        step = every(self.policy)
        return step - epoch % step

    def decide(self, epoch: int, tracks: Sequence[MemberProgress]) -> list[MemberProgress]:
        """Stop those of ``tracks`` that are to stop, and return them."""
        running = {track.name: track for track in tracks if track.running}
        stopped = []
        for name in self.cancel.wanted(running) if self.cancel is not None else ():
            running[name].stop("cancelled", f"task {name!r}: cancelled after epoch {running[name].epoch}")
            stopped.append(running[name])
        for name in self._pruned(epoch, running):
            if running[name].running:
                running[name].stop("pruned", f"task {name!r}: pruned after epoch {epoch}")
                stopped.append(running[name])
        return stopped

    def _pruned(self, epoch: int, running: dict[str, MemberProgress]) -> list[str]:
        if self.policy is None or epoch % every(self.policy) or not running:
            return []
        one = next(iter(running.values()))
        scores = {name: track.scores(epoch) for name, track in self.board.items() if _comparable(track, one)}
        return _checked(self.policy(epoch, scores, list(running)), running)


def _comparable(one: MemberProgress, other: MemberProgress) -> bool:
    """Whether scores of two members say which is better: they are the same measure on the same graph."""
    return one.watched == other.watched and graph_key(one.task) == graph_key(other.task)


def _checked(answer: Any, running: Collection[str]) -> list[str]:
    """The names that a policy answered; None is nobody."""
    if answer is not None and (isinstance(answer, str) or not isinstance(answer, Iterable)):
        raise SpecError(f"prune returned {answer!r}; expected a list of names of running members")
    names = list(answer or ())
    unknown = [name for name in names if name not in running]
    if unknown:
        raise SpecError(f"prune returned {unknown[0]!r}; expected names of running members: {', '.join(running)}")
    return names
