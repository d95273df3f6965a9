"""Ranks: one process among several that train one graph: who it is, how it talks, what peers can read of it.

Collectives go through torch.distributed: gloo for CPU ranks and for ranks that share a GPU, NCCL between distinct GPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import SpecError
from weft.dist.exchange import GatheredStaging, Staging
from weft.dist.peer_memory import Barrier, PeerMemory, RankLostError, SharedFiles, check_peers, peer_memory_for
from weft.ops.sampling.reference import HopSample

TIMEOUT = 300.0  # seconds: a rank may compile kernels for the first time while others wait


@dataclass(frozen=True)
class RankAddress:
    """How a rank finds the others. ``init``: a torch.distributed init method (``"file://..."``, ``"env://"``)."""

    rank: int
    ranks: int
    init: str
    device: str = "cpu"
    distinct: bool = False  # no two ranks are on one GPU
    timeout: float = TIMEOUT
    one_host: bool | None = None  # whether ranks share memory; None: if their machines have one name
    peers: str = "auto"  # the kind of memory that peers read: one of weft.dist.peer_memory.PEERS


class Ranks:
    """This process as rank ``rank`` of ``ranks`` on ``device``; use it as a context.

    All ranks have to make the same calls in the same order.
    """

    def __init__(self, address: RankAddress) -> None:
        self.rank, self.ranks, self.device = address.rank, address.ranks, torch.device(address.device)
        self._address = address
        self.distinct = address.distinct and self.device.type == "cuda"
        self._pids: list[int] = []
        self.one_host = True

    def __enter__(self) -> Ranks:
        address = self._address
        check_peers(address.peers, self.device, self.distinct)
        if dist.is_initialized():
            raise SpecError("ranks: torch.distributed is in use in this process already; start another process")
        backend = "cpu:gloo,cuda:nccl" if self.distinct else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            backend,
            init_method=address.init,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=address.timeout),
        )
        processes = self.gather_objects((os.getpid(), platform.node()))
        self._pids = [pid for pid, _ in processes]
        same = len({host for _, host in processes}) == 1
        self.one_host = same if address.one_host is None else address.one_host
        if address.peers != "auto" and not self.one_host:
            raise SpecError(f"peers={address.peers!r}: ranks on several machines share no memory; leave it out")
        return self

    def release(self, together: bool = True) -> None:
        """Release what peers can read; ``together``: as every rank does at its end, waiting for the others."""
        memory: PeerMemory | None = self.__dict__.pop("memory", None)
        if memory is not None:
            with suppress(RankLostError):
                memory.close(together)

    def __exit__(self, kind: object, *_: object) -> None:
        self.release(together=kind is None)
        for name in ("barrier", "staging"):
            self.__dict__.pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()

    @cached_property
    def barrier(self) -> Barrier:
        """Waits for all ranks; a GPU finishes its work first."""
        shared = SharedFiles(self.rank, self.gather_objects)
        shared.reserve(8 * self.ranks)  # new files hold zeros; those of rank 0 count for all
        counters = shared.slot(0, 0)[: 8 * self.ranks].view(torch.int64)
        before = (lambda: torch.cuda.synchronize(self.device)) if self.device.type == "cuda" else None
        return Barrier(counters, self.rank, self._pids, self._address.timeout, before)

    @cached_property
    def memory(self) -> PeerMemory:
        """What peers can read."""
        return peer_memory_for(
            self.rank, self.ranks, self.device, self.distinct, self.gather_objects, self._address.peers
        )

    @cached_property
    def staging(self) -> Staging:
        """The memory that all exchanges of this rank go through; between machines, a gather of everything."""
        if not self.one_host:
            return GatheredStaging(self.rank, self.ranks, self.all_gather)
        return Staging(self.rank, self.ranks, self.memory, self.barrier)

    # ---- objects -------------------------------------------------------------------------------------

    def share(self, value: Any) -> Any:
        """What rank 0 gave; other ranks' values are ignored."""
        box = [value if self.rank == 0 else None]
        with self.losses_named():
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks."""
        values: list[Any] = [None] * self.ranks
        with self.losses_named():
            dist.all_gather_object(values, value)
        return values

    # ---- tensors -------------------------------------------------------------------------------------

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Every rank's ``value``, of one shape, in the order of the ranks."""
        here = value.detach().contiguous()
        if here.is_cuda and not self.distinct:  # gloo works on the host
            return [part.to(here.device) for part in self.all_gather(here.cpu())]
        parts = [torch.empty_like(here) for _ in range(self.ranks)]
        with self.losses_named():
            dist.all_gather(parts, here)
        return parts

    @contextmanager
    def losses_named(self) -> Iterator[None]:
        """A collective that fails because a rank is gone says which one."""
        try:
            yield
        except RuntimeError as error:
            gone = self.barrier.dead() if "barrier" in self.__dict__ and self.one_host else []
            who = f"rank {gone[0]} of {self.ranks} has died" if gone else f"a rank of {self.ranks} does not answer"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RankLostError(
                f"{who}; the run cannot continue (rank {self.rank}: {reason[:160]})", gone[0] if gone else -1
            ) from None


# ---- Routes
#
# All ranks request at the same time, each its own ids; ranks without any request none. One route serves several
# requests for the same ids. Also between machines.
#
# Shapes: M ids requested here, A ids that other ranks request of this one, n nodes of this rank, F numbers of a row.


class Route:
    """The way of the global ``ids [M]`` to the ranks that own them; ``bounds``: node ranges of the ranks."""

    def __init__(self, ids: Tensor, bounds: Sequence[int], ranks: Ranks) -> None:
        self._ranks = ranks
        ids = ids.long()
        owner = torch.searchsorted(torch.tensor(bounds[1:]), ids, right=True)
        self._order = torch.sort(owner, stable=True).indices
        self._requests = torch.bincount(owner, minlength=ranks.ranks).tolist()
        counts = exchange(torch.tensor(self._requests), [1] * ranks.ranks, [1] * ranks.ranks, ranks)
        self._requested = counts.tolist()
        remote = exchange(ids[self._order], self._requests, self._requested, ranks)
        self.requested = remote - bounds[ranks.rank]  # rows of this rank that other ranks request [A]

    def rows(self, table: Tensor) -> Tensor:
        """Rows ``[M, F]`` (or numbers ``[M]``) of what every rank has as ``table [n, F]``, in the order of the ids."""
        received = exchange(table.index_select(0, self.requested), self._requested, self._requests, self._ranks)
        out = torch.empty_like(received)
        out[self._order] = received
        return out

    def lists(self, answer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> HopSample:
        """A list of numbers per id; its owner answers: ``answer(rows [A])`` gives offsets ``[A+1]`` and numbers."""
        indptr, values = answer(self.requested)
        counts = indptr.diff().long()
        sizes = exchange(counts, self._requested, self._requests, self._ranks)
        parts = [int(part.sum()) for part in counts.split(self._requested)]
        there = [int(part.sum()) for part in sizes.split(self._requests)]
        received = exchange(values, parts, there, self._ranks)
        mine = torch.empty_like(sizes)
        mine[self._order] = sizes
        offsets = torch.zeros(mine.numel() + 1, dtype=torch.int64)
        torch.cumsum(mine, 0, out=offsets[1:])
        arrived = torch.cumsum(sizes, 0) - sizes  # where the list of the i-th sorted id begins
        shift = torch.repeat_interleave(offsets[:-1][self._order] - arrived, sizes)
        out = torch.empty_like(received)
        out[torch.arange(received.numel()) + shift] = received
        return HopSample(offsets.to(torch.int32), out, None)


def exchange(values: Tensor, give: Sequence[int], get: Sequence[int], ranks: Ranks) -> Tensor:
    """Send ``give[q]`` rows of ``values`` to rank q, in order; what the others send here, ``get[q]`` rows of each."""
    received = values.new_empty((sum(get), *values.shape[1:]))
    with ranks.losses_named():
        dist.all_to_all_single(received, values.contiguous(), list(get), list(give))
    return received
