"""How reads inside of steps and copies share the bus, from whole steps and copies that ran beside each other.

A step beside copies takes longer by its training, as measured by itself, and by its reads. In the rest of a step copies
go on as beside training, so what a copy took on average says how slowly it goes on during the reads:

    copy alone / copy = during / slower + (1 - during) / beside training,    during = reads / step
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SLOWER = 10.0  # times as long as alone that copies are taken to take beside reads: they may not go on at all


@dataclass(frozen=True)
class SharedBus:
    """Seconds of a step, of its reads and its training, and of a copy, each alone.

    ``training_slower``: times as long as alone that training takes beside copies; ``copy_slower``: copies beside it.
    """

    step: float
    reads: float
    training: float
    copy: float
    training_slower: float = 1.0
    copy_slower: float = 1.0

    def factors(self, step: float, copy: float) -> tuple[float, float]:
        """How many times as long reads take beside copies, and copies beside reads: from both beside each other."""
        if not min(self.reads, self.copy, step, copy) > 0:
            return 1.0, 1.0
        rest = self.step - self.reads + self.training * (self.training_slower - 1.0)
        reads = max(step - rest, self.reads)
        during = min(reads / step, 1.0)
        pace = self.copy / copy - (1.0 - during) / self.copy_slower
        slower = MOST_SLOWER if pace * MOST_SLOWER <= during else max(during / pace, 1.0)
        return reads / self.reads, slower
