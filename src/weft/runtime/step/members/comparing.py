"""How far numbers are apart that should be equal, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

NEAR = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: a stack adds up in another order
EQUAL = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: the same layer by other operators
REPEATED = 1e-5  # of the largest: sums on a GPU may be added up in another order each time
LEAST, TINY = 1e-3, 1e-30


def differ(twice: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether pairs of numbers that were computed alike are not the same."""
    return any(not apart(again, first) <= REPEATED for first, again in twice)


def apart(mine: Tensor, true: Tensor, whole: Tensor | None = None, least: float = LEAST) -> float:
    """The largest difference relative to the largest of ``true``, or to ``least`` of the ``whole`` it is part of.

    It is infinite unless the same numbers are finite.
    """
    finite = true.isfinite()
    if not bool((mine.isfinite() == finite).all()):
        return inf
    largest = max(_largest(true), least * _largest(true if whole is None else whole), TINY)
    return _largest((mine - true).where(finite, torch.zeros((), dtype=true.dtype, device=true.device))) / largest


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0
