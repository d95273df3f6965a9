"""Labels: class numbers ``[N]`` int64, or a 0/1 matrix ``[N, C]`` float32 when a node may have several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.arrays import INTEGERS, as_tensor, dtype_name
from weft.graph.data.validate import check_labels, first_where


def as_labels(y: Any) -> Tensor | None:
    """Integers ``[N]`` or ``[N, 1]`` are class numbers, anything ``[N, C]`` is several labels per node."""
    if y is None:
        return None
    labels = as_tensor(y, "y")
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() not in (1, 2):
        raise GraphError(f"y has shape {list(labels.shape)}; give class numbers [N] or a 0/1 matrix [N, C]")
    labels = labels.to(torch.float32) if labels.dim() == 2 else _class_numbers(labels)
    check_labels(labels)
    return labels


def _class_numbers(labels: Tensor) -> Tensor:
    if labels.dtype in INTEGERS or labels.dtype == torch.bool:
        return labels.to(torch.int64)
    bad = first_where(labels, lambda part: part != part.floor())
    position = bad or 0
    value = labels[position].item() if labels.numel() else "none"
    raise GraphError(
        f"y[{position}] = {value} is of type {dtype_name(labels.dtype)}: labels are class numbers; "
        f"convert them to integers, with -1 for nodes without a label"
    )


def count_classes(y: Tensor | None) -> int:
    """C: columns of a label matrix, or one more than the largest class number."""
    if y is None:
        return 0
    if y.dim() == 2:
        return y.shape[1]
    return int(y.max()) + 1 if y.numel() else 0


def check_num_classes(y: Tensor | None, num_classes: int | None) -> None:
    """A stated number of classes holds all that occur."""
    if num_classes is not None and count_classes(y) > num_classes:
        raise GraphError(f"num_classes={num_classes} but y speaks of {count_classes(y)}; give at least that many")
