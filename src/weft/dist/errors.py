"""What goes wrong between ranks."""

from __future__ import annotations

from weft.core.errors import TrainingError


class RankLostError(TrainingError):
    """A rank is gone, or did not arrive in time: the run cannot go on."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
