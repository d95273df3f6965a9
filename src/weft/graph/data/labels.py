"""Labels of nodes: class numbers, a 0/1 matrix if a node may have several classes, or numbers to predict.

Shapes: ``[N]`` int64, ``[N, C]`` float32, or ``[N]`` or ``[N, D]`` float32 (regression).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.arrays import INTEGERS, as_tensor, dtype_name
from weft.graph.data.validate import check_labels, first_where, position_in


def as_labels(y: Any) -> Tensor | None:
    """Integers ``[N]`` or ``[N, 1]`` are class numbers, zeros and ones ``[N, C]`` are several labels per node.

    Numbers ``[N]`` or ``[N, D]`` of which some have a fraction, and a column ``[N, 1]`` of float numbers, are to be
    predicted. NaN marks a node without one.
    """
    if y is None:
        return None
    labels = as_tensor(y, "y")
    if is_targets(labels):
        return _targets(labels)
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() not in (1, 2):
        raise GraphError(
            f"y has shape {list(labels.shape)}; give class numbers [N], a 0/1 matrix [N, C] or numbers to predict "
            "[N, D]"
        )
    labels = labels.to(torch.float32) if labels.dim() == 2 else _class_numbers(labels)
    check_labels(labels)
    return labels


def is_targets(labels: Tensor) -> bool:
    """Whether these are numbers to predict: float, and neither class numbers nor 0/1 labels in disguise."""
    if labels.dim() == 2 and labels.shape[1] > 1:
        return is_matrix_of_numbers(labels)
    column = labels.dim() == 2 and labels.shape[1] == 1
    if not labels.is_floating_point() or not (column or labels.dim() == 1) or not labels.numel():
        return False
    if column and first_where(labels, torch.isnan) is None:
        return True
    return first_where(labels, _has_fraction) is not None


def is_matrix_of_numbers(labels: Tensor) -> bool:
    """Whether a float matrix has a number with a fraction: a 2.0 among labels is a mistake, not a number to predict."""
    return labels.is_floating_point() and first_where(labels, _has_fraction) is not None


def _has_fraction(part: Tensor) -> Tensor:
    return part.isfinite() & (part != part.floor())


def _targets(labels: Tensor) -> Tensor:
    labels = (labels if labels.dim() == 2 and labels.shape[1] > 1 else labels.reshape(-1)).to(torch.float32)
    bad = first_where(labels, torch.isinf)
    if bad is not None:
        raise GraphError(
            f"y{position_in(labels.shape, bad)} is {labels.reshape(-1)[bad].item()}: numbers to predict are finite, "
            "NaN marks a node without one"
        )
    return labels


def _class_numbers(labels: Tensor) -> Tensor:
    if labels.dtype in INTEGERS or labels.dtype == torch.bool:
        return labels.to(torch.int64)
    bad = first_where(labels, lambda part: part != part.floor())
    position = bad or 0
    value = labels[position].item() if labels.numel() else "none"
    raise GraphError(
        f"y[{position}] = {value} is of type {dtype_name(labels.dtype)}: labels are class numbers; "
        f"convert them to integers, with -1 for nodes without a label, or give numbers to predict as a column [N, 1]"
    )


def count_classes(y: Tensor | None) -> int:
    """C: columns of a label matrix, numbers to predict per node, or one more than the largest class number."""
    if y is None:
        return 0
    if y.dim() == 2:
        return y.shape[1]
    if y.is_floating_point():
        return 1
    return int(y.max()) + 1 if y.numel() else 0


def check_num_classes(y: Tensor | None, num_classes: int | None) -> None:
    """A stated number of classes holds all that occur; of labels and numbers to predict it is how many there are."""
    if num_classes is not None and y is not None and y.is_floating_point() and count_classes(y) != num_classes:
        raise GraphError(f"num_classes={num_classes} but y has {count_classes(y)} numbers per node; leave it out")
    if num_classes is not None and count_classes(y) > num_classes:
        raise GraphError(f"num_classes={num_classes} but y has {count_classes(y)} classes; give at least that many")
