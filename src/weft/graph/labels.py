"""Labels of nodes: class numbers, a 0/1 matrix if a node may have several classes, or numbers to predict.

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


# ---- Train, validation and test nodes: sorted, disjoint vectors of node ids

SPLITS = ("train", "val", "test")


class Split(NamedTuple):
    """Sorted int64 node ids of the three parts of one split."""

    train: Tensor
    val: Tensor
    test: Tensor


class _Columns(list[Any]):
    """The columns of a mask ``[N, S]``."""


def columns_of(train: Any, val: Any, test: Any) -> list[tuple[Any, Any, Any]] | None:
    """One ``(train, val, test)`` per column of masks ``[N, S]``; None if no mask has several columns.

    A part that is given once, as ids or as a mask ``[N]``, is the same in all splits.
    """
    given = [None if part is None else _as_columns(part) for part in (train, val, test)]
    counts = {len(part) for part in given if isinstance(part, _Columns)}
    if not counts:
        return None
    if len(counts) > 1:
        sizes = {name: len(part) for name, part in zip(SPLITS, given, strict=True) if isinstance(part, _Columns)}
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise GraphError(f"the masks have different numbers of columns ({shown}); give one column per split to each")
    return [tuple(part[c] if isinstance(part, _Columns) else part for part in given) for c in range(counts.pop())]


def _as_columns(part: Any) -> Any:
    """A mask ``[N, S]`` as a list of its columns; anything else as it is."""
    if getattr(part, "ndim", 0) != 2 or str(part.dtype).rpartition(".")[2] != "bool":
        return part
    return _Columns(part[:, column] for column in range(part.shape[1]))


def as_split(value: Any, num_nodes: int, name: str, device: torch.device) -> Tensor:
    """A boolean mask ``[N]`` or node ids in any order -> sorted int64 ids; None -> no nodes."""
    if value is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    given = as_vector(value, name)
    if given.dtype == torch.bool:
        if given.numel() != num_nodes:
            raise GraphError(f"the {name} mask has {given.numel()} entries but the graph has {num_nodes} nodes")
        return given.to(device).nonzero().squeeze(1)
    ids = as_ids(given, name).to(device=device, dtype=torch.int64)
    check_range(ids, num_nodes, name)
    ids = ids.sort().values
    twice = (ids[1:] == ids[:-1]).nonzero()
    if twice.numel():
        raise GraphError(f"node {int(ids[twice[0]])} is listed twice in the {name} split; list each node once")
    return ids


def check_disjoint(train: Tensor, val: Tensor, test: Tensor) -> None:
    """No node is in two splits."""
    named = dict(zip(SPLITS, (train, val, test), strict=True))
    for first, second in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = named[first][torch.isin(named[first], named[second])]
        if shared.numel():
            raise GraphError(
                f"node {int(shared[0])} is in both the {first} and the {second} split "
                f"({shared.numel()} shared nodes); a node may be in one split only"
            )


def random_split(nodes: Tensor, train: float, val: float, test: float | None, seed: int) -> tuple[Tensor, ...]:
    """The nodes ``[M]`` shuffled by ``seed`` and cut into train, validation and test ids, each sorted.

    An integer is a number of nodes, a float a share of them; ``test=None`` takes all that remain.
    """
    total = nodes.numel()
    sizes = [_size(train, total, "train"), _size(val, total, "val")]
    sizes.append(total - sum(sizes) if test is None else _size(test, total, "test"))
    if sum(sizes) > total or min(sizes) < 0:
        raise GraphError(
            f"train={train}, val={val}, test={test} are more nodes than the {total} labelled ones; lower them"
        )
    # Shuffled on the CPU whatever the device, so that a seed means the same split everywhere.
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    parts = torch.split(shuffled[: sum(sizes)], sizes)
    return tuple(nodes[part.sort().values.to(nodes.device)] for part in parts)


def _size(wanted: float, total: int, name: str) -> int:
    number = isinstance(wanted, Real) and not isinstance(wanted, bool)
    if not number or wanted < 0 or (isinstance(wanted, float) and wanted > 1):
        raise GraphError(f"{name}={wanted!r}: give a number of nodes, or a share between 0.0 and 1.0")
    return round(wanted * total) if isinstance(wanted, float) else int(wanted)
