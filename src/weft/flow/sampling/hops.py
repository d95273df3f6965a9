"""The hops of a batch behind one interface: compiled on the CPU, Triton on the GPU, or any sampler of one hop.

A :class:`HopSampler` returns, for seeds and fan-outs, one :class:`Hop` per fan-out, seeds outwards. With
``expand="all"`` every hop samples for all nodes found before it (the rows of a block); with ``expand="new"`` only for
those that the hop before it found (a local subgraph).

Shapes: S seeds, D rows, M nodes, P edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.ops.sampling.compact_triton import Compactor, DeviceHop, sample_hops_triton
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.hop import HopSample
from weft.ops.sampling.reference import relabel_torch
from weft.ops.sampling.relations import RelationFanouts
from weft.ops.sampling.sample_triton import CachedLists

Fanout = int | tuple[int, ...]  # of all relations together, or of each


@dataclass(frozen=True)
class Hop:
    """One hop in local ids: row i is node ``first + i``.

    ``indptr [D+1]``, ``indices [P]`` int32, ``edges [P]`` int64 or None, ``nodes [M]`` int32: all nodes then known.
    """

    indptr: Tensor
    indices: Tensor
    edges: Tensor | None
    nodes: Tensor
    first: int = 0


class HopSampler(Protocol):
    """Samples all hops of one batch; used by one thread at a time."""

    def __call__(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
        """The hops of ``seeds [S]`` int32, seeds outwards."""
        ...


class CpuHops:
    """Compiled sampling on the CPU, relabelling fused."""

    def __init__(self, sampler: CpuSampler) -> None:
        self._sampler = sampler

    def __call__(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
        """See :class:`HopSampler`."""
        self._sampler.begin(seeds, clock)
        hops, first = [], 0
        for number, fanout in enumerate(fanouts):
            known = self._sampler.nodes.numel()
            take = self._sampler.hop if isinstance(fanout, int) else self._sampler.hop_of_relations
            sample, found = take(fanout, number, first)
            hops.append(Hop(sample.indptr, found.indices, sample.edges, found.nodes, first))
            first = known if expand == "new" else 0
        return hops


class TorchHops:
    """Any sampler of one hop with relabelling in torch: the reference, and the kernels kept for comparison."""

    def __init__(self, sample: Callable[[Tensor, Fanout, Tensor, int], HopSample]) -> None:
        self._sample = sample

    def __call__(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
        """See :class:`HopSampler`."""
        nodes, first, hops = seeds, 0, []
        for number, fanout in enumerate(fanouts):
            sample = self._sample(nodes[first:], fanout, clock, number).trimmed()
            found = relabel_torch(nodes, sample.sources)
            hops.append(Hop(sample.indptr, found.indices, sample.edges, found.nodes, first))
            first = nodes.numel() if expand == "new" else 0
            nodes = found.nodes
        return hops


class TritonHops:
    """O(k) sampling and compaction on the GPU, with one read of all sizes at the end of a batch."""

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        *,
        replace: bool,
        edges: bool,
        device: torch.device,
        cached: CachedLists | None = None,
        relations: RelationFanouts | None = None,
    ) -> None:
        self._arrays = indptr, indices
        self._options = {"replace": replace, "edges": edges, "cached": cached, "relations": relations}
        self._compactor = Compactor(indptr.numel() - 1, device)

    def padded(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor) -> list[DeviceHop]:
        """The hops padded to their capacity, sizes on the device; nothing is read back."""
        return sample_hops_triton(*self._arrays, seeds, list(fanouts), clock, self._compactor, **self._options)

    def __call__(self, seeds: Tensor, fanouts: Sequence[Fanout], clock: Tensor, expand: str) -> list[Hop]:
        """See :class:`HopSampler`; ``expand`` must be "all"."""
        assert expand == "all", "the local subgraph is sampled hop by hop"
        hops = self.padded(seeds, fanouts, clock)
        sizes = torch.stack([torch.cat([hop.num_rows, hop.num_nodes, hop.indptr[-1:]]) for hop in hops]).tolist()
        return [_trimmed(hop, *size) for hop, size in zip(hops, sizes, strict=True)]


def _trimmed(hop: DeviceHop, rows: int, nodes: int, edges: int) -> Hop:
    picked = None if hop.edges is None else hop.edges[:edges]
    return Hop(hop.indptr[: rows + 1], hop.indices[:edges], picked, hop.nodes[:nodes])
