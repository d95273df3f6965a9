"""DividedSampled: sampled batches that host threads and what trains prepare together, as a division says.

Shapes: S seeds, M node capacity, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.core.division import Division, PhaseTime
from weft.flow.division.executor import DividedPipeline
from weft.flow.division.hardware import Gpu, Hardware, Parts
from weft.flow.division.padded_batches import PaddedItem
from weft.flow.padded import PaddedAdjacency
from weft.flow.seeds import SeedBatch, SeedOrder
from weft.ops.csr.self_loops import has_loops
from weft.ops.sampling.sample_triton import LARGEST_FANOUT
from weft.runtime.batches.sampled_source import Sampled, Sampling
from weft.runtime.batches.source import Batch, SourceRequest

SPARE_SLOTS = 2  # beyond the division's, for a profile that runs before it


@dataclass(frozen=True)
class DividedSampling:
    """How to sample, how to divide the preparation, and by which hardware (None: the GPU)."""

    sampling: Sampling
    division: Division
    hardware: Hardware | None = None

    def __call__(self, request: SourceRequest) -> DividedSampled:
        """The source of a stack."""
        return DividedSampled(request, self)


@dataclass(frozen=True)
class PreparedBatch(Batch):
    """A padded batch on the device; the step builds its blocks, so that they are part of the captured graph.

    ``nodes [M]``, ``features [M, F]``, ``hops``: ``(indptr, indices)`` per hop, seeds outwards.
    """

    nodes: Tensor | None = None
    features: Tensor | None = None
    hops: tuple[tuple[Tensor, Tensor], ...] = ()
    make: Callable[[PreparedBatch], Batch] | None = None

    def prepared(self) -> Batch:
        """With blocks, labels and features."""
        assert self.make is not None
        return self.make(self)


class DividedSampled(Sampled):
    """Batches in their order, whoever prepares them; ``pipeline.division`` may be replaced between two epochs."""

    def __init__(self, request: SourceRequest, about: DividedSampling) -> None:
        super().__init__(request, replace(about.sampling, captured=False))
        padded = self._device.type == "cuda" and request.padding and not request.subgraph and self._can_pad()
        self.hardware: Hardware = about.hardware or Gpu(padded)
        self._order = SeedOrder(request.graph.train.cpu(), about.sampling.batch, about.sampling.seed)
        most = max(about.division.pinned_batches, about.division.workers + SPARE_SLOTS)
        parts = Parts(
            request.graph,
            self._x,
            about.sampling.fanout,
            about.sampling.seed,
            self._device,
            most,
            "sampled" if request.subgraph else "full",
            request.subgraph,
            padded,
        )
        self._sides = self.hardware.sides(parts)
        self.pipeline = DividedPipeline(about.division, self._sides.host, self._sides.device, self._sides.clock)  # type: ignore[assignment]
        self.slots = most

    def _can_pad(self) -> bool:
        """Whether batches can have one size: uniform sampling without edges from a node to itself."""
        graph = self._graph
        usual = all(1 <= k <= LARGEST_FANOUT for k in self._sampling.fanout)
        return usual and graph.adj.weight is None and not has_loops(graph.adj.rows(), graph.adj.indices)

    @property
    def division(self) -> Division:
        """Of the next epoch."""
        return self.pipeline.division  # type: ignore[attr-defined,no-any-return]

    def divide(self, division: Division) -> None:
        """Divide batches otherwise from the next epoch on; host memory stays within what was reserved."""
        host = min(division.host_buffer, self.slots - 1)
        self.pipeline.division = replace(division, host_buffer=host)  # type: ignore[attr-defined]

    def phases(self) -> Mapping[str, PhaseTime]:
        """Measured phases since the last call."""
        log = self.pipeline.log  # type: ignore[attr-defined]
        found = log.times()
        log.clear()
        return found  # type: ignore[no-any-return]

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
        for item in self.pipeline.run(self._order.epoch(epoch, first)):
            yield self.as_batch(item)

    def seeds(self) -> list[SeedBatch]:
        """The seeds of the first epoch's batches of full size: what a profile prepares."""
        found = list(self._order.epoch(0))
        return [one for one in found if one.seeds.numel() == found[0].seeds.numel()]

    def as_batch(self, item: Any) -> Batch:
        """What a side has prepared as a step takes it."""
        return self._prepared(item) if isinstance(item, PaddedItem) else self._batch(item)

    def _prepared(self, item: PaddedItem) -> PreparedBatch:
        count = item.layout.seeds
        share = torch.full((1,), count / self._order.seeds.numel(), device=self._device)
        rows, none = torch.arange(count, device=self._device), self._graph.y[:0]
        about = {"shape": ("divided", count), "varies": ("nodes", "features", "hops", "share")}
        given = {"nodes": item.nodes, "features": item.x, "hops": item.hops, "make": self._with_blocks}
        return PreparedBatch(self._x[:0], self._graph.adj, none, rows, share, **given, **about)

    def _with_blocks(self, batch: PreparedBatch) -> Batch:
        assert batch.nodes is not None
        assert batch.features is not None
        nodes = batch.nodes.clamp(0, self._graph.num_nodes - 1).long()  # those beyond the existing ones hold anything
        widths = [indptr.numel() - 1 for indptr, _ in batch.hops] + [nodes.numel()]
        blocks = [
            self._block(indptr, indices, nodes[:width])
            for (indptr, indices), width in zip(batch.hops, widths[1:], strict=True)
        ]
        labelled = nodes[: batch.rows.numel()].to(self._graph.y.device)
        y = self._graph.y.index_select(0, labelled).to(self._device)
        return Batch(batch.features, tuple(reversed(blocks)), y, batch.rows, batch.share)

    def _block(self, indptr: Tensor, indices: Tensor, nodes: Tensor) -> PaddedAdjacency:
        scale, degree = self._sampler.full_degrees
        near = nodes.to(scale.device)
        full = scale.index_select(0, near), degree.index_select(0, near[: indptr.numel() - 1])
        return PaddedAdjacency(indptr, indices, nodes.numel(), full=full)
