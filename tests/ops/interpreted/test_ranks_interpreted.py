"""Ranks whose sums go through the kernels of a GPU, which read a peer's rows by address: the weights of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.dist import cases
from tests.dist.cases import CPU, Case, train_alone, train_sharded
from tests.dist.test_cuda_ranks import CASES
from weft.dist import sharded_adjacency
from weft.dist.launch import start_ranks
from weft.dist.ranks import Ranks

EPOCHS = 2
NAMES = ("gcn", "hub", "weights by tiles", "stacked by tiles", "gcn, fetched")


def short(case: Case) -> Case:
    return replace(case, epochs=EPOCHS, tasks=tuple(task.with_values(epochs=EPOCHS) for task in case.tasks))


def with_kernels(ranks: Ranks, chosen: list[Case]) -> None:
    """What the other rank runs."""
    sharded_adjacency.use_triton = lambda tensor: True
    cases.work(ranks, chosen)


def test_two_ranks_with_the_kernels_of_a_gpu(monkeypatch):
    chosen = [short(case) for case in CASES if case.name in NAMES]
    assert len(chosen) == len(NAMES)
    calls = []
    kernels = {"pieces": sharded_adjacency.sharded_spmm_triton, "tiles": sharded_adjacency.streamed_spmm_triton}

    def noted(way):
        return lambda *arguments: calls.append(way) or kernels[way](*arguments)

    with start_ranks(2, CPU, with_kernels, (chosen,), timeout=240) as here:
        monkeypatch.setattr(sharded_adjacency, "use_triton", lambda tensor: True)
        monkeypatch.setattr(sharded_adjacency, "sharded_spmm_triton", noted("pieces"))
        monkeypatch.setattr(sharded_adjacency, "streamed_spmm_triton", noted("tiles"))
        found = [train_sharded(here, case) for case in chosen]
        here.gather_objects(None)
    assert set(calls) == {"pieces", "tiles"}
    for case, trained in zip(chosen, found, strict=True):
        torch.testing.assert_close(trained["weights"], train_alone(case)["weights"], rtol=1e-4, atol=1e-5)
