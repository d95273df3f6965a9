"""Ranks: one process among several that train one graph: who it is, how it talks, what peers can read of it.

Collectives go through torch.distributed: gloo for CPU ranks and for ranks that share a GPU, NCCL between distinct GPUs.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator
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
from weft.dist.peer_memory import (
    Barrier,
    PeerMemory,
    RankLostError,
    SharedFiles,
    check_peers,
    peer_memory_for,
    shared_folder,
)

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
        self._excepthook = sys.excepthook  # torch's would name a rank in front of every later traceback
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
        sys.excepthook = self._excepthook

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

    def spread(self, part: Tensor) -> list[Tensor] | None:
        """Every rank's ``part [n, ...]`` where this rank can read it; all ranks call this together.

        None if they cannot share memory: on several machines, or CPU ranks without room in the folder for it.
        """
        row_bytes = math.prod(part.shape[1:]) * part.element_size()
        free = math.inf if self.device.type == "cuda" else shutil.disk_usage(shared_folder()).free
        counts, rooms = zip(*self.gather_objects((part.shape[0], free)), strict=True)
        size = -(-max(max(counts) * row_bytes, 1) // self.memory.unit) * self.memory.unit
        if not self.one_host or self.ranks * size > min(rooms):
            return None
        wholes = self.memory.allocate(size)
        parts = [
            whole[: count * row_bytes].view(part.dtype).view(count, *part.shape[1:])
            for whole, count in zip(wholes, counts, strict=True)
        ]
        parts[self.rank].copy_(part)
        self.barrier.wait()
        return parts

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
