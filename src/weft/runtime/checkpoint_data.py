"""A checkpoint as data: tensors on the CPU, and what they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A training state on the CPU, and what it belongs to.

    ``about``: task (as plain data), epoch, seconds trained so far, whether it is finished, Weft's version.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]
