"""Decide when members that have ended are taken out of a group's step.

Members leave at the boundary of a period: their rows are taken out and the step is rebuilt and captured again. That
costs about as much as preparing the first step, and saves their share of every remaining epoch. On a device that is
not full an epoch of eight members costs little more than one of four, so the share is learned from what epochs of
different sizes took.

Shapes: T members.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.plan import GAIN

LEAVE_EVERY = 16  # epochs between two moments to leave, where they must not depend on the speed of the machine


@dataclass(frozen=True)
class Pace:
    """Seconds of an epoch by the number of members, as measured: ``seen`` holds the latest of every size."""

    seen: tuple[tuple[int, float], ...] = ()

    def after(self, members: int, seconds: float) -> Pace:
        """The pace once an epoch of ``members`` has taken ``seconds``."""
        others = tuple(pair for pair in self.seen if pair[0] != members)
        return Pace((*others, (members, seconds)))

    def marginal(self, members: int) -> float:
        """What one member of ``members`` adds to an epoch: a slope through what was seen, else an even share.

        Never negative, and never more than the even share, which is all there is to win.
        """
        latest = dict(self.seen).get(members)
        if latest is None:
            return 0.0
        even = latest / max(members, 1)
        if len(self.seen) < 2:
            return even
        mean_size = sum(size for size, _ in self.seen) / len(self.seen)
        mean_seconds = sum(seconds for _, seconds in self.seen) / len(self.seen)
        spread = sum((size - mean_size) ** 2 for size, _ in self.seen)
        slope = sum((size - mean_size) * (seconds - mean_seconds) for size, seconds in self.seen) / spread
        return min(max(slope, 0.0), even)


def pays_to_leave(ended: int, members: int, epochs_left: int, pace: Pace, prepare_seconds: float) -> bool:
    """Whether to take ``ended`` of ``members`` out of a step that has ``epochs_left`` epochs to go.

    ``prepare_seconds`` is what rebuilding and capturing the step takes. A group without
    members is not repacked: it is over.
    """
    if not 0 < ended < members:
        return False
    return epochs_left * ended * pace.marginal(members) > GAIN * prepare_seconds
