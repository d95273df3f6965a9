"""What a model returns: logits alone, logits with an auxiliary loss, or anything that a user's own objective takes.

Shapes: T members, N nodes, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.core.errors import SpecError


def with_member(output: Any) -> Any:
    """What one member's model returned, with a leading dimension of one member."""
    return output[None] if isinstance(output, Tensor) else pytree.tree_map_only(Tensor, lambda one: one[None], output)


def of_member(output: Any, row: int) -> Any:
    """One member's part of what a stack returned, floating-point numbers in float32."""
    return pytree.tree_map_only(Tensor, lambda one: _wide(one[row]), output)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def members_of(output: Any) -> int:
    """T: how many members ``output`` has a leading row for."""
    return next(one.shape[0] for one in pytree.tree_leaves(output) if isinstance(one, Tensor))


def logits_and_extra(output: Any, label: str = "") -> tuple[Tensor, Tensor | None]:
    """Logits ``[T, N, C]`` and the auxiliary loss ``[T]`` of ``(logits, loss)``, None without one."""
    if isinstance(output, Tensor):
        return output, None
    pair = isinstance(output, (tuple, list)) and len(output) == 2 and all(isinstance(one, Tensor) for one in output)
    if not pair or output[1].dim() != output[0].dim() - 2:
        raise SpecError(not_logits(output, label))
    return output[0], output[1].float()


def not_logits(output: Any, label: str) -> str:
    """The complaint about an output that only a user's own objective could read."""
    start = f"task {label!r}: " if label else ""
    return (
        f"{start}the model returned {kind_of(output)}; expected logits, or (logits, loss) with an auxiliary loss of no "
        "dimensions; for anything else give objective= and metric= functions that read it"
    )


def kind_of(output: Any) -> str:
    """An output in words: ``tuple(tensor [5, 3], tensor [5, 3])``."""
    if isinstance(output, Tensor):
        return f"tensor {list(output.shape)}"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__}({', '.join(map(kind_of, output))})"
    return type(output).__name__


def first_tensor(output: Any) -> Tensor | None:
    """The logits among whatever a model returned, for a metric by name: the output, or the first of several."""
    if isinstance(output, Tensor):
        return output
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    return first if isinstance(first, Tensor) else None


def as_one(output: Any) -> Tensor:
    """All numbers of an output in one tensor, to compare it with another."""
    if isinstance(output, Tensor):
        return output
    found = [one.reshape(-1) for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
    real = [torch.view_as_real(one).reshape(-1) if one.is_complex() else one for one in found]
    return torch.cat([one.float() for one in real]) if real else torch.zeros(0)
