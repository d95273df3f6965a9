"""Several operators in one call, as a woven step makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.weave.merged_launch import OpCall, count_results, flatten


def merged_call(calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """The results of every call."""
    out = iter(torch.ops.weft.merged_call(*flatten(calls)))
    return [tuple(next(out) for _ in range(count_results(call.name))) for call in calls]
