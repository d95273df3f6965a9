"""Hardware: operators of the registry, and the sides that carry them out for a graph.

``Gpu`` is what Weft has. Other hardware is any object with ``name``, ``registry()`` and ``sides(parts)``, such as a
:class:`weft.flow.division.thread_accelerator.ThreadAccelerator`. A ``profile_key`` tells it from other hardware of the
same name, so that what was measured of one is not taken for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.core.division import Registry, built_in
from weft.core.machine.huge_pages import advise_huge_pages
from weft.flow.division.exact_batches import ExactDevice, ExactHost
from weft.flow.division.padded_batches import PaddedDevice, PaddedHost, layouts_of
from weft.flow.division.sides import DeviceClock, DeviceSide, HostSide, clock_of
from weft.flow.features.feature_store import FeatureStore
from weft.flow.sampling.sampler import NeighbourSampler
from weft.graph.data.graph import Graph
from weft.ops.csr.adjacency import Adjacency


@dataclass(frozen=True)
class Parts:
    """What batches are made of: a graph, and a sampler and a store that make them where they are trained.

    ``slots``: prepared batches that may be in host memory at once. ``padded``: batches of ``buckets`` sizes, for
    captured steps.
    """

    graph: Graph
    sampler: NeighbourSampler
    store: FeatureStore
    degrees: str
    slots: int
    padded: bool = False
    buckets: int = 1

    def host_sampler(self) -> NeighbourSampler:
        """The same batches, sampled on the CPU."""
        graph = self.graph if self.graph.adj.device.type == "cpu" else _edges_in_huge_pages(self.graph.to("cpu"))
        degrees = "sampled" if self.padded else self.degrees  # padded batches look degrees up on the device
        about = {"degrees": degrees, "subgraph": self.sampler.subgraph, "seed": self.sampler.seed}
        about["edge_attr"] = self.sampler.edge_attr
        return NeighbourSampler(graph, self.sampler.fanouts, device="cpu", **about)

    def host_features(self) -> Tensor:
        """Features in host memory."""
        x = self.store.x
        return x if x.device.type == "cpu" else x.cpu()


@dataclass(frozen=True)
class Sides:
    """Who prepares batches, and the clock of the trainer."""

    host: HostSide | None
    device: DeviceSide | None
    clock: DeviceClock


class Hardware(Protocol):
    """What trains and prepares batches."""

    name: str

    def registry(self) -> Registry:
        """Its operators beside Weft's own."""

    def sides(self, parts: Parts) -> Sides:
        """Its operators on ``parts``."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU and the CPUs of its host; padded batches are prepared beside training."""

    padded: bool = True
    name: str = "gpu"

    def registry(self) -> Registry:
        """Weft's own."""
        return built_in(beside=self.padded)

    def sides(self, parts: Parts) -> Sides:
        """The host reads graph and features where they lie in its memory, or copies of its own."""
        device, clock = parts.store.device, clock_of(parts.store.device)
        about = (parts.host_sampler(), parts.host_features(), device, parts.slots)
        if not parts.padded:
            return Sides(ExactHost(*about), ExactDevice(parts.sampler, parts.store), clock)
        layouts = layouts_of(parts.sampler, parts.buckets)
        host = PaddedHost(*about, layouts, parts.store)
        return Sides(host, PaddedDevice(parts.sampler, parts.store, layouts), clock)


def exact_sides(parts: Parts) -> tuple[ExactHost, ExactDevice]:
    """Both sides on the CPU, for hardware that a thread stands in for."""
    cpu = torch.device("cpu")
    host = ExactHost(parts.host_sampler(), parts.host_features(), cpu, parts.slots)
    return host, ExactDevice(parts.sampler, parts.store)


def _edges_in_huge_pages(graph: Graph) -> Graph:
    """The same with its edges in memory that is read faster in random places."""
    adj = graph.adj
    indptr, indices = (_in_huge_pages(one) for one in (adj.indptr, adj.indices))
    return graph._changed(adj=Adjacency(indptr, indices, adj.num_cols, weight=adj.weight, symmetric=adj.symmetric))


def _in_huge_pages(values: Tensor) -> Tensor:
    copy = torch.empty(values.shape, dtype=values.dtype)
    advise_huge_pages(copy.data_ptr(), copy.numel() * copy.element_size())
    return copy.copy_(values)
