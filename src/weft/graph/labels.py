"""Check labels and splits of nodes.

Labels are class numbers, a 0/1 matrix if a node may have several classes, or numbers to predict. Splits are sorted,
disjoint vectors of node ids.

Shapes: ``[N]`` int64, ``[N, C]`` float32, or ``[N]`` or ``[N, D]`` float32 (regression).
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.check import (
    INTEGERS,
    all_between,
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
    """A mask ``[N]``, boolean or of zeros and ones, or node ids in any order -> sorted int64 ids; None -> no nodes."""
    if value is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    vector = as_vector(value, name)
    if vector.dtype in INTEGERS and vector.numel() == num_nodes > 2 and all_between(vector, 0, 1):
        vector = vector.bool()  # three ids of nodes 0 and 1 would list one of them twice
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


SPLIT_KINDS = ("random", "stratified", "per_class")


def shuffled_rows(total: int, seed: int, classes: Tensor | None) -> Tensor:
    """Positions ``[total]`` shuffled by ``seed``; with ``classes [total]`` then sorted by class.

    Shuffled on the CPU whatever the device, so that a seed means the same split everywhere.
    """
    if not isinstance(seed, Integral) or abs(seed) >= 2**63:
        raise GraphError(f"seed={seed!r}: must be a whole number, below 2**63")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(int(seed)))
    return order if classes is None else order[torch.sort(classes[order], stable=True).indices]


def random_split(
    nodes: Tensor, train: float, val: float, test: float | None, seed: int, kind: str, classes: Tensor | None
) -> tuple[Tensor, ...]:
    """The nodes ``[M]`` shuffled by ``seed`` and cut into train, validation and test ids, each sorted.

    An integer is a number of nodes, a float a share of them; ``test=None`` takes all that remain. ``classes [M]``, on
    the CPU, for ``kind="stratified"`` (every part has the classes in the same shares) and ``"per_class"`` (``train``
    nodes of every class).
    """
    if kind == "per_class" and classes is not None:
        if isinstance(train, bool) or not isinstance(train, Integral) or train < 1:
            raise GraphError(f"train={train!r}: give the number of training nodes per class, at least 1")
        order = shuffled_rows(nodes.numel(), seed, classes)
        rank, count = _rank_in_class(classes[order])
        few = (count < train).nonzero()
        if few.numel():
            worst = classes[order][few[0]]
            raise GraphError(
                f"class {int(worst)} has {int(count[few[0]])} labelled nodes, fewer than train={train} per class; "
                "lower train"
            )
        chosen = torch.zeros(nodes.numel(), dtype=torch.bool)
        chosen[order[rank < train]] = True
        chosen = chosen.to(nodes.device)
        return nodes[chosen], *random_split(nodes[~chosen], 0, val, test, seed, "random", None)[1:]
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
    order = shuffled_rows(total, seed, classes)
    if classes is not None:  # by the place of a node in its class: any stretch of that order has all classes alike
        rank, count = _rank_in_class(classes[order])
        order = order[torch.sort((rank + 0.5) / count, stable=True).indices]
    parts = torch.split(order[: sum(sizes)], sizes)
    for name, part in zip(SPLITS, parts, strict=True):
        if classes is not None and part.numel():
            lacking = classes[~torch.isin(classes, classes[part])]
            if lacking.numel():
                raise GraphError(
                    f"class {int(lacking[0])} has {int((classes == lacking[0]).sum())} labelled nodes, too few for one "
                    f"of them in {name}; change the sizes, or take kind='random'"
                )
    return tuple(nodes[part.sort().values.to(nodes.device)] for part in parts)


def fold_splits(nodes: Tensor, folds: int, seed: int, classes: Tensor | None) -> list[Split]:
    """One split per fold of the nodes ``[M]``: that fold to test on, the next to validate on, the rest to train on.

    With ``classes [M]``, on the CPU, every fold has the classes in the same shares.
    """
    if isinstance(folds, bool) or not isinstance(folds, Integral) or not 3 <= folds <= nodes.numel():
        raise GraphError(
            f"folds={folds!r}: give a whole number from 3 (to train, validate and test on) to {nodes.numel()}, the "
            "number of labelled nodes"
        )
    if classes is not None:
        values, counts = classes.unique(return_counts=True)
        if int(counts.min()) < folds:
            few = int(counts.argmin())
            raise GraphError(
                f"class {int(values[few])} has {int(counts[few])} labelled nodes, fewer than {folds} folds; take fewer "
                "folds, or stratified=False"
            )
    fold = torch.empty(nodes.numel(), dtype=torch.int64)
    fold[shuffled_rows(nodes.numel(), seed, classes)] = torch.arange(nodes.numel()) % folds
    fold = fold.to(nodes.device)
    splits = []
    for number in range(folds):
        test, val = fold == number, fold == (number + 1) % folds
        splits.append(Split(nodes[~(test | val)], nodes[val], nodes[test]))
    return splits


def _rank_in_class(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Of sorted class numbers, the position of every entry among those of its class, and how many there are."""
    counts = torch.bincount(classes)
    begins = counts.cumsum(0) - counts
    return torch.arange(classes.numel()) - begins[classes], counts[classes]
