"""Users' modules on a GPU: their dense layers run Weft's products and equal torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import stacks
from weft.graph.graph import Graph
from weft.runtime.device.process import matmul_precision, seeded
from weft.runtime.modules.layers import TallLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N = 20_001


class Dense(nn.Module):
    """Dense layers with and without a bias, one of them shared by all members' inputs."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(in_features, 32), nn.Linear(32, 32, bias=False)
        self.weight = nn.Parameter(torch.randn(32, out_features) / 6)

    def forward(self, x):
        h = torch.relu(self.a(x))
        return torch.relu(self.b(h) + h) @ self.weight


def graph_of(nodes: int = N) -> Graph:
    random = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % 5
    x = torch.randn(nodes, 17, generator=random)
    x[torch.arange(nodes), y] += 1.0
    src, dst = (torch.randint(0, nodes, (4 * nodes,), generator=random) for _ in range(2))
    graph = Graph.from_edges(src, dst, nodes, x=x, y=y, name="dense")
    return graph.random_split(train=4000, val=4000, seed=0)


def outcome(layer, tensors, dims):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = torch.vmap(layer, dims)(*leaves) if any(dim is not None for dim in dims) else layer(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("dims", [(None, None, None), (None, 0, 0), (0, 0, 0)], ids=["alone", "shared", "stacked"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_products_are_torchs(dtype, near, dims):
    random = torch.Generator(device="cuda").manual_seed(0)
    sizes = ((N, 48), (24, 48), (24,))
    tensors = [
        torch.randn(*(() if dim is None else (3,)), *size, generator=random, device="cuda").to(dtype)
        for size, dim in zip(sizes, dims, strict=True)
    ]

    def through_weft(*given):
        with TallLinear():
            return F.linear(*given)

    with matmul_precision("fp32"):
        found, exact = outcome(through_weft, tensors, dims), outcome(F.linear, [t.double() for t in tensors], dims)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).abs().max() <= near * theirs.abs().max()


@pytest.mark.parametrize("members", [1, 3])
def test_training_is_recorded_and_the_cpus(members):
    graph = graph_of()
    rates = [{"lr": 0.01 * (member + 1)} for member in range(members)]
    tasks = stacks.tasks_of(graph, rates, model=Dense, epochs=6, eps=1e-3)

    def rows(device):
        with seeded(0, torch.device("cpu")):  # where models are built
            run = stacks.start(tasks, graph, device)
            return run, torch.tensor([progress.rows for progress in run.advance(6)])

    (there, mine), (_, theirs) = rows("cuda"), rows("cpu")
    assert there.recorded, there.notes
    assert len(there.stacks) == 1
    torch.testing.assert_close(mine[..., 0], theirs[..., 0], rtol=1e-3, atol=1e-4)
