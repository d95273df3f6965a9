"""From when on a group pays beside those that run: once it has started, the device should be about to be free.

A start is work of the host and leaves the device idle; two trainings that each fill the device only slow each other
down. So the next one starts while the one before still trains, as late as its start allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.sched.interference import Interference, Load

GAIN = 1.02  # sharing must raise the throughput by this factor; estimates are not exact enough to act on less
TOLERATED = 0.5  # of its start: as long may a group train beside others that leave it no room
SHORT = 2.0  # a group is short if it delays others by less than its wait would be over this
LATE = 0.3  # a group that should have ended takes so much longer again as it is late
MOMENT = 1e-6


@dataclass(frozen=True)
class Training:
    """The time in which a group keeps the device busy: from its start's end to its own, with a share ``asks``."""

    begins: float
    ends: float
    asks: Load

    @classmethod
    def of(cls, started: float, seconds: float, start_seconds: float, demand: float, turn: float = 0.0) -> Training:
        """Of a group that is started at ``started`` and takes ``seconds``, with a mean ``demand`` over all of them."""
        training = seconds - start_seconds
        asks = demand * seconds / training if training > 0 else demand
        return cls(started + start_seconds, started + seconds, Load(asks, turn))

    def until(self, now: float) -> float:
        """When it is expected to end, now that it runs still."""
        return max(self.ends, now + LATE * (now - self.ends))


def pays_from(group: Training, others: Sequence[Training], now: float, model: Interference) -> float:
    """From when on it pays to start ``group``, were it to start ``now``; ``now`` if it does already."""
    beside = [(one, _together(group, one, now)) for one in others]
    beside = [(one, seconds) for one, seconds in beside if seconds > 0]
    asked, start_seconds = [one.asks for one, _ in beside], group.begins - now
    if model.throughput([*asked, group.asks]) >= GAIN * model.throughput(asked):
        return now
    if sum(seconds for _, seconds in beside) <= TOLERATED * start_seconds:
        return now
    wait = min(one.until(now) for one, _ in beside) - start_seconds - now
    delayed = (group.ends - group.begins) * group.asks.demand * len(others)
    return now if SHORT * delayed < wait or wait < MOMENT else now + wait


def _together(group: Training, other: Training, now: float) -> float:
    """Seconds for which both would train."""
    return min(group.ends, other.until(now)) - max(group.begins, other.begins)
