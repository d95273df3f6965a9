"""What a training loop keeps in the state besides weights and moments, before the first epoch.

Shapes: T members, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.compatibility import loop_parts
from weft.core.task import Task
from weft.runtime.loop import plateau


def initial_extras(tasks: Sequence[Task], flat: Tensor) -> dict[str, Tensor]:
    """Averaged weights, gradients so far, factors of the rates, by what the tasks have; ``flat [T, P]``: weights."""
    parts, device = loop_parts(tasks[0]), flat.device
    found: dict[str, Tensor] = {}
    if "ema" in parts:
        found["ema"] = flat.clone()
    if "accumulate" in parts:
        found["gradient"] = torch.zeros_like(flat)
    if "plateau" in parts or "callbacks" in parts:
        found[plateau.RATE] = torch.ones(len(tasks), dtype=torch.float64, device=device)
    return found | (plateau.initial(tasks, device) if "plateau" in parts else {})
