"""Spread: arrays whose rows lie with the ranks that own them, read at any ids.

Ranks of one host read peers' memory, without waiting for each other; between machines they request rows of their owners
through torch.distributed, and then all ranks have to read at the same time.

Shapes: N rows of all ranks, n rows of this one, M ids requested here, A ids that other ranks request of this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from weft.dist.ranks import Ranks
from weft.ops.launch.backend import use_triton
from weft.ops.sampling.sample_triton import CachedLists, spread_lists
from weft.ops.sharded.pieces_triton import copy_rows_triton
from weft.ops.sharded.sharded_spmm import address_table


class Spread:
    """``part [n, ...]``: this rank's rows of an array ``[N, ...]``; ``bounds``: where those of the ranks begin and end.

    All ranks make one together. ``here``: this rank's rows, in the memory that peers read if there is such memory.
    """

    def __init__(self, part: Tensor, bounds: Sequence[int], ranks: Ranks) -> None:
        self._ranks, self._bounds, self._parts = ranks, tuple(bounds), ranks.spread(part)
        self.here = part if self._parts is None else self._parts[ranks.rank]
        self._lows, self._ends = torch.tensor([self._bounds[:-1], self._bounds[1:]], device=part.device)
        low, high = self._bounds[ranks.rank : ranks.rank + 2]
        self._some = low if high > low else 0  # an id that exists, of this rank if it has any

    @cached_property
    def in_reach(self) -> bool:
        """Whether kernels on this rank's GPU read the rows of all ranks by their addresses."""
        parts = self._parts
        return parts is not None and use_triton(self.here) and all(p.device == self.here.device for p in parts)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        assert self._parts is not None
        return address_table([part.view(part.shape[0], self._width) for part in self._parts], self.here.device)

    @property
    def _width(self) -> int:
        return math.prod(self.here.shape[1:])

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Rows ``[M, ...]`` of the ids ``[M]``, in their order."""
        return self.rows(ids)

    def rows(self, ids: Tensor, count: Tensor | None = None) -> Tensor:
        """The same; with ``count [1]`` only the first so many ids exist, and the rows of the others mean nothing."""
        if self._parts is None:
            assert count is None, "requests to owners are of ids that exist"
            return Route(ids, self._bounds, self._ranks).rows(self.here)
        ids = ids.long()
        if count is not None:
            ids = torch.where(torch.arange(ids.numel(), device=ids.device) < count, ids, self._some)
        owner = torch.searchsorted(self._ends, ids, right=True)
        row = ids - self._lows[owner]
        if self.in_reach:
            out = self.here.new_empty(1, ids.numel(), self._width)
            copy_rows_triton(out, *self._table, owner, row, 0, ids.numel())
            return out.view(ids.numel(), *self.here.shape[1:])
        out = self.here.new_empty(ids.numel(), *self.here.shape[1:])
        for rank, part in enumerate(self._parts):  # which may lie on another GPU
            at = (owner == rank).nonzero().squeeze(1)
            out[at] = part.index_select(0, row[at].to(part.device)).to(out.device)
        return out

    def lists(self, indptr: Tensor) -> CachedLists:
        """The array as the lists between ``indptr``, for kernels: all of them are in reach."""
        assert self._parts is not None
        return spread_lists(self._parts, self._bounds, indptr)


# ---- Routes: requests to the owners of rows. All ranks request at the same time, each its own ids; ranks without any
# request none.


class Route:
    """The way of the global ``ids [M]`` to the ranks that own them; ``bounds``: ids of the ranks."""

    def __init__(self, ids: Tensor, bounds: Sequence[int], ranks: Ranks) -> None:
        self._ranks, self._device = ranks, ids.device
        ids = ids.long().cpu()
        owner = torch.searchsorted(torch.tensor(bounds[1:]), ids, right=True)
        self._order = torch.sort(owner, stable=True).indices
        self._requests = torch.bincount(owner, minlength=ranks.ranks).tolist()
        counts = exchange(torch.tensor(self._requests), [1] * ranks.ranks, [1] * ranks.ranks, ranks)
        self._requested = counts.tolist()
        remote = exchange(ids[self._order], self._requests, self._requested, ranks)
        self.requested = remote - bounds[ranks.rank]  # rows of this rank that other ranks request [A]

    def rows(self, table: Tensor) -> Tensor:
        """Rows ``[M, F]`` (or numbers ``[M]``) of what every rank has as ``table [n, F]``, in the order of the ids."""
        requested = table.index_select(0, self.requested.to(table.device)).cpu()
        received = exchange(requested, self._requested, self._requests, self._ranks)
        out = torch.empty_like(received)
        out[self._order] = received
        return out.to(self._device)


def exchange(values: Tensor, give: Sequence[int], get: Sequence[int], ranks: Ranks) -> Tensor:
    """Send ``give[q]`` rows of ``values`` to rank q, in order; what the others send here, ``get[q]`` rows of each."""
    received = values.new_empty((sum(get), *values.shape[1:]))
    with ranks.losses_named():
        dist.all_to_all_single(received, values.contiguous(), list(get), list(give))
    return received
