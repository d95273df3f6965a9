"""from_pyg of modules with layers of PyG inside: equal to the original, forward and gradient, to 1e-5."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from weft.core.errors import SpecError
from weft.nn import from_pyg
from weft.nn.pyg.convert import possible_swaps, restore, swap
from weft.nn.pyg.edges import remember
from weft.ops import Adjacency

pyg = pytest.importorskip("torch_geometric.nn")
NODES, WIDTH = 37, 8


@contextmanager
def recorded_calls():
    """By the id of a swapped layer that is called inside: whether all of its calls were Weft's."""
    from weft.nn.pyg.swapped_layers import Swapped

    found, covered = {}, Swapped.covered

    def noted(self, *given, **more):
        adj = covered(self, *given, **more)
        found[id(self)] = found.get(id(self), True) and adj is not None
        return adj

    Swapped.covered = noted
    try:
        yield found
    finally:
        Swapped.covered = covered


def edges(seed: int = 0) -> torch.Tensor:
    """Directed edges in no order, with self loops, and nodes without any."""
    draw = torch.Generator().manual_seed(seed)
    index = torch.randint(0, NODES - 3, (2, 150), generator=draw)
    return torch.unique(index, dim=1)[:, torch.randperm(torch.unique(index, dim=1).shape[1], generator=draw)]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, WIDTH))


LAYERS = {
    "gcn": lambda i: pyg.GCNConv(i, WIDTH),
    "gcn weighted": lambda i: pyg.GCNConv(i, WIDTH, bias=False),
    "sage": lambda i: pyg.SAGEConv(i, WIDTH),
    "sage max": lambda i: pyg.SAGEConv(i, WIDTH, aggr="max"),
    "sage sum": lambda i: pyg.SAGEConv(i, WIDTH, aggr="sum", normalize=True),
    "sage project": lambda i: pyg.SAGEConv(i, WIDTH, project=True),
    "sage without root": lambda i: pyg.SAGEConv(i, WIDTH, root_weight=False, bias=False),
    "gin": lambda i: pyg.GINConv(mlp(i), eps=0.3, train_eps=True),
    "gin fixed": lambda i: pyg.GINConv(mlp(i), eps=0.2),
    "gat": lambda i: pyg.GATConv(i, WIDTH // 2, heads=2),
    "gat mean": lambda i: pyg.GATConv(i, WIDTH, heads=3, concat=False, residual=True),
    "gatv2": lambda i: pyg.GATv2Conv(i, WIDTH // 4, heads=4),
    "gatv2 shared": lambda i: pyg.GATv2Conv(i, WIDTH, share_weights=True, bias=False),
    "graph": lambda i: pyg.GraphConv(i, WIDTH),
    "graph mean": lambda i: pyg.GraphConv(i, WIDTH, aggr="mean", bias=False),
    "sg": lambda i: pyg.SGConv(i, WIDTH, K=2),
}
KEPT = {
    "cheb": lambda i: pyg.ChebConv(i, WIDTH, K=2),
    "tag": lambda i: pyg.TAGConv(i, WIDTH),
    "improved": lambda i: pyg.GCNConv(i, WIDTH, improved=True),
    "gat mean of messages": lambda i: pyg.GATConv(i, WIDTH, aggr="mean"),
}


class Net(nn.Module):
    """Two to four layers, with what people put around them."""

    def __init__(self, kinds: list[str], jump: bool, width: int = 6) -> None:
        super().__init__()
        makers = LAYERS | KEPT
        widths = [width] + [WIDTH] * (len(kinds) - 1)
        self.convs = nn.ModuleList(makers[kind](i) for kind, i in zip(kinds, widths, strict=True))
        self.weighted = [kind in ("gcn weighted", "graph", "sg") for kind in kinds]
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in kinds)
        self.jump = pyg.JumpingKnowledge("cat") if jump else None
        self.smooth = pyg.APPNP(K=2, alpha=0.2)
        self.head = nn.Linear(WIDTH * (len(kinds) if jump else 1), 3)

    def forward(self, x, edge_index, edge_weight=None):
        found = []
        for conv, norm, weighted in zip(self.convs, self.norms, self.weighted, strict=True):
            x = conv(x, edge_index, edge_weight) if weighted else conv(x, edge_index)
            x = torch.relu(norm(x))
            found.append(x)
        return self.smooth(self.head(self.jump(found) if self.jump is not None else x), edge_index, edge_weight)


def results(model: nn.Module, x: torch.Tensor, *more: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = model(x, *more)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(mine) == len(theirs)
    whole = max(float(one.abs().max()) for one in theirs[1:] if one is not None)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert float((one - other).abs().max()) <= 1e-5 * max(float(other.abs().max()), 1e-2 * whole)


@pytest.mark.parametrize("seed", range(20))
def test_random_modules_equal_their_originals(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [draw.choice(list(LAYERS if place % 3 else LAYERS | KEPT)) for place in range(draw.randint(2, 4))]
    torch.manual_seed(seed)
    theirs, index = Net(kinds, jump=draw.random() < 0.5, width=draw.choice([3, 6, 30])), edges(seed)
    x = torch.randn(NODES, theirs.convs[0].in_channels if hasattr(theirs.convs[0], "in_channels") else 6)
    if isinstance(theirs.convs[0], pyg.GINConv):
        x = torch.randn(NODES, theirs.convs[0].nn[0].in_features)
    weight = torch.rand(index.shape[1]) if draw.random() < 0.5 else None
    ours = from_pyg(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    swapped = sum(kind in LAYERS for kind in kinds) + 1
    assert sum(type(layer).__name__.startswith("Weft") for layer in ours.modules()) == swapped
    assert_equal(results(ours, x, index, weight), results(theirs, x, index, weight))
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def as_sparse(index: torch.Tensor) -> torch.Tensor:
    """The transposed adjacency, as PyG's layers take it too."""
    return torch.sparse_coo_tensor(index.flip(0), torch.ones(index.shape[1]), (NODES, NODES)).coalesce()


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_computes_with_weft(kind: str) -> None:
    torch.manual_seed(0)
    theirs = Net([kind], jump=False)
    ours, index, x = from_pyg(theirs), edges(), torch.randn(NODES, 6)
    with recorded_calls() as calls:
        mine = results(ours, x, index)
    assert list(calls.values()) == [True, True]
    assert_equal(mine, results(theirs, x, index))


def test_models_of_pyg_with_jumping_knowledge_are_converted_layer_by_layer() -> None:
    theirs = pyg.models.GCN(6, 8, 3, out_channels=4, jk="max", norm="batch_norm")
    ours, x, index = from_pyg(theirs), torch.randn(NODES, 6), edges()
    assert [type(conv).__name__ for conv in ours.convs] == ["WeftGCNConv"] * 3
    assert_equal(results(ours, x, index), results(theirs, x, index))


@pytest.mark.parametrize(
    "call",
    [
        lambda conv, x, index: conv((x, x), index),
        lambda conv, x, index: conv(x, index, size=(NODES, NODES)),
        lambda conv, x, index: conv(x, as_sparse(index)),
        lambda conv, x, index: conv(x, index[:, ::2]),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's own remarks on sparse tensors
def test_calls_that_weft_does_not_cover_are_pygs(call) -> None:
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.SAGEConv(6, 4)

    theirs, x, index = Holder(), torch.randn(NODES, 6), edges()
    torch.testing.assert_close(call(from_pyg(theirs).conv, x, index), call(theirs.conv, x, index))


def test_attention_weights_are_returned_by_pyg() -> None:
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GATConv(6, 4, heads=2)

    theirs, x, index = Holder(), torch.randn(NODES, 6), edges()
    _, (_, alpha) = from_pyg(theirs).conv(x, index, return_attention_weights=True)
    torch.testing.assert_close(alpha, theirs.conv(x, index, return_attention_weights=True)[1][1])


def test_learned_edge_weights_keep_their_gradient() -> None:
    theirs, x, index = Net(["gcn weighted"], jump=False), torch.randn(NODES, 6), edges()
    weight = torch.rand(index.shape[1], requires_grad=True)
    (mine,) = torch.autograd.grad(from_pyg(theirs)(x, index, weight).square().sum(), weight)
    (true,) = torch.autograd.grad(theirs(x, index, weight).square().sum(), weight)
    torch.testing.assert_close(mine, true)


def test_edges_changed_in_place_are_read_again() -> None:
    theirs, x, index = Net(["gcn"], jump=False), torch.randn(NODES, 6), edges()
    ours = from_pyg(theirs)
    ours(x, index)
    index.copy_(index.roll(1, 0))
    torch.testing.assert_close(ours(x, index), theirs(x, index), rtol=1e-4, atol=1e-5)


def test_a_layer_that_builds_nothing_leaves_unknown_edges_to_pyg() -> None:
    model, x, index = Net(["gcn"], jump=False), torch.randn(NODES, 6), edges()
    swap(model, possible_swaps(model, draws=False).layers, builds=False)
    with recorded_calls() as calls:
        model(x, index)
    assert set(calls.values()) == {False}
    order = torch.argsort(index[1], stable=True)
    rows = torch.bincount(index[1], minlength=NODES).cumsum(0)
    adj = Adjacency(torch.cat([rows.new_zeros(1), rows]).int(), index[0][order].int())
    with recorded_calls() as calls:
        model(x, remember(index[:, order].clone(), adj))
    assert set(calls.values()) == {True}


def test_restored_and_copied_and_pickled_modules_are_as_before() -> None:
    theirs, x, index = Net(["gat", "sage"], jump=True), torch.randn(NODES, 6), edges()
    ours = from_pyg(theirs)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(x, index), ours(x, index))
    restore(ours)
    assert [type(layer) for layer in ours.modules()] == [type(layer) for layer in theirs.modules()]
    assert torch.equal(ours(x, index), theirs(x, index))


def test_what_draws_masks_of_its_own_is_swapped_on_request_alone() -> None:
    model = Net(["gat"], jump=False)
    model.convs[0].dropout = 0.5
    (reason,) = possible_swaps(model, draws=False).kept.values()
    assert "dropout=0.5" in reason
    ours, x, index = from_pyg(model), torch.randn(NODES, 6), edges()
    torch.testing.assert_close(ours.eval()(x, index), copy.deepcopy(model).eval()(x, index), rtol=1e-4, atol=1e-5)
    ours.train()
    assert not torch.equal(ours(x, index), ours(x, index))
    assert list(ours.state_dict()) == list(model.state_dict())


def test_a_subclass_hooks_and_replaced_methods_are_kept() -> None:
    class Own(pyg.GCNConv):
        def message(self, x_j, edge_weight):
            return 2 * x_j

    hooked, replaced = pyg.GCNConv(6, 4), pyg.GCNConv(6, 4)
    hooked.register_message_forward_hook(lambda *given: None)
    replaced.message = lambda x_j, edge_weight: x_j
    inner = pyg.GCNConv(6, 4)
    inner.lin.register_forward_hook(lambda *given: None)
    module = nn.ModuleList([Own(6, 4), hooked, replaced, inner])
    assert not possible_swaps(module, draws=True).layers
    with pytest.raises(SpecError, match="nothing in it can be converted"):
        from_pyg(module)


def test_a_module_without_layers_of_pyg_is_refused() -> None:
    with pytest.raises(SpecError, match="Linear: nothing in it can be converted: it has no layer of PyG"):
        from_pyg(nn.Linear(3, 3))
