"""What every model promises, run over all of them: a new model joins by a line in MODELS."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from tests.nn.examples import NODES, RELATIONS, make_example
from weft.core.errors import InputError
from weft.graph import SparseFeatures
from weft.nn import assign_sites, build, reset_parameters

IN, HIDDEN, OUT = 10, 8, 4
MODELS = {
    "gcn": {},
    "gcn batch": {"norm": "batch", "residual": True},
    "gcn wide": {"hidden": 12, "layers": 3},
    "sage": {},
    "sage max": {"aggregator": "max"},
    "sage layer": {"norm": "layer", "residual": True, "aggregator": "sum"},
    "gin": {},
    "gin eps": {"train_eps": True, "eps": 0.1},
    "gin batch": {"norm": "batch"},
    "gat": {"heads": 4},
    "gat batch": {"heads": 2, "out_heads": 2, "norm": "batch", "residual": True},
    "gatv2": {"heads": 4},
    "rgcn": {"num_relations": RELATIONS},
    "rgcn bases": {"num_relations": RELATIONS, "bases": 2, "norm": "batch", "residual": True},
    "rgcn blocks": {"num_relations": RELATIONS, "blocks": 2, "layers": 3},
}


def make(name: str, seed: int = 0, **changes) -> nn.Module:
    options = {"hidden": HIDDEN, "dropout": 0.5} | MODELS[name] | changes
    model = build(name.split()[0], IN, OUT, **options)
    reset_parameters(model, seed)
    return model


def features() -> Tensor:
    """Mostly zeros, so that dense and sparse are both natural."""
    x = torch.randn(NODES, IN, generator=torch.Generator().manual_seed(3))
    return torch.where(x > 0.3, x, 0.0)


def drive(model: nn.Module, seed: int, step: int) -> None:
    """Hang a clock in every module that draws, as a runner does."""
    for module in model.modules():
        if "clock" in module._buffers:
            module._buffers["clock"] = torch.tensor([seed, step])


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_shape_and_gradients_reach_every_parameter(name: str, graph) -> None:
    model = make(name)
    drive(model, 1, 0)
    out = model(features(), graph.adj)
    assert out.shape == (NODES, OUT)
    loss_of(out).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


def test_same_seed_same_weights(name: str) -> None:
    first, second, other = make(name, 5), make(name, 5), make(name, 6)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_clock_decides_the_masks(name: str, directed) -> None:
    x, outs = features(), []
    for clock in ((1, 0), (1, 0), (1, 1), (2, 0)):
        model = make(name)
        drive(model, *clock)
        outs.append(model(x, directed.adj).detach())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[3])


def test_without_a_clock_torch_seeds_the_masks(name: str, directed) -> None:
    x, outs = features(), []
    for seed in (1, 1, 2):
        model = make(name)
        torch.manual_seed(seed)
        outs.append(model(x, directed.adj).detach())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_evaluation_has_no_randomness(name: str, directed) -> None:
    model = make(name, input_dropout=0.5).eval()
    x = features()
    state = torch.get_rng_state()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert torch.equal(model(x, directed.adj), model(x, directed.adj))
    assert torch.equal(state, torch.get_rng_state())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_shared_first_aggregation_equals_plain(name: str, graph) -> None:
    model, x = make(name), features()
    drive(model, 1, 0)
    first = model.first_aggregate(x, graph.adj)
    if name.startswith("gat"):
        assert first is None
        return
    assert not first.requires_grad
    plain = copy.deepcopy(model)
    loss_of(plain(x, graph.adj)).backward()
    loss_of(model(x, graph.adj, first=first)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


def test_first_aggregation_is_not_offered_where_the_input_changes(name: str, directed) -> None:
    x = features()
    assert make(name, input_dropout=0.5).first_aggregate(x, directed.adj) is None
    assert make(name).first_aggregate(SparseFeatures.from_torch(x), directed.adj) is None
    with pytest.raises(InputError, match=r"input_dropout=0\.5"):
        make(name, input_dropout=0.5)(x, directed.adj, first=x)


def test_sparse_features_equal_dense_ones(name: str, directed) -> None:
    x = features()
    dense, sparse = make(name), make(name)
    drive(dense, 1, 0), drive(sparse, 1, 0)
    a, b = dense(x, directed.adj), sparse(SparseFeatures.from_torch(x), directed.adj)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    loss_of(a).backward(), loss_of(b).backward()
    for p, q in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)


def test_input_dropout_on_sparse_features_drops_stored_values(name: str, directed) -> None:
    x = features()
    model = make(name, input_dropout=0.4)
    drive(model, 1, 0)
    sparse = SparseFeatures.from_torch(x)
    dropped = model.input_dropout(sparse).values
    kept = dropped != 0
    assert 0 < int(kept.sum()) < dropped.numel()
    torch.testing.assert_close(dropped[kept], sparse.values[kept] / 0.6)
    same = SparseFeatures(sparse.matrix.scaled(weight=dropped))
    out = model(sparse, directed.adj)
    model.input_dropout.p = 0.0
    torch.testing.assert_close(out, model(same, directed.adj), rtol=1e-5, atol=1e-5)


def test_state_dict_round_trip(name: str, directed) -> None:
    model, other, x = make(name, 1), make(name, 2), features()
    model(x, directed.adj)
    state = model.state_dict()
    assert not any("clock" in key or "rate" in key for key in state)
    other.load_state_dict(state)
    assert torch.equal(model.eval()(x, directed.adj), other.eval()(x, directed.adj))


def test_wrong_width_is_named(name: str, directed) -> None:
    with pytest.raises(InputError, match="in_features=10"):
        make(name)(torch.randn(NODES, IN + 1), directed.adj)
    with pytest.raises(InputError, match="x is NoneType"):
        make(name)(None, directed.adj)


# ---- tasks that share a step -----------------------------------------------------------------------------


def stacked_step(
    models: list[nn.Module], seeds: list[int], rates: list[float], x, adj, first: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs ``[T, N, C]``, gradients and buffers of T models run as one, each with its seed and rate."""
    params, buffers = stack_module_state(models)
    tasks = len(models)
    clocks = torch.tensor([[seed, 7] for seed in seeds])
    for key in buffers:
        if key.endswith("clock"):
            buffers[key] = clocks
        if key.endswith("rate"):
            buffers[key] = torch.tensor(rates)
    base = copy.deepcopy(models[0])

    def forward(params_1, buffers_1):
        return functional_call(base, (params_1, buffers_1), (x, adj), {"first": first})

    out = vmap(forward)(params, buffers)
    loss = sum(loss_of(out[t]) for t in range(tasks))
    grads = torch.autograd.grad(loss, list(params.values()))
    return out.detach(), dict(zip(params, grads, strict=True)), buffers


def single_step(model: nn.Module, seed: int, rate: float, x, adj) -> Tensor:
    drive(model, seed, 7)
    for module in model.modules():
        if "rate" in module._buffers:
            module._buffers["rate"] = torch.tensor(rate)
    out = model(x, adj)
    loss_of(out).backward()
    return out.detach()


def check_stack_equals_separate(name: str, x, adj, tasks: int, first: bool = False, **changes) -> None:
    models = [make(name, seed, **changes) for seed in range(tasks)]
    seeds, rates = list(range(10, 10 + tasks)), [0.2 + 0.1 * t for t in range(tasks)]
    shared = models[0].first_aggregate(x, adj) if first else None
    outs, grads, buffers = stacked_step(models, seeds, rates, x, adj, shared)
    for t in range(tasks):
        expected = single_step(models[t], seeds[t], rates[t], x, adj)
        torch.testing.assert_close(outs[t], expected, rtol=1e-5, atol=1e-5)
        for path, parameter in models[t].named_parameters():
            torch.testing.assert_close(grads[path][t], parameter.grad, rtol=1e-5, atol=1e-5)
        for path, buffer in models[t].named_buffers():
            if "running" in path:
                torch.testing.assert_close(buffers[path][t], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tasks", [1, 3])
def test_stacked_equals_separate(name: str, tasks: int, directed) -> None:
    """Each task's masks, outputs, gradients and statistics are its own, however many share the step."""
    check_stack_equals_separate(name, features(), directed.adj, tasks)


def test_stacked_with_sparse_features_and_input_dropout(name: str, directed) -> None:
    x = SparseFeatures.from_torch(features())
    check_stack_equals_separate(name, x, directed.adj, 2, input_dropout=0.3)


def test_stacked_with_dense_input_dropout(name: str, directed) -> None:
    check_stack_equals_separate(name, features(), directed.adj, 2, input_dropout=0.3)


def test_stacked_with_shared_first_aggregation(name: str, directed) -> None:
    check_stack_equals_separate(name, features(), directed.adj, 2, first=True)


def test_sites_are_numbered_once_each(name: str) -> None:
    model = nn.Sequential(make(name), make(name))
    assign_sites(model)
    sites = [module.site for module in model.modules() if "clock" in module._buffers]
    assert sites == list(range(len(sites)))


def test_reduced_precision(name: str, directed) -> None:
    model = make(name).bfloat16()
    drive(model, 1, 0)
    assert all(m.rate.dtype == torch.float32 for m in model.modules() if "rate" in m._buffers)
    out = model(features().bfloat16(), directed.adj)
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_empty_graph_still_trains(name: str) -> None:
    model = make(name)
    loss_of(model(features(), make_example("empty").adj)).backward()
