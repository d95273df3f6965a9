"""Repacking: when members that have ended are worth taking out of their group's step."""

from __future__ import annotations

GAIN = 1.5  # how far the time won must exceed the time spent: both are estimates


def pays_to_leave(ended: int, members: int, epochs_left: int, epoch_seconds: float, prepare_seconds: float) -> bool:
    """Whether to take ``ended`` of ``members`` out of a step with ``epochs_left`` epochs of ``epoch_seconds`` to go.

    What an epoch costs is taken to be shared evenly; ``prepare_seconds`` is what laying out and recording the step
    anew takes.
    """
    if not 0 < ended < members:
        return False
    won = epochs_left * epoch_seconds * ended / members
    return won > GAIN * prepare_seconds
