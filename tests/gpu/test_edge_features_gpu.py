"""Features of edges in sampled batches on a GPU: sampled there, or on the host, the training of a CPU."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.runtime import test_sampled_modules as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
rich = cases.rich


@pytest.mark.parametrize("fanout", [cases.FANOUTS, (5, -1)])
@pytest.mark.parametrize("loaded", [False, True])
def test_the_training_of_a_cpu(rich, fanout, loaded):
    shared = {"graph": rich, "model": cases.OfEdgesOf, "mode": "sampled", "fanout": fanout, "batch": 32, "epochs": 2}
    options = {"options": weft.RunOptions(batches=list(cases.rich_batches(rich)))} if loaded else {}
    cpu, gpu = (weft.run(weft.Task(**shared), device=on, progress=False, **options) for on in ("cpu", "cuda"))
    assert gpu.history["val_loss"] == pytest.approx(cpu.history["val_loss"], rel=2e-3)


def test_a_sampler_on_either_device(rich):
    found = []
    for device in ("cpu", "cuda"):
        sampler = weft.batches.NeighbourSampler(rich.to(device), cases.FANOUTS, subgraph=True, edge_attr=True)
        found.append(sampler.sample(rich.train[:9].to(device)))
    assert torch.equal(found[0].edge_attr, found[1].edge_attr.cpu())
    assert torch.equal(found[0].edge_index, found[1].edge_index.cpu())
