"""DividedSampled: sampled batches that host threads and the trainer prepare together, as a division says.

Shapes: S seeds, M node capacity, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.batches.block import PaddedAdjacency
from weft.batches.division.executor import DividedPipeline
from weft.batches.division.preparers import Gpu, Hardware, PaddedItem, Parts
from weft.batches.sampled import DeviceBatch, Sampled, Sampling
from weft.batches.sampler import SeedBatch
from weft.batches.source import Batch, SourceRequest
from weft.core.division import EPOCH, Division, PhaseTime

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
    """Batches in their order, whoever prepares them; :meth:`divide` changes who does between two epochs."""

    def __init__(self, request: SourceRequest, about: DividedSampling) -> None:
        self._overlaps = False
        self._expected: int | None = None
        self._listed: dict[int, list[SeedBatch]] = {}  # batches of the next epoch, once they were listed
        # Padded batches of the host have no relations; blocks that are not padded have.
        captured = about.sampling.captured and not request.graph.num_relations
        super().__init__(request, replace(about.sampling, captured=captured))
        self.hardware: Hardware = about.hardware or Gpu(self._captured)
        self.slots = max(about.division.pinned_batches, about.division.workers + SPARE_SLOTS)
        degrees = "sampled" if request.subgraph or self._apart else "full"
        self._buckets = about.division.buckets if self._captured else 1  # batches of their own sizes are not padded
        parts = Parts(self._graph, self._sampler, self.store, degrees, self.slots, self._captured, self._buckets)
        sides = self.hardware.sides(parts)
        division = replace(about.division, buckets=self._buckets)
        inside = self._inside if self._captured and self._buckets == 1 else None
        self.divided = DividedPipeline(division, sides.host, sides.device, sides.clock, inside)

    @property
    def division(self) -> Division:
        """Of the next epoch."""
        return self.divided.division

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """Whether the device, preparing all batches by itself, makes the next one while one trains."""
        return self._overlaps and self._alone

    @overlaps.setter
    def overlaps(self, overlaps: bool) -> None:
        self._overlaps = overlaps

    @property
    def _alone(self) -> bool:
        """Whether the GPU prepares all batches by itself, in captured steps: not before it knows which of several."""
        return self._captured and self.division.kind == "sequential" and self._buckets == 1

    def divide(self, division: Division) -> None:
        """Divide batches otherwise from the next epoch on; host memory stays within what was reserved, sizes stay."""
        buffer = min(division.host_buffer, self.slots - 1)
        self.divided.division = replace(division, host_buffer=buffer, buckets=self._buckets)

    def phases(self) -> Mapping[str, PhaseTime]:
        """Measured phases and whole epochs since the last call.

        Of a device that prepares all batches in captured steps no phases are known.
        """
        found = self.divided.log.times()
        self.divided.log.clear()
        return found

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
        begin = self.divided.clock.mark()
        if self._alone:
            self.close()  # what a division before had begun
            yield from super().batches(epoch, first)
        else:
            yield from map(self.as_batch, self.divided.run(*self._with_next(epoch, first)))
        if not first:
            self.divided.log.add_marks(EPOCH, begin, self.divided.clock.mark())

    def expect(self, epoch: int | None) -> None:
        """Epoch ``epoch`` comes after the one that is trained next, so that the host may begin it; None: none does."""
        self._expected = epoch

    def close(self) -> None:
        """No epoch follows: end threads of the host that have begun one."""
        self.divided.close()

    def _with_next(self, epoch: int, first: int) -> tuple[list[SeedBatch], list[SeedBatch]]:
        """The batches of an epoch from ``first`` on, and those of the epoch after it, if one is expected."""
        now = self._listed.get(epoch) or self._seeds.on_host(epoch)
        self._listed = {}
        if self._expected is not None and self.division.elastic:
            self._listed[self._expected] = self._seeds.on_host(self._expected)
        return now[first:], self._listed.get(self._expected or 0, [])

    def quiet(self) -> AbstractContextManager[None]:
        """While a step is captured: no other thread prepares batches."""
        return self.divided.quiet()

    def whole_step(self) -> Batch | None:
        """A batch that the GPU samples, reads and trains on in one step; None if it never prepares all of them so."""
        if not self._captured or self._buckets > 1:
            return None
        return self._device_batch(0, 0)

    def seeds(self) -> list[SeedBatch]:
        """The seeds of the first epoch's batches of full size: what a profile prepares."""
        found = self._seeds.on_host(0)
        return [one for one in found if one.seeds.numel() == found[0].seeds.numel()]

    def as_batch(self, item: Any) -> Batch:
        """What a side has prepared as a step takes it."""
        if isinstance(item, DeviceBatch):
            return item
        return self._prepared(item) if isinstance(item, PaddedItem) else self._batch(item)

    def _inside(self, seeds: SeedBatch) -> DeviceBatch:
        """A batch that the training step samples and reads itself, captured as where the GPU prepares all of them."""
        return self._device_batch(seeds.epoch, seeds.batch)

    def _prepared(self, item: PaddedItem) -> PreparedBatch:
        count = item.layout.seeds
        share = torch.full((1,), count / self._order.seeds.numel(), device=self._device)
        rows, none = torch.arange(count, device=self._device), self._graph.y[:0]
        about = {"shape": ("divided", item.layout), "varies": ("nodes", "features", "hops", "share")}
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
        def full() -> tuple[Tensor, Tensor]:
            scale, degree = self._sampler.full_degrees
            return scale.index_select(0, nodes), degree.index_select(0, nodes[: indptr.numel() - 1])

        return PaddedAdjacency(indptr, indices, nodes.numel(), full=full)
