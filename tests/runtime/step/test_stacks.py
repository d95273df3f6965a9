"""Stacked equals separate: losses, histories, best and final weights of every member, whatever they differ in.

Tolerance in float32: rtol 1e-4, atol 1e-5 for losses and weights after a dozen epochs. Adam's eps is 1e-3 to 1e-4
here: with 1e-8 a gradient that is zero but for rounding (of the destination's weights in GATv2 as long as all slopes of
a row agree, of a bias before a BatchNorm) becomes a whole step in either direction, alone as in a stack.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from tests import stacks
from tests.graphs_for_tests import tiny_graph, with_relations
from tests.stacks import MODELS, best_tensors, start
from weft.graph.graph import Graph
from weft.runtime.device.process import seeded
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.members import CannotStack
from weft.runtime.step.stack import Stack

CPU = torch.device("cpu")

# What members of one stack may differ in.
MEMBERS = [
    {"seed": 1, "lr": 0.01, "dropout": 0.5, "epochs": 10, "eps": 1e-3},
    {"seed": 2, "lr": 0.05, "dropout": 0.0, "epochs": 13, "schedule": "cosine", "weight_decay": 1e-2, "eps": 1e-4},
    {"seed": 2, "lr": 0.05, "dropout": 0.3, "epochs": 12, "betas": (0.8, 0.99), "label_smoothing": 0.2, "eps": 1e-3},
    {"seed": 3, "lr": 0.1, "dropout": 0.6, "epochs": 13, "optimizer": "adamw", "weight_decay": 0.1, "patience": 3,
     "schedule": "linear", "warmup": 2, "eps": 1e-3},
    {"seed": 4, "lr": 0.02, "dropout": 0.2, "epochs": 9, "eval_every": 4, "eps": 1e-4},
]  # fmt: skip


def tasks_of(graph, members=MEMBERS, **shared):
    if not isinstance(shared.get("model", "gcn"), str):  # the rates of a user's module are its own
        members = [{key: value for key, value in member.items() if key != "dropout"} for member in members]
    return stacks.tasks_of(graph, members, **shared)


def final(run, index):
    """The latest weights of a member at its true size."""
    member = run.members[index]
    buffers = {name: member.tensor(f"buffer.{name}") for name in member.stack.state.buffers}
    named = member.stack.members.named(member.slot, member.tensor("flat"), buffers)
    return {name: value for name, value in named.items() if name not in buffers}


def assert_as_alone(run, together, index, graph, rtol=1e-4, atol=1e-5):
    task = run.tasks[index]
    with seeded(task.seed, CPU):  # as the engine does, for modules that draw from torch's generator
        alone = start([task], graph)
        (progress,) = alone.advance(task.epochs)
    mine = together[index]
    assert (mine.end, mine.best_epoch) == (progress.end, progress.best_epoch)
    close = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(torch.tensor(mine.rows), torch.tensor(progress.rows), **close, equal_nan=True)
    for mine, theirs in ((best_tensors(run, index), best_tensors(alone, 0)), (final(run, index), final(alone, 0))):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


def check(tasks, graph, **tolerance):
    run = start(tasks, graph)
    assert len(run.stacks) == 1, run.notes
    together = run.advance(100)
    for index in range(len(tasks)):
        assert_as_alone(run, together, index, graph, **tolerance)
    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_models_and_norms(model, norm):
    graph = tiny_graph()
    check(tasks_of(graph, model=model, norm=norm), graph)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sparse", [False, True])
def test_input_dropout_of_every_member(model, sparse):
    graph = tiny_graph(sparse=sparse)
    members = [
        {**member, "input_dropout": rate} for member, rate in zip(MEMBERS, (0.5, 0.0, 0.3, 0.6, 0.1), strict=True)
    ]
    check(tasks_of(graph, members, model=model), graph)


@pytest.mark.parametrize("model", MODELS)
def test_sparse_features(model):
    graph = tiny_graph(sparse=True, weighted=True)
    check(tasks_of(graph, model=model, feature_norm="row"), graph)


@pytest.mark.parametrize("aggregator", ["mean", "max", "sum"])
@pytest.mark.parametrize("sparse", [False, True])
def test_aggregators(aggregator, sparse):
    graph = tiny_graph(sparse=sparse)
    check(tasks_of(graph, model="sage", aggregator=aggregator, residual=True), graph)


@pytest.mark.parametrize("model", MODELS)
def test_residuals_three_layers_and_decay_of_the_first(model):
    graph = tiny_graph()
    check(tasks_of(graph, model=model, layers=3, residual=True, decay="first", out_heads=2), graph)


def test_one_layer():
    graph = tiny_graph()
    check(tasks_of(graph, model="gat", layers=1), graph)


def test_sgd_with_momenta_of_their_own():
    graph = tiny_graph()
    members = [{"momentum": momentum, "lr": 0.2, "seed": seed, "weight_decay": 0.01 * seed, "epochs": 8 + seed}
               for seed, momentum in enumerate((0.0, 0.5, 0.9))]  # fmt: skip
    check(tasks_of(graph, members, optimizer="sgd"), graph)


def test_many_labels():
    graph = tiny_graph(multilabel=True)
    members = [{key: value for key, value in m.items() if key != "label_smoothing"} for m in MEMBERS]
    for metric in ("auto", "roc_auc", "f1_macro"):
        check(tasks_of(graph, members, metric=metric), graph)


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16(model):
    """Sums in another order round to other bfloat16 numbers: 8 bits of mantissa, and a few epochs of Adam."""
    graph = tiny_graph()
    tasks = [task.with_values(epochs=4, lr=0.01, warmup=0) for task in tasks_of(graph, model=model, precision="bf16")]
    run = start(tasks, graph)
    together = run.advance(4)
    for index, task in enumerate(tasks):
        (alone,) = start([task], graph).advance(4)
        assert [row[0] for row in together[index].rows] == pytest.approx([row[0] for row in alone.rows], abs=0.02)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("norm", [None, "batch"])
def test_widths_are_padded(model, norm):
    """Hidden 2 (or 4), 8 and 16 in one stack; everybody's model comes back at its true size."""
    graph = tiny_graph()
    widths = (4, 8, 16) if model in ("gat", "gatv2") else (3, 8, 16)
    members = [{**member, "hidden": width} for member, width in zip(MEMBERS, (*widths, widths[0], 8), strict=True)]
    tasks = tasks_of(graph, members, model=model, norm=norm, layers=3, residual=True)
    run = check(tasks, graph)
    for index, task in enumerate(tasks):
        mine = run.best_model(index)
        alone = start([task], graph)
        alone.advance(task.epochs)
        theirs = alone.best_model(0)
        assert {n: p.shape for n, p in mine.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
        assert run.num_parameters(index) == sum(p.numel() for p in mine.parameters())
        with torch.no_grad():
            logits = mine(graph.x, graph.adj), theirs(graph.x, graph.adj)
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_padded_weights_stay_zero():
    graph = tiny_graph()
    tasks = tasks_of(graph, [{**MEMBERS[0], "hidden": 3}, {**MEMBERS[3], "hidden": 16}], norm="batch")
    run = start(tasks, graph)
    run.advance(20)
    padding = run.members[0].slot.padding
    flat = run.stacks[0].state.flat[0]
    outside = torch.ones_like(flat, dtype=torch.bool)
    outside[padding._flat] = False
    assert outside.any()
    assert not flat[outside].any()
    assert flat[~outside].any()


def test_layer_norm_is_never_padded():
    graph = tiny_graph()
    run = start(tasks_of(graph, [{"hidden": 4}, {"hidden": 8}], norm="layer", epochs=3), graph)
    assert len(run.stacks) == 2
    assert "their widths differ, and layer norm takes its mean over the whole width" in run.notes[0]
    together = run.advance(3)
    for index in range(2):
        assert_as_alone(run, together, index, graph)


def test_without_validation_nodes():
    graph = tiny_graph()
    graph = graph.with_splits(train=graph.train)
    check(tasks_of(graph), graph)


def test_on_a_graph_with_hubs():
    graph = weft.load("demo")
    members = [{**member, "epochs": 4, "warmup": 0} for member in MEMBERS]
    for model in ("gcn", "gat"):
        check(tasks_of(graph, members, model=model), graph)


@st.composite
def random_graphs(draw):
    nodes = draw(st.integers(6, 25))
    pair = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    edges = torch.tensor(draw(st.lists(pair, max_size=60)), dtype=torch.int64).reshape(-1, 2)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(nodes, draw(st.integers(1, 5)), generator=random)
    y = torch.arange(nodes) % 3
    graph = Graph.from_edges(*edges.T, nodes, x=x, y=y, directed=draw(st.booleans()), name="random")
    return with_relations(graph.random_split(train=3, val=2, seed=0))


@settings(max_examples=25, deadline=None)
@given(graph=random_graphs(), model=st.sampled_from(MODELS), norm=st.sampled_from([None, "batch"]))
def test_on_random_graphs(graph, model, norm):
    members = [
        {"seed": seed, "lr": 0.01 * (seed + 1), "dropout": 0.2 * seed, "hidden": 4 * (1 + seed % 2), "epochs": 3 + seed}
        for seed in range(3)
    ]
    check(tasks_of(graph, members, model=model, norm=norm, eps=1e-2), graph, atol=1e-4)


# ---- what the step reads -----------------------------------------------------------------------------


def test_the_first_aggregation_is_shared_by_members_and_stacks(monkeypatch):
    graph = tiny_graph()
    made = []
    aggregate = weft.nn.GCN.first_aggregate
    monkeypatch.setattr(weft.nn.GCN, "first_aggregate", lambda *a: made.append(1) or aggregate(*a))
    tasks = [*tasks_of(graph), *tasks_of(graph, MEMBERS[:2], layers=3)]
    run = start(tasks, graph, stacks=((0, 1, 2, 3, 4), (5, 6)))
    assert len(made) == 1
    monkeypatch.undo()
    together = run.advance(100)
    for index in range(len(tasks)):
        assert_as_alone(run, together, index, graph)


def test_who_drops_the_input_does_not_share_a_constant_aggregation():
    graph = tiny_graph()
    tasks = tasks_of(graph, [MEMBERS[0], {**MEMBERS[1], "input_dropout": 0.5}])
    run = start(tasks, graph, first_layer="once")
    together = run.advance(100)
    for index in range(2):
        assert_as_alone(run, together, index, graph)


# ---- modules of one's own ----------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's module: BatchNorm of torch, no dropout."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.Linear(8, out_features)

    def forward(self, x, adj):
        hidden = torch.relu(self.bn(weft.ops.spmm(adj.gcn(), self.a(x))))
        return weft.ops.spmm(adj.gcn(), self.b(hidden))


class Replaces(nn.Module):
    """Puts a new tensor in place of its buffer instead of changing it."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.a = nn.Linear(in_features, out_features)
        self.register_buffer("mean", torch.zeros(out_features))

    def forward(self, x):
        out = self.a(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out - self.mean


class Drops(Plain):
    """Draws from torch's own generator."""

    def forward(self, x, adj):
        return super().forward(x * torch.bernoulli(torch.full_like(x, 0.5)) * 2 if self.training else x, adj)


class Asks(Plain):
    """Looks at its data."""

    def forward(self, x, adj):
        out = super().forward(x, adj)
        return out if float(out.detach().sum()) > 0 else 2 * out


class WithClock(nn.Module):
    """Weft's own dropout in a user's module."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.drop, self.a = weft.nn.Dropout(0.5), nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.a(self.drop(x))


@pytest.mark.parametrize("module", [Plain, Replaces, WithClock])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_module_of_the_users_own_is_stacked(module, sparse):
    graph = tiny_graph(sparse=sparse)
    run = check(tasks_of(graph, model=module), graph)
    assert [note.split(":")[0] for note in run.notes] == (["features made dense"] if sparse else [])
    x = graph.x.to_dense() if sparse else graph.x
    for index in range(len(MEMBERS)):
        model = run.best_model(index)
        assert isinstance(model, module)
        assert not model.training
        logits = model(x) if module is not Plain else model(x, graph.adj)
        best = run.poll()[index]
        smoothing = MEMBERS[index].get("label_smoothing", 0.0)
        loss = nn.functional.cross_entropy(logits[graph.val], graph.y[graph.val], label_smoothing=smoothing).item()
        assert loss == pytest.approx(best.rows[best.best_epoch][run.stacks[0].columns.index("val_loss")], abs=1e-4)
    run.advance(1)  # it goes on, whatever was done to the models that were given away


def test_one_module_given_to_all_as_an_object():
    graph = tiny_graph()
    torch.manual_seed(3)
    module = Plain(graph.num_features, graph.num_classes)
    check(tasks_of(graph, model=module), graph)


def test_lazy_modules():
    graph = tiny_graph()

    def factory(inputs, outputs):
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(outputs))

    check(tasks_of(graph, MEMBERS[:3], model=factory), graph)


@pytest.mark.parametrize(("module", "reason"), [(Drops, "randomness"), (Asks, "does not run for several at once")])
def test_modules_that_cannot_be_stacked_train_side_by_side(module, reason):
    graph = tiny_graph()
    tasks = tasks_of(graph, model=module)
    run = start(tasks, graph)
    assert len(run.stacks) == len(tasks)
    assert reason in run.notes[0]
    together = run.advance(100)
    for index in range(len(tasks)):
        assert_as_alone(run, together, index, graph)


def test_parameters_that_do_not_train_must_be_equal():
    class Frozen(Plain):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.a.weight.requires_grad_(False)

    graph = tiny_graph()
    run = start(tasks_of(graph, MEMBERS[:2], model=Frozen, epochs=2), graph)
    assert "parameters that do not train differ" in run.notes[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": 3}, "layers"),
        ({"model": "sage"}, "model"),
        ({"norm": "batch"}, "norm"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"metric": "f1_macro"}, "metric"),
    ],
)
def test_tasks_that_differ_in_more_than_numbers(change, reason):
    graph = tiny_graph()
    tasks = tasks_of(graph, [{}, change], epochs=3)
    with pytest.raises(CannotStack, match=reason):
        Stack(tasks, Inputs(graph))
    run = start(tasks, graph)
    assert len(run.stacks) == 2
    together = run.advance(3)
    for index in range(2):
        assert_as_alone(run, together, index, graph)


# ---- trouble -----------------------------------------------------------------------------------------


def test_a_member_that_diverges_does_not_touch_its_neighbours():
    """Bit for bit: the same group with a sound member in its place gives the others the same numbers."""
    graph = tiny_graph()
    for model, norm in (("gcn", "batch"), ("sage", None), ("gat", None)):
        sound = tasks_of(graph, model=model, norm=norm)
        wild = list(sound)
        wild[1] = wild[1].with_values(lr=1e30, schedule="constant")
        runs = [start(tasks, graph) for tasks in (sound, wild)]
        looks = [run.advance(100) for run in runs]
        assert not all(map(math.isfinite, looks[1][1].rows[-1]))
        assert looks[1][1].end < wild[1].epochs
        assert all(map(math.isfinite, looks[0][1].rows[-1]))
        for index in (0, 2, 3, 4):
            assert str(looks[0][index]) == str(looks[1][index])  # as text, in which NaN equals NaN
            for name in runs[0].stacks[0].state.tensors():
                mine, other = (run.members[index].tensor(name) for run in runs)
                assert torch.equal(mine.nan_to_num(-9), other.nan_to_num(-9)), name
        assert all(torch.isfinite(value).all() for value in best_tensors(runs[1], 1).values())


def test_weights_stay_once_a_members_epochs_are_over():
    graph = tiny_graph()
    for optimizer in ("adam", "adamw", "sgd"):
        members = [{"epochs": 3, "momentum": 0.9}, {"epochs": 9, "momentum": 0.9}]
        run = start(tasks_of(graph, members, optimizer=optimizer, weight_decay=0.1), graph)
        run.advance(3)
        before = final(run, 0)
        before = {name: value.clone() for name, value in before.items()}
        run.advance(6)
        assert all(torch.equal(value, before[name]) for name, value in final(run, 0).items())
        assert len(run.poll()[0].rows) == 3
        assert not math.isnan(run.poll()[1].rows[-1][0])


def test_progress_of_a_period():
    graph = tiny_graph()
    run = start(tasks_of(graph, [{"epochs": 3}, {"epochs": 9}]), graph)
    run.advance(2)
    short, long = run.advance(4)
    assert (short.first, len(short.rows), short.end) == (2, 1, 3)
    assert (long.first, len(long.rows), long.end) == (2, 4, 9)
    short, long = run.advance(100)
    assert (len(short.rows), len(long.rows)) == (0, 3)
    assert run.epoch == 9


class Normed(nn.Module):
    """Weft's batch norm, which knows whether it runs for several, between plain layers."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first, self.norm = weft.nn.GCNConv(in_features, 8), weft.nn.BatchNorm(8)
        self.last = weft.nn.GCNConv(8, out_features)

    def forward(self, x, adj):
        return self.last(torch.relu(self.norm(self.first(x, adj))), adj)


def test_modules_with_wefts_batch_norm_are_one_stack():
    graph = tiny_graph()
    run = start(tasks_of(graph, model=Normed), graph)
    assert len(run.stacks) == 1
    assert not run.notes
