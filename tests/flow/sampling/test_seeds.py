"""The order of the seeds: a permutation, another one each epoch, the same one when resumed."""

from __future__ import annotations

import pytest
import torch

from weft.batches import SeedOrder
from weft.core.errors import InputError


def test_every_seed_once_per_epoch_and_a_partial_last_batch():
    order = SeedOrder(torch.arange(100, 203), 10, seed=4)
    batches = list(order.epoch(0))
    assert [b.seeds.numel() for b in batches] == [10] * 10 + [3]
    assert len(order) == 11
    assert torch.cat([b.seeds for b in batches]).sort().values.tolist() == list(range(100, 203))


def test_epochs_and_seeds_differ_and_repeat():
    ids = torch.arange(1000)
    first, second = (torch.cat([b.seeds for b in SeedOrder(ids, 64, seed=1).epoch(e)]) for e in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, SeedOrder(ids, 64, seed=2).permutation(0))
    assert torch.equal(first, SeedOrder(ids, 999, seed=1).permutation(0))
    assert abs(float((first[:500].double()).mean()) - 499.5) < 60


@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (0, 3), (1, 0), (1, 4), (2, 5)])
def test_resumed_anywhere(epoch, batch):
    order = SeedOrder(torch.arange(50), 10)
    every = [(b.epoch, b.batch, b.seeds.tolist()) for b in order.epochs(3)]
    rest = [(b.epoch, b.batch, b.seeds.tolist()) for b in order.epochs(3, epoch, batch)]
    assert rest == every[epoch * 5 + batch :]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SeedOrder(torch.arange(5), 0), "batch=0 must be at least 1"),
        (lambda: SeedOrder(torch.arange(0), 4), "no training seeds"),
        (lambda: list(SeedOrder(torch.arange(5), 2).epoch(0, 7)), "batch 7 must be from 0 to 3"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
