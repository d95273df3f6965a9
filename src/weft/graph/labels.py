"""Check labels and splits of nodes.

Labels are class numbers, a 0/1 matrix if a node may have several classes, or numbers to predict. Splits are sorted,
disjoint vectors of node ids.

Shapes: ``[N]`` int64, ``[N, C]`` float32, or ``[N]`` or ``[N, D]`` float32 (regression).
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.check import (
    INTEGERS,
    as_ids,
    as_tensor,
    as_vector,
    check_labels,
    check_range,
    dtype_name,
    first_where,
    position_in,
)


def as_labels(y: Any) -> Tensor | None:
    """Integers ``[N]`` or ``[N, 1]`` are class numbers, zeros and ones ``[N, C]`` are several labels per node.

    Numbers ``[N]`` or ``[N, D]`` of which some have a fraction, and a column ``[N, 1]`` of float numbers, are to be
    predicted. NaN marks a node without one.
    """
    if y is None:
        return None
    labels = as_tensor(y, "y")
    if _is_targets(labels):
        labels = (labels if labels.dim() == 2 and labels.shape[1] > 1 else labels.reshape(-1)).to(torch.float32)
        bad = first_where(labels, torch.isinf)
        if bad is not None:
            raise GraphError(
                f"y{position_in(labels.shape, bad)} is {labels.reshape(-1)[bad].item()}: numbers to predict are "
                "finite, NaN marks a node without one"
            )
        return labels
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() not in (1, 2):
        raise GraphError(
            f"y has shape {list(labels.shape)}; give class numbers [N], a 0/1 matrix [N, C] or numbers to predict "
            "[N, D]"
        )
    if labels.dim() == 2:
        labels = labels.to(torch.float32)
    elif labels.dtype in INTEGERS or labels.dtype == torch.bool:
        labels = labels.to(torch.int64)
    else:
        position = first_where(labels, lambda part: part != part.floor()) or 0
        value = labels[position].item() if labels.numel() else "none"
        raise GraphError(
            f"y[{position}] = {value} is of type {dtype_name(labels.dtype)}: labels are class numbers; convert them to "
            "integers, with -1 for nodes without a label, or give numbers to predict as a column [N, 1]"
        )
    check_labels(labels)
    return labels


def _is_targets(labels: Tensor) -> bool:
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
    if num_classes is None:
        return
    if y is not None and y.is_floating_point() and count_classes(y) != num_classes:
        raise GraphError(f"num_classes={num_classes} but y has {count_classes(y)} numbers per node; leave it out")
    if count_classes(y) > num_classes:
        raise GraphError(f"num_classes={num_classes} but y has {count_classes(y)} classes; give at least that many")


SPLITS = ("train", "val", "test")


class Split(NamedTuple):
    """Sorted int64 node ids of the three parts of one split."""

    train: Tensor
    val: Tensor
    test: Tensor


def columns_of(train: Any, val: Any, test: Any) -> list[tuple[Any, Any, Any]] | None:
    """One ``(train, val, test)`` per column of masks ``[N, S]``; None if no mask has several columns.

    A part that is given once, as ids or as a mask ``[N]``, is the same in all splits.
    """
    parts = dict(zip(SPLITS, (train, val, test), strict=True))
    counts = {
        name: part.shape[1]
        for name, part in parts.items()
        if getattr(part, "ndim", 0) == 2 and str(part.dtype).rpartition(".")[2] == "bool"
    }
    if not counts:
        return None
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise GraphError(f"the masks have different numbers of columns ({sizes}); give one column per split to each")
    columns = range(next(iter(counts.values())))
    return [tuple(part[:, c] if name in counts else part for name, part in parts.items()) for c in columns]


def as_split(value: Any, num_nodes: int, name: str, device: torch.device) -> Tensor:
    """A boolean mask ``[N]`` or node ids in any order -> sorted int64 ids; None -> no nodes."""
    if value is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    vector = as_vector(value, name)
    if vector.dtype == torch.bool:
        if vector.numel() != num_nodes:
            raise GraphError(f"the {name} mask has {vector.numel()} entries but the graph has {num_nodes} nodes")
        return vector.to(device).nonzero().squeeze(1)
    ids = as_ids(vector, name).to(device=device, dtype=torch.int64)
    check_range(ids, num_nodes, name)
    ids = ids.sort().values
    twice = (ids[1:] == ids[:-1]).nonzero()
    if twice.numel():
        raise GraphError(f"node {int(ids[twice[0]])} is listed twice in the {name} split; list each node once")
    return ids


def random_split(nodes: Tensor, train: float, val: float, test: float | None, seed: int) -> tuple[Tensor, ...]:
    """The nodes ``[M]`` shuffled by ``seed`` and cut into train, validation and test ids, each sorted.

    An integer is a number of nodes, a float a share of them; ``test=None`` takes all that remain.
    """
    total, sizes = nodes.numel(), []
    for name, share in (("train", train), ("val", val), ("test", test)):
        if name == "test" and share is None:
            sizes.append(total - sum(sizes))
            continue
        number = isinstance(share, Real) and not isinstance(share, bool)
        if not number or share < 0 or (isinstance(share, float) and share > 1):
            raise GraphError(f"{name}={share!r}: give a number of nodes, or a share between 0.0 and 1.0")
        sizes.append(round(share * total) if isinstance(share, float) else int(share))
    if sum(sizes) > total or min(sizes) < 0:
        raise GraphError(
            f"train={train}, val={val}, test={test} are more nodes than the {total} labelled ones; lower them"
        )
    # Shuffled on the CPU whatever the device, so that a seed means the same split everywhere.
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    parts = torch.split(shuffled[: sum(sizes)], sizes)
    return tuple(nodes[part.sort().values.to(nodes.device)] for part in parts)
