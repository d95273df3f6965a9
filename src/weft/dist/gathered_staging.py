"""GatheredStaging: exchanges between ranks on several machines, which share no memory: every rank's rows are gathered.

It moves all rows of all ranks, not only those that are needed. Sampled training uses it for evaluations alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from weft.dist.exchange import Staging
from weft.ops.sharded.shard import ShardedLaunch

GatherTensors = Callable[[Tensor], list[Tensor]]


class GatheredStaging(Staging):
    """The interface of :class:`Staging` over ``gather``, which returns the tensors of one shape of all ranks."""

    def __init__(self, rank: int, ranks: int, gather: GatherTensors) -> None:
        self.rank, self.ranks, self._gather_tensors = rank, ranks, gather
        self.poison, self.launch, self.exchanged_bytes = False, ShardedLaunch(way="fetched"), 0

    def publish(self, rows: Tensor, most_rows: int) -> Callable[[int, int], Tensor]:
        """See :meth:`Staging.publish`; what is returned stays valid."""
        lead, count, width = rows.shape[:-2], rows.shape[-2], rows.shape[-1]
        mine = rows.new_zeros(math.prod(lead), most_rows, width)
        mine[:, :count] = rows.detach().reshape(math.prod(lead), count, width)
        every = self._gather_tensors(mine)

        def rows_of(rank: int, count: int) -> Tensor:
            return every[rank][:, :count].reshape(*lead, count, width)

        return rows_of
