"""DividedSampled: sampled batches that host threads and the trainer prepare together, as a division says.

Shapes: S seeds, M node capacity, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.batches.division.executor import DividedPipeline
from weft.batches.division.preparers import Gpu, Hardware, PaddedItem, Parts
from weft.batches.sampled import DeviceBatch, Sampled, Sampling
from weft.batches.sampler import SeedBatch, padded_block
from weft.batches.source import Batch, SourceRequest
from weft.core.division import Division

SPARE_SLOTS = 2  # beyond the division's, for a profile that runs before it


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
        return self.make(self)


class DividedSampled(Sampled):
    """Batches in their order, by whichever side; :meth:`divide` changes the division between two epochs.

    ``hardware``: what prepares batches with the host (None: the GPU).
    """

    def __init__(
        self, request: SourceRequest, sampling: Sampling, division: Division, hardware: Hardware | None = None
    ) -> None:
        self._expected: int | None = None
        self._listed: dict[int, list[SeedBatch]] = {}  # batches of the next epoch, once they were listed
        # Padded batches of the host have no relations; blocks that are not padded have.
        captured = sampling.captured and not request.graph.num_relations
        super().__init__(request, replace(sampling, captured=captured))
        self.hardware: Hardware = hardware or Gpu()
        self.slots = max(division.pinned_batches, division.workers + SPARE_SLOTS)
        degrees = "sampled" if request.subgraph or self._apart else "full"
        parts = Parts(self._graph, self._sampler, self.store, degrees, self.slots, self._captured)
        preparers = self.hardware.preparers(parts)
        # A captured step samples and reads the device's own batches itself.
        inside = (lambda seeds: self._device_batch(seeds.epoch, seeds.batch)) if self._captured else None
        self.divided = DividedPipeline(division, preparers.host, preparers.device, preparers.clock, inside)

    @property
    def division(self) -> Division:
        """Of the next epoch."""
        return self.divided.division

    @property
    def overlaps(self) -> bool:
        """Whether the device, preparing all batches by itself, makes the next one while one trains."""
        return super().overlaps and self._alone

    @property
    def _alone(self) -> bool:
        """Whether the GPU prepares all batches by itself, in captured steps."""
        return self._captured and self.division.kind == "sequential"

    def divide(self, division: Division) -> None:
        """Divide batches otherwise from the next epoch on; host memory stays within what was reserved."""
        self.divided.division = replace(division, host_buffer=min(division.host_buffer, self.slots - 1))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first`` on; they depend on (sampling seed, epoch, batch) alone."""
        if self._alone:
            self.close()  # what a division before had begun
            yield from super().batches(epoch, first)
            return
        now = self._listed.get(epoch) or self._seeds.on_host(epoch)
        self._listed = {}
        if self._expected is not None and self.division.elastic:
            self._listed[self._expected] = self._seeds.on_host(self._expected)
        yield from map(self.as_batch, self.divided.run(now[first:], self._listed.get(self._expected or 0, [])))

    def expect(self, epoch: int | None) -> None:
        """Epoch ``epoch`` comes after the one that is trained next, so that the host may begin it; None: none does."""
        self._expected = epoch

    def close(self) -> None:
        """No epoch follows: end threads of the host that have begun one."""
        self.divided.close()

    def quiet(self) -> AbstractContextManager[None]:
        """While a step is captured: no other thread prepares batches."""
        return self.divided.quiet()

    def whole_step(self) -> Batch | None:
        """A batch that the GPU samples, reads and trains on in one step; None if steps are not captured."""
        return self._device_batch(0, 0) if self._captured else None

    def seeds(self) -> list[SeedBatch]:
        """The seeds of the first epoch's batches of full size: what a profile prepares."""
        batches = self._seeds.on_host(0)
        return [batch for batch in batches if batch.seeds.numel() == batches[0].seeds.numel()]

    def as_batch(self, item: Any) -> Batch:
        """A prepared item as a step takes it."""
        if isinstance(item, DeviceBatch):
            return item
        if not isinstance(item, PaddedItem):
            return self._batch(item)
        count = item.layout.seeds
        return PreparedBatch(
            self._x[:0],
            self._graph.adj,
            self._graph.y[:0],
            torch.arange(count, device=self._device),
            torch.full((1,), count / self._order.seeds.numel(), device=self._device),
            shape=("divided", item.layout),
            varies=("nodes", "features", "hops", "share"),
            nodes=item.nodes,
            features=item.x,
            hops=item.hops,
            make=self._with_blocks,
        )

    def _with_blocks(self, batch: PreparedBatch) -> Batch:
        nodes, count = batch.nodes, self._graph.num_nodes
        widths = [indptr.numel() - 1 for indptr, _ in batch.hops[1:]] + [nodes.numel()]
        blocks = [
            padded_block(indptr, indices, nodes[:width], count, lambda: self._sampler.full_degrees)
            for (indptr, indices), width in zip(batch.hops, widths, strict=True)
        ]
        labelled = nodes[: batch.rows.numel()].clamp(0, count - 1).long().to(self._graph.y.device)
        y = self._graph.y.index_select(0, labelled).to(self._device)
        return Batch(batch.features, tuple(reversed(blocks)), y, batch.rows, batch.share)
