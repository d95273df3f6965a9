"""Numbers for a module to keep: a result that reads those of another epoch is clearly different."""

from __future__ import annotations

from torch import Tensor


def far(h: Tensor) -> Tensor:
    """A row of numbers that differs much from epoch to epoch."""
    return (h.detach() * 40).sin().mean(0) * 3
