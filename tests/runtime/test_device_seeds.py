"""Seeds and clocks that are made once per epoch are those of every batch by itself."""

from __future__ import annotations

import pytest
import torch

from weft.batches.sampled import DeviceSeeds
from weft.batches.sampler import SeedOrder
from weft.ops.sampling.reference import make_clock

SEEDS = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:43]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, -5, 2**64 - 1])
def test_seeds_and_clocks_of_every_batch(device, seed):
    order = SeedOrder(SEEDS, 8, seed)
    found = DeviceSeeds(SeedOrder(SEEDS.to(device), 8, seed), seed, torch.device(device))
    for epoch in (0, 3, 0):  # made anew, also for an epoch that was there before
        batches = list(order.epoch(epoch))
        for one in batches:
            ids, clock = found.of(epoch, one.batch)
            assert ids.dtype == torch.int32
            assert ids.tolist() == one.seeds.tolist()
            assert clock.tolist() == make_clock(seed, epoch, one.batch).tolist()
        assert len(ids) == 43 % 8


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_batches_in_host_memory(device):
    order = SeedOrder(SEEDS, 8, 2)
    found = DeviceSeeds(SeedOrder(SEEDS.to(device), 8, 2), 2, torch.device(device)).on_host(4)
    expected = list(order.epoch(4))
    assert [(one.epoch, one.batch) for one in found] == [(4, batch) for batch in range(6)]
    assert all(torch.equal(a.seeds, b.seeds) for a, b in zip(found, expected, strict=True))
    assert found[0].seeds.dtype == torch.int64
