"""Every model on a GPU: the same outputs, gradients and dropout masks as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.nn.examples import NODES
from tests.nn.test_contract import MODELS, check_stack_equals_separate, drive, features, loss_of, make
from weft.graph import SparseFeatures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gpu_equals_cpu(name: str, sparse: bool, directed) -> None:
    x = SparseFeatures.from_torch(features()) if sparse else features()
    here = make(name, input_dropout=0.3)
    there = copy.deepcopy(here).cuda()
    drive(here, 1, 4)
    for module in there.modules():
        if "clock" in module._buffers:
            module._buffers["clock"] = torch.tensor([1, 4], device="cuda")
    out, expected = there(x.to("cuda"), directed.adj.to("cuda")), here(x, directed.adj)
    assert out.shape == (NODES, 4)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    loss_of(out.cpu()).backward(), loss_of(expected).backward()
    for (path, p), q in zip(there.named_parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=path: f"{n}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_stacked_equals_separate_on_the_gpu(name: str, directed) -> None:
    x, adj = features().cuda(), directed.adj.to("cuda")
    with torch.device("cuda"):
        check_stack_equals_separate(name, x, adj, 3)
