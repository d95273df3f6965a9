"""Exchange: rows of remote nodes, read from the memory of the ranks that own them.

    get(x [..., n, F])                   own rows are published, remote rows are read   -> [..., h, F]
    extend(x [..., n, F])                own rows, then remote rows; differentiable     -> [..., n + h, F]
    return_gradients(grad [..., h, F])   gradients of remote rows, added up by owners   -> [..., n, F]

Every call has one barrier, and all ranks have to make the same calls. Gradients that several ranks have for one row are
added in the order of the ranks: the same bits in every run.

Shapes: n own nodes, h remote nodes that this rank reads (its halo), F features; leading dimensions are tasks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.dist.partition import halo_of
from weft.dist.peer_memory import SLOTS, Barrier, PeerMemory
from weft.ops.sharded.sharded_spmm import ShardedLaunch


class Staging:
    """The slots of peer memory that exchanges take turns in.

    ``poison``: after each barrier, the slot of the exchange before is overwritten with NaN. No rank may read it any
    more, so a missing wait shows up as NaN; for tests. ``launch``: of the sums on a GPU, the same for all
    matrices; a fixed one has the same bits in every run.
    """

    def __init__(self, rank: int, ranks: int, memory: PeerMemory, barrier: Barrier, poison: bool = False) -> None:
        self.rank, self.ranks, self._memory, self._barrier = rank, ranks, memory, barrier
        self.poison, self.launch = poison, ShardedLaunch(way="fetched")
        self._count = 0
        self.exchanged_bytes = 0  # read from peers so far

    def publish(self, rows: Tensor, most_rows: int) -> Callable[[int, int], Tensor]:
        """Let peers read ``rows [..., n, F]``; all ranks have arrived when this returns.

        ``most_rows``: the largest n of all ranks. What is returned gives the rows of a rank, given how many it has;
        they are valid until this rank's next exchange.
        """
        lead, width = rows.shape[:-2], rows.shape[-1]
        per_row = math.prod(lead) * width * rows.element_size()
        self._memory.reserve(max(per_row * most_rows, 1))
        which = self._count % SLOTS
        self._count += 1
        num_bytes = rows.numel() * rows.element_size()
        if num_bytes:
            self._memory.slot(self.rank, which)[:num_bytes].view(rows.dtype).view(rows.shape).copy_(rows.detach())
        self._barrier.wait()
        if self.poison:
            self._memory.slot(self.rank, (which + 1) % SLOTS).fill_(0xFF)  # NaN in every float type

        def rows_of(rank: int, count: int) -> Tensor:
            part = self._memory.slot(rank, which)[: per_row * count]
            return part.view(rows.dtype).view(*lead, count, width)

        return rows_of


@dataclass(frozen=True)
class Halo:
    """The remote nodes that this rank reads, by owner, and who reads what of this rank.

    ``ids [h]``: their global ids, ascending. ``rows[q]``: their rows on rank q. ``readers[q]``: rows of this rank that
    rank q reads; ``starts[q]``: where those begin in q's halo. ``sizes``: h of every rank.
    """

    ids: Tensor
    rows: tuple[Tensor, ...]
    readers: tuple[Tensor, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many remote nodes this rank reads."""
        return self.ids.numel()


def make_halo(columns: Tensor, bounds: Sequence[int], rank: int, gather: Callable[[Any], list[Any]]) -> Halo:
    """The halo of rows with the global ``columns``; all ranks call this together."""
    ids = halo_of(columns, bounds[rank], bounds[rank + 1]).long()
    every = [part.to(ids.device) for part in gather(ids.cpu())]
    cuts = torch.tensor(bounds, device=ids.device)

    def split(halo: Tensor) -> list[int]:
        return torch.searchsorted(halo, cuts).tolist()

    mine = split(ids)
    rows = tuple(ids[mine[q] : mine[q + 1]] - bounds[q] for q in range(len(bounds) - 1))
    theirs = [split(halo) for halo in every]
    readers = tuple(halo[cut[rank] : cut[rank + 1]] - bounds[rank] for halo, cut in zip(every, theirs, strict=True))
    return Halo(ids, rows, readers, tuple(cut[rank] for cut in theirs), tuple(halo.numel() for halo in every))


class Exchange:
    """Moves rows between the ranks of ``halo`` through ``staging``; ``bounds``: node ranges of the ranks."""

    def __init__(self, staging: Staging, halo: Halo, bounds: Sequence[int]) -> None:
        self.staging, self.halo, self.bounds = staging, halo, tuple(bounds)
        self._counts = [high - low for low, high in itertools.pairwise(bounds)]
        self._rank = staging.rank
        self.is_needed = any(halo.sizes)  # the same on all ranks, so either all of them exchange or none

    def get(self, x: Tensor) -> Tensor:
        """Remote rows ``[..., h, F]`` of what every rank has as ``x [..., n, F]``."""
        if not self.is_needed:
            return x.new_empty(*x.shape[:-2], 0, x.shape[-1])
        return self.take(self.peers(x))

    def peers(self, x: Tensor) -> list[Tensor]:
        """What every rank has as ``x [..., n, F]``, where it lies: for a kernel or :meth:`take`."""
        rows_of = self.staging.publish(x, max(self._counts))
        self.staging.exchanged_bytes += self.halo.size * (x.numel() // max(x.shape[-2], 1)) * x.element_size()
        return [rows_of(rank, count) for rank, count in enumerate(self._counts)]

    def take(self, peers: Sequence[Tensor]) -> Tensor:
        """The remote rows ``[..., h, F]`` of ``peers``, here."""
        parts = [  # a peer's rows may lie on another GPU
            peer.index_select(-2, rows.to(peer.device)).to(rows.device)
            for peer, rows in zip(peers, self.halo.rows, strict=True)
            if rows.numel()
        ]
        here = peers[self._rank]
        return torch.cat(parts, -2) if parts else here.new_empty(*here.shape[:-2], 0, here.shape[-1])

    def return_gradients(self, grad: Tensor) -> Tensor:
        """Gradients ``[..., n, F]`` that other ranks have for own rows; ``grad [..., h, F]`` is for theirs."""
        total = grad.new_zeros(*grad.shape[:-2], self._counts[self._rank], grad.shape[-1])
        if not self.is_needed:
            return total
        rows_of = self.staging.publish(grad, max(self.halo.sizes))
        for rank, rows in enumerate(self.halo.readers):
            if rows.numel():
                part = rows_of(rank, self.halo.sizes[rank]).narrow(-2, self.halo.starts[rank], rows.numel())
                part = part.to(grad.device)
                total.index_add_(-2, rows, part)  # the rows of one rank are distinct
                self.staging.exchanged_bytes += part.numel() * part.element_size()
        return total

    def extend(self, x: Tensor) -> Tensor:
        """``x [..., n, F]`` with the remote rows below it, differentiable and under ``vmap``."""

        def back(grad: Tensor) -> Tensor:
            local, remote = grad.split([self._counts[self._rank], self.halo.size], -2)
            return local + self.return_gradients(remote)

        return Collective.apply(x, lambda here: torch.cat([here, self.get(here)], -2), back)


class Collective(torch.autograd.Function):
    """``forward(x)``, whose gradient is ``backward(grad)``, as all ranks compute them together; also under ``vmap``."""

    @staticmethod
    def forward(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gradient = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *functions: Any) -> tuple[Tensor, int]:
        return Collective.apply(x.movedim(in_dims[0], 0), *functions), 0


GatherTensors = Callable[[Tensor], list[Tensor]]


class GatheredStaging(Staging):
    """Exchanges between ranks on several machines, which share no memory: ``gather`` returns the rows of all ranks.

    It moves all rows of all ranks, not only those that are needed. Sampled training uses it for evaluations alone.
    """

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
