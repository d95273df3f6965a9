"""FeatureStore: ``read(ids)`` returns feature rows, wherever they are kept.

The rows lie in one tier, chosen by where the tensor is and where rows are needed:

    device    on the device itself: gathered there
    pinned    pinned host memory: the GPU reads the rows over PCIe (UVA)
    host      ordinary or mapped memory: gathered by CPU threads, then copied to the device

A cache on the device may hold some rows in front of the lower two tiers; in front of a mapped file it may be in memory.

Shapes: N nodes, F features, M ids, R cached rows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.batches.block import exact_device
from weft.core.errors import InputError
from weft.ops.sampling.gather_rows import gather_rows_cpu, gather_rows_triton


@dataclass(frozen=True)
class ReadCounts:
    """Rows read so far: from the cache, and from the tier behind it."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Share of rows that the cache had, 0 before the first read."""
        return self.hits / max(self.hits + self.misses, 1)


class FeatureStore:
    """Feature rows of ``x [N, F]`` for batches on ``device``.

    ``cached [R]``: ids of the rows to keep on the device, most valuable first, as a cache policy chooses them.
    Any thread may read.
    """

    def __init__(self, x: Tensor, device: torch.device | str = "cpu", cached: Tensor | None = None) -> None:
        if x.dim() != 2:
            raise InputError(f"features must be a matrix [nodes, features], not {list(x.shape)}")
        self.x, self.device = x, exact_device(device)
        if x.is_cuda and self.device.type != "cuda":
            raise InputError(f"features are on {x.device} but batches on {self.device}; move the features with x.cpu()")
        self.tier = "host"
        if self.device.type == "cuda" and (x.is_cuda or x.is_pinned()):
            self.tier = "device" if x.is_cuda else "pinned"
        self._lock, self._rows, self._hit_rows = threading.Lock(), 0, 0
        self._slots: Tensor | None = None
        self._cache: Tensor | None = None
        # Of reads that the host does not see the size of: rows read, and those that the cache had.
        self._device_rows, self._device_hits = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
        if cached is not None and cached.numel() and self.tier != "device":
            self._fill(cached)

    @property
    def counts(self) -> ReadCounts:
        """Rows read so far. On a GPU this reads two numbers back."""
        with self._lock:
            hits, rows = self._hit_rows + int(self._device_hits), self._rows + int(self._device_rows)
            return ReadCounts(hits, rows - hits)

    @property
    def counters(self) -> list[Tensor]:
        """Where reads on a GPU are counted: what a trial run of a captured step must restore."""
        return [self._device_rows, self._device_hits]

    def held(self) -> Tensor | None:
        """Which rows the cache has ``[N]`` bool, in host memory; None without a cache."""
        return None if self._slots is None else (self._slots >= 0).cpu()

    def note_reads(self, rows: int, hits: int) -> None:
        """Count rows that were read elsewhere, of which the cache is to give ``hits``."""
        with self._lock:
            self._rows += rows
            self._hit_rows += hits

    def complete(self, ids: Tensor, far: Tensor, positions: Tensor, out: Tensor) -> Tensor:
        """The rows of ``ids [M]`` in ``out [M, F]``: ``far [R, F]`` at ``positions [R]``, the others from the cache.

        Everything is on the store's device; :meth:`held` says which rows ``far`` has to have.
        """
        slots = self._slots.index_select(0, ids.long()).clamp_(min=0)  # rows that the cache lacks are overwritten
        torch.index_select(self._cache, 0, slots.long(), out=out)
        return out.index_copy_(0, positions.long(), far)

    def _fill(self, cached: Tensor) -> None:
        N = self.x.shape[0]
        ids = cached.to(self.device).long()
        message = f"cached must hold different node ids from 0 to {N - 1}"
        if ids.min() < 0 or ids.max() >= N:
            raise InputError(message)
        self._slots = torch.full((N,), -1, dtype=torch.int32, device=self.device)
        positions = torch.arange(ids.numel(), dtype=torch.int32, device=self.device)
        self._slots[ids] = positions
        if not torch.equal(self._slots[ids], positions):  # no sort: there may be a hundred million
            raise InputError(message)
        read = gather_rows_triton if self.tier == "pinned" else gather_rows_cpu
        self._cache = read(self.x, ids if self.tier == "pinned" else cached.cpu()).to(self.device)

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]`` on the store's device, in memory that belongs to the caller.

        Ids on the CPU are checked; those on a GPU are not, because that would stall its stream.
        """
        if ids.device.type == "cpu" and ids.numel():
            low, high, count = *(int(end) for end in torch.aminmax(ids)), self.x.shape[0]
            if low < 0 or high >= count:
                wrong = low if low < 0 else high
                raise InputError(f"node id {wrong} must be from 0 to {count - 1}, the rows of the features")
        with self._lock:
            self._rows += ids.numel()
        if self._slots is not None:
            ids = ids.to(self.device)
            if self.tier == "pinned":
                return gather_rows_triton(self.x, ids, cached=(self._cache, self._slots, self._device_hits))
            slots = self._slots[ids.long()]
            hit = slots >= 0
            there, missing = hit.nonzero().squeeze(1), (~hit).nonzero().squeeze(1)
            with self._lock:
                self._hit_rows += there.numel()
            rows = torch.empty(ids.numel(), self.x.shape[1], dtype=self.x.dtype, device=self.device)
            rows[there] = self._cache[slots[there].long()]
            rows[missing] = self._read_host(ids[missing])
            return rows
        if self.tier == "device":
            gather = gather_rows_triton if self.x.is_cuda else gather_rows_cpu
            return gather(self.x, ids.to(self.device))
        if self.tier == "pinned":
            return gather_rows_triton(self.x, ids.to(self.device))
        return self._read_host(ids)

    def read_padded(self, ids: Tensor, count: Tensor, out: Tensor, concurrent: bool = False) -> Tensor:
        """The rows of the first ``count [1]`` of ``ids [M]`` in ``out [M, F]``, nothing read back; the others are kept.

        For steps that are captured as a CUDA graph: features on the GPU or in pinned memory. ``concurrent``: other work
        runs on the device at the same time.
        """
        if self.tier == "host":
            raise InputError("a GPU cannot read these features by itself; pin their memory with x.pin_memory()")
        self._device_rows += count
        cached = None if self._slots is None else (self._cache, self._slots, self._device_hits)
        return gather_rows_triton(self.x, ids, out, count=count, cached=cached, concurrent=concurrent)

    def _read_host(self, ids: Tensor) -> Tensor:
        """CPU gather, then a copy; pinned staging memory comes from torch's pool, which waits for the copy."""
        if self.device.type == "cpu":
            return gather_rows_cpu(self.x, ids)
        staging = torch.empty(ids.numel(), self.x.shape[1], dtype=self.x.dtype, pin_memory=True)
        return gather_rows_cpu(self.x, ids.cpu(), staging).to(self.device, non_blocking=True)
