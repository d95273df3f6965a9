"""Spread: arrays whose rows lie with the ranks that own them, read at any ids.

Ranks of one host read peers' memory, without waiting for each other; between machines they request rows of their owners
through torch.distributed, and then all ranks have to read at the same time.

Shapes: N rows of all ranks, n rows of this one, M ids requested here, A rows that all ranks request of this one.
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
            return self._requested(ids)
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

    def _requested(self, ids: Tensor) -> Tensor:
        """Rows ``[M, ...]`` from their owners; all ranks request at the same time, some of them perhaps none."""
        ranks, device, ids = self._ranks, ids.device, ids.long().cpu()
        owner = torch.searchsorted(torch.tensor(self._bounds[1:]), ids, right=True)
        order = torch.sort(owner, stable=True).indices
        requests = torch.bincount(owner, minlength=ranks.ranks).tolist()
        requested = exchange(torch.tensor(requests), [1] * ranks.ranks, [1] * ranks.ranks, ranks).tolist()
        rows = exchange(ids[order], requests, requested, ranks) - self._bounds[ranks.rank]  # of this rank [A]
        received = exchange(self.here.index_select(0, rows.to(self.here.device)).cpu(), requested, requests, ranks)
        out = torch.empty_like(received)
        out[order] = received
        return out.to(device)

    def lists(self, indptr: Tensor) -> CachedLists:
        """The array as the lists between ``indptr``, for kernels: all of them are in reach."""
        assert self._parts is not None
        return spread_lists(self._parts, self._bounds, indptr)


def exchange(values: Tensor, give: Sequence[int], get: Sequence[int], ranks: Ranks) -> Tensor:
    """Send ``give[q]`` rows of ``values`` to rank q, in order; what the others send here, ``get[q]`` rows of each."""
    received = values.new_empty((sum(get), *values.shape[1:]))
    with ranks.losses_named():
        dist.all_to_all_single(received, values.contiguous(), list(get), list(give))
    return received
