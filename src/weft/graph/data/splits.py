"""Train, validation and test nodes: sorted, disjoint vectors of node ids."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.arrays import as_ids, as_vector
from weft.graph.data.validate import check_range

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
