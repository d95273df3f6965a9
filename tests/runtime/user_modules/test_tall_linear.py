"""Which products of a user's module become Weft's, and that everything else stays what its author wrote.

That the numbers are the same is in ``interpreted_modules.py``, where the kernels run.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.dry_runs import capture
from tests.runtime.operator_names import Names
from weft.capture.observer import watched_launches
from weft.core.task import Task
from weft.graph.catalog.names import shape_stats
from weft.graph.catalog.shapes import find
from weft.ops.launch.backend import meta_means_gpu
from weft.runtime.modules import layers as tall_products
from weft.runtime.modules.layers import TallLinear, has_own_products

N = 20_000


@contextmanager
def as_on_a_gpu():
    """Tensors on the meta device stand for a GPU's, and kernels are not launched."""
    with meta_means_gpu(), watched_launches(lambda *_: None), TallLinear():
        yield


def meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def products(call):
    """How many of Weft's products ``call`` makes of what it calls."""
    with Names() as names, as_on_a_gpu():
        call()
    return names.met.count("weft::linear")


# ---- what is served ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_layers_of_many_rows(dtype):
    x, layer = meta(N, 64, dtype=dtype), nn.Linear(64, 32, dtype=dtype, device="meta")
    assert products(lambda: layer(x)) == 1
    assert products(lambda: F.linear(x, layer.weight)) == 1
    assert products(lambda: x @ layer.weight.T) == 1
    assert products(lambda: torch.mm(x, meta(64, 8, dtype=dtype))) == 1


def test_weight_gradients_are_wefts():
    x, layer = meta(N, 64, grad=True), nn.Linear(64, 32, device="meta")
    with Names() as names, as_on_a_gpu():
        torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    assert {"weft::weight_grad", "weft::product", "weft::column_sum"} <= set(names.met)


@pytest.mark.parametrize("dims", [(None, 0, 0), (0, 0, 0), (0, None, None)])
def test_layers_of_several_members(dims):
    sizes = ((5000, 64), (32, 64), (32,))
    tensors = [meta(*(() if dim is None else (4,)), *size) for size, dim in zip(sizes, dims, strict=True)]
    assert products(lambda: torch.vmap(F.linear, dims)(*tensors)) == 1
    assert products(lambda: F.linear(meta(5000, 64), meta(32, 64), meta(32))) == 0  # few rows for one alone


@pytest.mark.parametrize("dims", [(0, 0, 0), (None, 0, 0), (0, 0, None)])
@pytest.mark.parametrize("shape", [(5000, 4, 8), (2, 2500, 4, 8)])
def test_groups_of_rows_of_several_members_are_one_product(shape, dims):
    sizes = (shape, (6, 8), (6,))
    tensors = [meta(*(() if dim is None else (4,)), *size) for size, dim in zip(sizes, dims, strict=True)]
    found = []
    assert products(lambda: found.append(torch.vmap(F.linear, dims)(*tensors))) == 1
    assert found[0].shape == (4, *shape[:-1], 6)
    matrix = meta(4, 8, 6)
    assert products(lambda: found.append(torch.vmap(torch.matmul, (dims[0], 0))(tensors[0], matrix))) == 1
    assert found[1].shape == (4, *shape[:-1], 6)


def test_groups_of_rows_with_one_matrix_are_torchs():
    assert products(lambda: F.linear(meta(N, 4, 8), meta(6, 8))) == 0
    assert products(lambda: torch.vmap(F.linear, (0, None))(meta(4, N, 4, 8), meta(6, 8))) == 0
    assert products(lambda: torch.vmap(F.linear)(meta(4, 20, 4, 8), meta(4, 6, 8))) == 0  # few rows


def test_an_input_that_members_share_may_be_wide():
    shared = lambda x, weights: torch.vmap(F.linear, (None, 0))(x, weights)  # noqa: E731
    assert products(lambda: shared(meta(N, 1433), meta(4, 32, 1433))) == 1
    assert products(lambda: torch.vmap(F.linear)(meta(4, N, 1433), meta(4, 32, 1433))) == 0


class Plain(nn.Module):
    """A user's module."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, 32), nn.ReLU(), nn.Linear(32, out_features))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("tasks", [1, 4])
def test_estimates_follow_the_same_products(tasks):
    stats = shape_stats(find("ogbn-arxiv"))
    task = Task(graph="arxiv", model=Plain)
    program = capture(task, stats, "cuda", tasks=tasks).program
    assert not program.note  # followed as it is, not on a small graph
    names = [op.name for op in program.operators]
    assert names.count("weft.linear") == 4  # two layers, in training and in evaluation
    assert names.count("weft.weight_grad") == 2
    assert not any("mm" in name for name in names if name.startswith("aten"))
    on_a_cpu = [op.name for op in capture(task, stats, "cpu", tasks=tasks).program.operators]
    assert not any(name.startswith(("weft.linear", "weft.weight_grad")) for name in on_a_cpu)


# ---- what is left alone ------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A user's kind of tensor."""


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.linear(torch.ones(N, 4), torch.ones(3, 4)),  # on a CPU
        lambda: F.linear(meta(100, 64), meta(32, 64)),
        lambda: F.linear(meta(N, 64), meta(1024, 64)),
        lambda: F.linear(meta(N, 8000), meta(32, 8000)),
        lambda: F.linear(meta(4, N, 64), meta(32, 64)),
        lambda: F.linear(meta(N, 64), meta(64)),
        lambda: F.linear(meta(N, 64, dtype=torch.float64), meta(32, 64, dtype=torch.float64)),
        lambda: F.linear(meta(64, N).t(), meta(32, 64)),
        lambda: meta(N, 64) @ meta(64),
        lambda: meta(64) @ meta(64, 32),
        lambda: meta(64, N) @ meta(N, 64),
        lambda: torch.mm(meta(N, 64), meta(64, 32), out=meta(N, 32)),
        lambda: F.linear(meta(N, 64).as_subclass(Tagged), meta(32, 64)),
        lambda: F.linear(meta(N, 64), meta(32, 64).as_subclass(Tagged)),
        lambda: meta(N, 64) @ meta(64, 32).as_subclass(Tagged),
        lambda: torch.func.grad(lambda w: F.linear(meta(N, 64), w).sum())(meta(32, 64)),
        lambda: torch.func.jvp(lambda w: F.linear(meta(N, 64), w), (meta(32, 64),), (meta(32, 64),)),
        lambda: checkpoint(F.linear, meta(N, 64, grad=True), meta(32, 64), use_reentrant=False),
    ],
)
def test_other_products_are_torchs(call):
    assert products(call) == 0


def test_autocast_is_torchs():
    with patch("torch.is_autocast_enabled", lambda device: device == "cuda"):
        assert products(lambda: F.linear(meta(N, 64), meta(32, 64))) == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: F.linear(meta(N, 64), meta(32, 63)), RuntimeError),
        (lambda: F.linear(meta(N, 64)), TypeError),
        (lambda: F.linear(meta(N, 64), meta(32, 64), scale=2), TypeError),
        (lambda: meta(N, 64) @ meta(63, 32), RuntimeError),
        (lambda: meta(N, 64) @ None, TypeError),
    ],
)
def test_mistakes_are_told_by_torch(call, error):
    with pytest.raises(error) as plain:
        call()
    with pytest.raises(error) as found, as_on_a_gpu():
        call()
    assert str(found.value) == str(plain.value)


# ---- modules that something else has taken over ------------------------------------------------------


def test_which_models_are_looked_at():
    plain = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 3))
    assert has_own_products(plain)
    assert not has_own_products(weft.nn.build("gcn", 9, 3))
    assert not has_own_products(nn.Sequential(torch.jit.trace(plain, torch.ones(2, 9))))
    assert not has_own_products(nn.Sequential(torch.compile(plain, backend="eager")))
    compiled = nn.Linear(9, 3)
    compiled.compile(backend="eager")
    assert not has_own_products(nn.Sequential(compiled))


def test_a_compiled_function_inside_is_torchs(monkeypatch):
    monkeypatch.setattr(tall_products, "on_gpu", lambda tensor: True)
    layer, x, calls = nn.Linear(8, 4), torch.randn(N, 8), []
    monkeypatch.setattr(tall_products, "linear", lambda *given: calls.append(given) or F.linear(*given))
    compiled = torch.compile(lambda x: layer(x).relu(), backend="aot_eager")
    with TallLinear():
        found = compiled(x)
        assert not calls
        layer(x)
        assert calls
    torch.testing.assert_close(found, layer(x).relu())
