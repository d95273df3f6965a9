"""Routes: ask the ranks that own nodes for something about them, through torch.distributed, also between machines.

All ranks ask at the same time, each for its own ids; ranks without any ask for none. One route serves several
questions about the same ids.

Shapes: M ids asked for here, A ids that others ask this rank for, n nodes of this rank, F numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.dist.ranks import Ranks
from weft.ops.sampling.hop import HopSample


class Route:
    """The way of the global ``ids [M]`` to the ranks that own them; ``bounds``: node ranges of the ranks."""

    def __init__(self, ids: Tensor, bounds: Sequence[int], ranks: Ranks) -> None:
        self._ranks = ranks
        ids = ids.long()
        owner = torch.searchsorted(torch.tensor(bounds[1:]), ids, right=True)
        self._order = torch.sort(owner, stable=True).indices
        self._ask = torch.bincount(owner, minlength=ranks.ranks).tolist()
        counts = exchange(torch.tensor(self._ask), [1] * ranks.ranks, [1] * ranks.ranks, ranks)
        self._asked = counts.tolist()
        asked = exchange(ids[self._order], self._ask, self._asked, ranks)
        self.asked = asked - bounds[ranks.rank]  # rows of this rank that others want [A]

    def rows(self, table: Tensor) -> Tensor:
        """Rows ``[M, F]`` (or numbers ``[M]``) of what every rank has as ``table [n, F]``, in the order of the ids."""
        found = exchange(table.index_select(0, self.asked), self._asked, self._ask, self._ranks)
        out = torch.empty_like(found)
        out[self._order] = found
        return out

    def lists(self, answer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> HopSample:
        """A list of numbers per id; its owner answers: ``answer(rows [A])`` gives offsets ``[A+1]`` and numbers."""
        indptr, values = answer(self.asked)
        counts = indptr.diff().long()
        sizes = exchange(counts, self._asked, self._ask, self._ranks)
        parts = [int(part.sum()) for part in counts.split(self._asked)]
        there = [int(part.sum()) for part in sizes.split(self._ask)]
        found = exchange(values, parts, there, self._ranks)
        mine = torch.empty_like(sizes)
        mine[self._order] = sizes
        offsets = torch.zeros(mine.numel() + 1, dtype=torch.int64)
        torch.cumsum(mine, 0, out=offsets[1:])
        arrived = torch.cumsum(sizes, 0) - sizes  # where the list of the i-th sorted id begins
        shift = torch.repeat_interleave(offsets[:-1][self._order] - arrived, sizes)
        out = torch.empty_like(found)
        out[torch.arange(found.numel()) + shift] = found
        return HopSample(offsets.to(torch.int32), out, None)


def exchange(values: Tensor, give: Sequence[int], get: Sequence[int], ranks: Ranks) -> Tensor:
    """Send ``give[q]`` rows of ``values`` to rank q, in order; what the others send here, ``get[q]`` rows of each."""
    found = values.new_empty((sum(get), *values.shape[1:]))
    with ranks.losses_named():
        dist.all_to_all_single(found, values.contiguous(), list(get), list(give))
    return found
