"""Hardware: operators of the registry, and the sides that carry them out for a graph.

``Gpu`` is what Weft has. Other hardware is any object with ``name``, ``registry()`` and ``sides(parts)``, such as a
:class:`weft.flow.division.thread_accelerator.ThreadAccelerator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.core.division import Registry, built_in
from weft.flow.division.exact_batches import ExactDevice, ExactHost
from weft.flow.division.padded_batches import PaddedDevice, PaddedHost
from weft.flow.division.sides import DeviceClock, DeviceSide, HostSide, clock_of
from weft.flow.feature_store import FeatureStore
from weft.flow.sampler import NeighbourSampler
from weft.graph.data.graph import Graph
from weft.ops.csr.adjacency import Adjacency


@dataclass(frozen=True)
class Parts:
    """What batches are made of: a graph and features (on the host or on ``device``), and how to sample.

    ``slots``: prepared batches that may be in host memory at once. ``padded``: batches of one size, for captured steps.
    """

    graph: Graph
    x: Tensor
    fanouts: Sequence[int]
    seed: int
    device: torch.device
    slots: int
    degrees: str = "full"
    subgraph: bool = False
    padded: bool = False

    def sampler(self, graph: Graph, device: torch.device) -> NeighbourSampler:
        """A sampler of ``graph`` that makes batches on ``device``."""
        about = {"degrees": self.degrees, "subgraph": self.subgraph, "seed": self.seed}
        return NeighbourSampler(graph, self.fanouts, device=device, **about)


@dataclass(frozen=True)
class Sides:
    """Who prepares batches, and the clock of what trains."""

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
        """The host's copy of graph and features is pinned, so that the GPU can read it as well."""
        host = torch.device("cpu")
        graph, x = parts.graph, parts.x
        near = pinned_graph(graph) if graph.device.type == "cpu" else pinned_graph(graph.to("cpu"))
        rows = x if x.device.type == "cpu" else x.cpu()
        rows = rows if rows.is_pinned() or parts.device.type != "cuda" else rows.pin_memory()
        reach = graph if graph.device == parts.device else near
        table = x if x.device == parts.device else rows
        sampler = parts.sampler(reach, parts.device)
        clock = clock_of(parts.device)
        if parts.padded:
            return Sides(
                PaddedHost(parts.sampler(near, host), rows, parts.device, parts.slots),
                PaddedDevice(sampler, table),
                clock,
            )
        exact = ExactHost(parts.sampler(near, host), rows, parts.device, parts.slots)
        return Sides(exact, ExactDevice(sampler, FeatureStore(table, parts.device)), clock)


def exact_sides(parts: Parts) -> tuple[ExactHost, ExactDevice]:
    """Both sides on the CPU, for hardware that a thread stands in for."""
    cpu = torch.device("cpu")
    host, device = (parts.sampler(parts.graph, cpu) for _ in range(2))
    return ExactHost(host, parts.x, cpu, parts.slots), ExactDevice(device, FeatureStore(parts.x))


def pinned_graph(graph: Graph) -> Graph:
    """The same graph with its edges in pinned memory, where there is a GPU to read them."""
    if not torch.cuda.is_available() or graph.adj.indices.is_pinned():
        return graph
    found, adj = copy(graph), graph.adj
    found.adj = Adjacency(adj.indptr.pin_memory(), adj.indices.pin_memory(), adj.num_cols, weight=adj.weight)
    return found
