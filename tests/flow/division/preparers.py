"""Preparers for tests: real sampling of a small graph, at the pace of a fake accelerator."""

from __future__ import annotations

import torch

from examples.thread_accelerator import PacedDevice, PacedHost, ThreadAccelerator
from tests.flow.graphs import random_graph
from weft.batches import FeatureStore, NeighbourSampler, SeedOrder
from weft.batches.division.executor import DividedPipeline
from weft.batches.division.preparers import ExactDevice, ExactHost
from weft.core.division import Division

CPU = torch.device("cpu")


def order(batch_size: int = 3) -> SeedOrder:
    """14 batches of 40 seeds."""
    return SeedOrder(random_graph().train, batch_size, seed=1)


def sides(slots: int = 64):
    """A host and a device that sample the same graph."""
    graph = random_graph()
    host, device = (NeighbourSampler(graph, [4, 3], seed=2, degrees="full") for _ in range(2))
    return ExactHost(host, graph.x, CPU, slots), ExactDevice(device, FeatureStore(graph.x))


def accelerated(division: Division, delays=None) -> tuple[ThreadAccelerator, DividedPipeline]:
    """A pipeline over a fake accelerator; ``division.trainer`` is its name."""
    fake = ThreadAccelerator(division.trainer, delays)
    host, device = sides(division.pinned_batches or 1)
    return fake, DividedPipeline(division, PacedHost(fake, host), PacedDevice(fake, device))
