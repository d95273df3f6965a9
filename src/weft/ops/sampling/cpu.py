"""Neighbour sampling on the CPU: compiled, without the GIL, relabelling fused with sampling.

A :class:`CpuSampler` belongs to one worker thread. It keeps what it needs between batches (a table with one entry per
node, scratch memory), and its results lie in arrays that are used again once nothing refers to them any more, so a
steady stream of batches allocates nothing.

Shapes: N nodes, E edges, S seeds, K fan-out, P sampled edges, M nodes found so far.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.host_memory import advise_huge_pages
from weft.ops.cpu import run_shares
from weft.ops.launch.backend import next_power_of_2
from weft.ops.sampling.reference import FULL, MOST_SLOTS, HopSample, Relabelled, check_fanout, check_slots

ROWS_OF_A_SHARE = 2048  # dispatching a share to a thread costs about 30 us
MOST_STAMP = 2**31 - 1


@cache
def kernels() -> ModuleType:
    """The compiled kernels; the first call imports numba."""
    from weft.ops.sampling import cpu_kernels

    return cpu_kernels


def _references(arrays: list[np.ndarray], index: int) -> int:
    """References to one array of a list, as ``sys.getrefcount`` counts them from here."""
    return sys.getrefcount(arrays[index])


@cache
def _idle_references() -> int:
    """What :func:`_references` gives for an array that only its list holds; it depends on the version of Python."""
    return _references([np.empty(1)], 0)


class ArrayPool:
    """A pool of arrays that are reused as soon as nothing else refers to them.

    A tensor made of an array keeps it alive, so an array whose only reference is the pool's cannot be part of any
    batch. Sizes are rounded up to powers of two.
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self.made = 0

    def take(self, count: int, dtype: type) -> np.ndarray:
        """An array of at least ``count`` elements that no batch holds."""
        idle = _idle_references()
        for index in range(len(self._arrays)):
            if _references(self._arrays, index) > idle:
                continue
            if self._arrays[index].dtype == dtype and self._arrays[index].size >= count:
                return self._arrays[index]
        array = np.empty(next_power_of_2(max(count, 1)), dtype)
        self._arrays = [other for other in self._arrays if other.size >= count or other.dtype != dtype] + [array]
        self.made += 1
        return array


class _HopArrays(NamedTuple):
    """Where the kernels of a hop write: a sample, and the nodes of the batch."""

    indptr: np.ndarray
    sources: np.ndarray
    edges: np.ndarray
    nodes: np.ndarray


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class CpuSampler:
    """Samples hops of one batch after another from a CSR; use one per thread.

    ``indptr [N+1]`` int32 or int64, ``indices [E]`` int32, ``weight [E]`` float32, all on the CPU (mapped files too).
    ``threads`` > 1 samples the rows of a hop in parallel; the result is the same. ``relations`` > 0: ``indptr`` has a
    row per (node, relation), and a hop may have a fan-out for each relation.
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        *,
        replace: bool = False,
        weight: Tensor | None = None,
        threads: int = 1,
        relations: int = 0,
    ) -> None:
        if weight is not None and (weight.dtype != torch.float32 or not weight.is_contiguous()):
            raise InputError(f"edge weights must be contiguous float32, not {weight.dtype}; convert them once")
        self.indptr, self.indices, self.weight = indptr.contiguous(), indices.contiguous(), weight
        self._by_relation, self.relations = self.indptr, relations
        if relations:
            self.indptr = self.indptr[::relations].contiguous()
        self.num_nodes, self.replace, self.threads = self.indptr.numel() - 1, replace, threads
        self._like = torch.empty(1, dtype=indptr.dtype).numpy()
        self._table = np.zeros(max(self.num_nodes, 1), np.int64)  # untouched pages take no memory
        advise_huge_pages(_address(self._table), self._table.nbytes)
        self._stamp, self._count, self._clock = 0, 0, np.zeros(3, np.int64)
        self.pool = ArrayPool()
        self._nodes = np.empty(0, np.int32)

    def begin(self, seeds: Tensor, clock: Tensor) -> None:
        """Start a batch: ``seeds [S]`` int32 (checked by the caller), ``clock [3]``."""
        if self._stamp == MOST_STAMP:
            self._table[:], self._stamp = 0, 0
        self._stamp += 1
        self._clock, self._count = clock.numpy().copy(), seeds.numel()
        self._nodes = self.pool.take(seeds.numel(), np.int32)
        self._nodes[: seeds.numel()] = seeds.numpy()
        kernels().label_seeds(_address(self._nodes), self._count, _address(self._table), self._stamp)

    @property
    def nodes(self) -> Tensor:
        """All nodes of the batch so far ``[M]`` int32, seeds first."""
        return torch.from_numpy(self._nodes[: self._count])

    def hop(self, fanout: int, hop: int, first: int = 0) -> tuple[HopSample, Relabelled]:
        """Sample for the nodes ``first .. M`` of the batch and relabel the result.

        In the sample ``sources`` are local ids already (the array of ``Relabelled.indices``).
        """
        check_fanout(fanout, self.replace, self.weight is not None)
        rows, num_rows = self._nodes[first : self._count], self._count - first
        most = self._most_edges(rows, num_rows, fanout)
        out = self._room(num_rows, most)
        weighted = self.weight is not None and fanout != FULL  # all neighbours need no odds
        weights = (self.weight.data_ptr() if weighted else 0, weighted)
        shares = 1 if self.threads == 1 else max(1, min(4 * self.threads, num_rows // ROWS_OF_A_SHARE))
        size = next_power_of_2(2 * max(fanout, 1))
        scratch = self.pool.take(shares * size, np.int32)
        graph = (self.indptr.data_ptr(), self._like)
        work = (_address(rows), num_rows, fanout, self.replace)
        made = (_address(out.indptr), _address(out.sources), _address(out.edges))
        labels = (_address(out.nodes), self._count, _address(self._table), self._stamp)
        picking = (*graph, self.indices.data_ptr(), *weights, *work, _address(self._clock), hop, *made)
        if shares == 1:
            self._count = kernels().hop_fused(*picking, _address(scratch), size - 1, *labels)
        else:
            kernels().hop_offsets(*graph, *weights, *work, made[0])
            run_shares(kernels().hop_share, (*picking, _address(scratch), 4 * size, size - 1), shares)
            self._count = kernels().relabel(made[1], int(out.indptr[num_rows]), *labels)
        return self._results(out, num_rows)

    def hop_of_relations(self, fanouts: tuple[int, ...], hop: int, first: int = 0) -> tuple[HopSample, Relabelled]:
        """As :meth:`hop`, with a fan-out per relation (0: none, -1: all); one thread."""
        rows, num_rows = self._nodes[first : self._count], self._count - first
        total = self._most_edges(rows, num_rows, FULL)
        most = total if min(fanouts) < 0 else min(total, num_rows * sum(fanouts))
        out, counts = self._room(num_rows, most), np.array(fanouts, np.int64)
        size = next_power_of_2(2 * max(*fanouts, 1))
        scratch = self.pool.take(size, np.int32)
        self._count = kernels().hop_relations(
            self._by_relation.data_ptr(), self._like, self.indices.data_ptr(), _address(rows), num_rows,
            _address(counts), self.relations, _address(self._clock), hop,
            _address(out.indptr), _address(out.sources), _address(out.edges), _address(scratch), size - 1,
            _address(out.nodes), self._count, _address(self._table), self._stamp,
        )  # fmt: skip
        return self._results(out, num_rows)

    def _most_edges(self, rows: np.ndarray, num_rows: int, fanout: int) -> int:
        if fanout != FULL:
            check_slots(num_rows, fanout)
            return num_rows * fanout
        total = kernels().total_degree(self.indptr.data_ptr(), self._like, _address(rows), num_rows)
        if total > MOST_SLOTS:
            raise InputError(
                f"{num_rows:,} nodes have {total:,} in-edges, over 2^31 for one batch; use a smaller batch"
            )
        return total

    def _room(self, num_rows: int, most: int) -> _HopArrays:
        """Arrays for a hop with at most ``most`` edges; earlier hops keep the node list that they refer to."""
        arrays = [(num_rows + 1, np.int32), (most, np.int32), (most, np.int64)]
        indptr, sources, edges = (self.pool.take(count, dtype) for count, dtype in arrays)
        nodes, count = self._nodes, self._count + min(most, self.num_nodes)
        if nodes.size < count:
            nodes = self.pool.take(count, np.int32)
            nodes[: self._count] = self._nodes[: self._count]
        return _HopArrays(indptr, sources, edges, nodes)

    def _results(self, out: _HopArrays, num_rows: int) -> tuple[HopSample, Relabelled]:
        self._nodes, count = out.nodes, int(out.indptr[num_rows])
        local = torch.from_numpy(out.sources[:count])
        sample = HopSample(torch.from_numpy(out.indptr[: num_rows + 1]), local, torch.from_numpy(out.edges[:count]))
        return sample, Relabelled(self.nodes, local)


def transpose_cpu(indptr: Tensor, indices: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(indptr [M+1], rows [P], perm [P])`` int32 of the transposed CSR, by counting sort: O(P + M)."""
    indptr, indices = indptr.to(torch.int32).contiguous(), indices.contiguous()
    back = torch.zeros(num_cols + 1, dtype=torch.int32)
    rows, perm = torch.empty_like(indices), torch.empty_like(indices)
    addresses = (tensor.data_ptr() for tensor in (back, rows, perm))
    kernels().transpose(indptr.data_ptr(), indices.data_ptr(), indptr.numel() - 1, num_cols, *addresses)
    return back, rows, perm
