"""Users' modules in sampled training take the steps of a plain PyTorch loop over the same batches."""

from __future__ import annotations

import copy
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.batches import NeighbourSampler, SeedOrder, from_pyg
from weft.batches.loaded import Loaded
from weft.batches.sampled import Sampling
from weft.core.errors import InputError, SpecError, TrainingError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.nn import SAGEConv
from weft.runtime.group import GroupRun

CPU = torch.device("cpu")
FANOUTS, BATCH, EPOCHS = (5, 3), 32, 2


@pytest.fixture(scope="module")
def graph():
    return citation(num_nodes=400, num_edges=3000, num_features=12, num_classes=4, seed=1)


class Pyg(nn.Module):
    """Two layers over ``edge_index``, as PyG's users write them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 8), nn.Linear(16, 4)

    def aggregate(self, x, edge_index):
        src, dst = edge_index
        count = torch.zeros(x.shape[0]).index_add(0, dst, torch.ones(dst.numel())).clamp(min=1)
        return torch.cat([x, torch.zeros_like(x).index_add(0, dst, x[src]) / count[:, None]], 1)

    def forward(self, x, edge_index):
        h = torch.relu(self.first(self.aggregate(x, edge_index)))
        return self.second(self.aggregate(h, edge_index))


class Blocks(nn.Module):
    """Two of Weft's layers with a block each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(12, 8), SAGEConv(8, 4)

    def forward(self, x, blocks):
        blocks = blocks if isinstance(blocks, tuple) else (blocks, blocks)
        return self.second(torch.relu(self.first(x, blocks[0])), blocks[1])


def task_of(graph, model, **changes) -> Task:
    return Task(
        graph=graph, model=model, mode="sampled", fanout=FANOUTS, batch=BATCH, lr=0.02, epochs=EPOCHS, **changes
    )


def trained(graph, model, source) -> dict[str, torch.Tensor]:
    """The weights after two epochs in a group, which is left and entered again in the middle of an epoch."""
    run = GroupRun([task_of(graph, model)], graph, Plan(("0",)), CPU, make_source=source)
    leave = iter([False, True])
    run.advance(1, lambda: next(leave, False))
    run.advance(EPOCHS)
    stack = run.stacks[0]
    layout = stack.members.layout
    return dict(zip(layout.names, layout.views(stack.state.flat[0]), strict=True))


def plain_loop(model, batches) -> dict[str, torch.Tensor]:
    """The weights after a step of Adam per batch; ``batches`` yields ``(x, edges or blocks, labels of the seeds)``."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for x, structure, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x, structure)[: y.numel()], y).backward()
        optimizer.step()
    return dict(model.named_parameters())


def sampled_batches(graph, subgraph: bool):
    """The batches of two epochs, as ``flow`` makes them."""
    degrees = "sampled" if subgraph else "full"
    sampler = NeighbourSampler(graph, FANOUTS, subgraph=subgraph, degrees=degrees)
    for one in SeedOrder(graph.train, BATCH).epochs(EPOCHS):
        batch = sampler.sample(one.seeds, one.epoch, one.batch)
        yield batch, graph.x[batch.input_nodes.long()], graph.y[one.seeds]


def assert_same_weights(mine, theirs) -> None:
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)


def test_over_edge_index_the_local_subgraph(graph):
    torch.manual_seed(0)
    model = Pyg()
    expected = plain_loop(model, ((x, b.edge_index, y) for b, x, y in sampled_batches(graph, True)))
    assert_same_weights(trained(graph, model, Sampling(FANOUTS, BATCH)), expected)


def test_over_blocks(graph):
    torch.manual_seed(0)
    model = Blocks()
    blocks = ((x, tuple(o.adjacency() for o in b.blocks), y) for b, x, y in sampled_batches(graph, False))
    assert_same_weights(trained(graph, model, Sampling(FANOUTS, BATCH)), plain_loop(model, blocks))


# ---- what edges have ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rich():
    """A graph whose edges have a weight and two features; they tell the ends of an edge, so that their order shows."""
    plain = citation(num_nodes=200, num_edges=1400, num_features=12, num_classes=4, seed=1)
    src, dst = plain.edge_index()
    attr, weight = torch.stack([src, dst], 1) / 200, (src * 7 + dst) % 13 / 13 + 0.1
    splits = {"train": plain.train, "val": plain.val, "test": plain.test}
    options = {"edge_attr": attr, "edge_weight": weight, "directed": True}
    return weft.Graph.from_edges(src, dst, num_nodes=200, x=plain.x, y=plain.y, **splits, **options)


class OfEdges(nn.Module):
    """Messages by weights and features of the edges."""

    def __init__(self):
        super().__init__()
        self.first, self.edge, self.last = nn.Linear(12, 8), nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x, edge_index, edge_weight, edge_attr):
        src, dst = edge_index
        h = torch.relu(self.first(x))
        messages = h[src] * torch.tanh(self.edge(edge_attr)) * edge_weight[:, None]
        return self.last(h + torch.zeros_like(h).index_add(0, dst, messages))


class OfData(OfEdges):
    def forward(self, data):
        return super().forward(data.x, data.edge_index, data.edge_weight, data.edge_attr)


def rich_batches(graph):
    """Batches of two epochs with what the graph has at the edges that they were sampled from, as PyG's have it."""
    sampler = NeighbourSampler(graph, FANOUTS, subgraph=True)
    for one in SeedOrder(graph.train, BATCH).epochs(EPOCHS):
        b = sampler.sample(one.seeds, one.epoch, one.batch)
        own = {"edge_weight": graph.edge_weight[b.edges], "edge_attr": graph.edge_attr[b.edges]}
        own |= {"n_id": b.nodes.long(), "edge_index": b.edge_index, "batch_size": b.num_seeds}
        yield SimpleNamespace(x=graph.x[b.nodes.long()], y=graph.y[b.nodes.long()], **own)


def rich_loop(model, batches) -> dict[str, torch.Tensor]:
    """The weights after a step of Adam per batch."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for b in batches:
        optimizer.zero_grad()
        logits = OfEdges.forward(model, b.x, b.edge_index, b.edge_weight, b.edge_attr)
        F.cross_entropy(logits[: b.batch_size], b.y[: b.batch_size]).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("model", [OfEdges, OfData])
@pytest.mark.parametrize("loaded", [False, True])
def test_weights_and_features_of_edges_are_those_of_the_sampled_edges(rich, model, loaded):
    torch.manual_seed(0)
    net, source, batches = model(), Sampling(FANOUTS, BATCH), list(rich_batches(rich))
    if loaded:
        first = batches[: len(batches) // EPOCHS]
        source, batches = partial(Loaded, loader=first, sampling=source), first * EPOCHS
    expected = rich_loop(net, batches)
    assert_same_weights(trained(rich, net, source), expected)


def test_a_sweep_over_features_of_edges_is_its_members_alone(rich):
    def run(work):
        return weft.run(work, progress=False, device="cpu")

    about = {"model": OfEdgesOf, "mode": "sampled", "fanout": FANOUTS, "batch": BATCH, "epochs": EPOCHS}
    together = run(weft.Sweep(rich, lr=[0.02, 0.01], **about))
    assert together[0].plan.join == "stacked"
    alone = run(weft.Task(graph=rich, lr=0.02, **about))
    assert together["lr=0.02"].history["val_loss"] == pytest.approx(alone.history["val_loss"], rel=1e-4)


class OfEdgesOf(OfEdges):
    def __init__(self, in_features, out_features):
        super().__init__()


@pytest.mark.parametrize("name", ["edge_weight", "edge_attr"])
def test_a_loader_without_what_the_model_is_given_is_refused(rich, name):
    batches = list(rich_batches(rich))
    for batch in batches:
        delattr(batch, name)
    with pytest.raises(InputError, match=f"a batch of the loader has no {name}, which the graph has"):
        weft.run(task_of(rich, OfEdges()), options=weft.RunOptions(batches=batches), progress=False, device="cpu")


def test_a_loader_with_features_of_another_width_is_refused(rich):
    batches = list(rich_batches(rich))
    for batch in batches:
        batch.edge_attr = batch.edge_attr[:, :1]
    with pytest.raises(InputError, match="edge_attr of a batch is"):
        weft.run(task_of(rich, OfEdges()), options=weft.RunOptions(batches=batches), progress=False, device="cpu")


def test_labels_of_a_loader_have_the_shape_of_the_graphs(rich):
    def final(change):
        batches = list(rich_batches(rich))
        for batch in batches:
            batch.y = change(batch.y)
        return weft.run(
            task_of(rich, net), options=weft.RunOptions(batches=batches), progress=False, device="cpu"
        ).history["loss"][-1]

    torch.manual_seed(0)
    net = OfEdges()
    assert final(lambda y: y[:, None].int()) == final(lambda y: y)
    with pytest.raises(InputError, match=r"y of a batch is \[\d+, 2\]; that of the graph is \[200\]"):
        final(lambda y: torch.stack([y, y], 1))


def test_a_sampler_gives_features_of_edges_where_there_are_some(graph, rich):
    for direction in ("in", "out"):
        about = {"subgraph": True, "edge_attr": True, "direction": direction}
        b = NeighbourSampler(rich, FANOUTS, **about).sample(rich.train[:5])
        assert torch.equal(b.edge_attr, (b.nodes[b.edge_index].T / 200).float())
    with pytest.raises(InputError, match="a graph whose edges have features"):
        NeighbourSampler(graph, FANOUTS, subgraph=True, edge_attr=True)


# ---- batches of a loader -----------------------------------------------------------------------------


def hand_made(graph, features: bool = True, make=SimpleNamespace):
    """A list of batches with the attributes that PyG's have."""
    found = []
    for b, x, _ in list(sampled_batches(graph, True))[: -(-graph.train.numel() // BATCH)]:
        nodes = b.nodes.long()
        own = {"x": x, "y": graph.y[nodes]} if features else {}
        ids = torch.arange(b.num_seeds)
        found.append(make(n_id=nodes, edge_index=b.edge_index, batch_size=b.num_seeds, input_id=ids, **own))
    return found


@pytest.mark.parametrize("features", [True, False])
def test_batches_of_a_loader(graph, features):
    torch.manual_seed(0)
    model, batches = Pyg(), hand_made(graph, features)
    fed = [(graph.x[b.n_id], b.edge_index, graph.y[b.n_id[: b.batch_size]]) for b in batches]
    assert_same_weights(
        trained(graph, model, partial(Loaded, loader=batches, sampling=Sampling(FANOUTS, BATCH))),
        plain_loop(model, fed * EPOCHS),
    )


def test_batches_of_pyg_data(graph):
    data = pytest.importorskip("torch_geometric.data")
    local = from_pyg(hand_made(graph, make=data.Data)[0])
    assert local.num_seeds == BATCH
    assert torch.equal(local.x, graph.x[local.nodes.long()])


@pytest.mark.parametrize("model", [Pyg, "sage", "gcn"])
def test_weft_run_takes_a_loader(graph, model):
    torch.manual_seed(0)
    one = task_of(
        graph, model() if isinstance(model, type) else model, **({} if isinstance(model, type) else {"layers": 2})
    )
    result = weft.run(one, options=weft.RunOptions(batches=hand_made(graph)), progress=False, device="cpu")
    assert len(result.history["train_loss"]) == EPOCHS
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]


def test_layers_of_pyg_are_converted_over_a_loader_that_shuffles(graph):
    """Every pass of the loader begins with another batch: trials compare both modules on one of them."""
    conv = pytest.importorskip("torch_geometric.nn").SAGEConv

    class Shuffled(list):
        def __iter__(self):
            return iter(random.sample(list(super().__iter__()), len(self)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = conv(12, 8), conv(8, 4)

        def forward(self, x, edge_index):
            return self.last(torch.relu(self.conv(x, edge_index)), edge_index)

    notes = []
    loader = Shuffled(hand_made(graph))
    listen = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    weft.run(
        task_of(graph, Net()), options=weft.RunOptions(batches=loader), progress=False, device="cpu", on_event=listen
    )
    assert [note for note in notes if note.startswith("converted: 2 SAGEConv")]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_weft_run_takes_pygs_neighbor_loader(graph):
    loaders = pytest.importorskip("torch_geometric.loader")
    typing = pytest.importorskip("torch_geometric.typing")
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        pytest.skip("PyG's NeighborLoader needs pyg-lib or torch-sparse")
    loader = loaders.NeighborLoader(
        graph.to_pyg(), list(FANOUTS), input_nodes=graph.train, batch_size=BATCH, shuffle=True
    )
    result = weft.run(
        task_of(graph, "sage", layers=2, hidden=16),
        options=weft.RunOptions(batches=loader),
        progress=False,
        device="cpu",
    )
    assert len(result.history["train_loss"]) == EPOCHS
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]


class Endless:
    """A loader whose length is wrong."""

    def __init__(self, batches, length):
        self.batches, self.length = batches, length

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return self.length


@pytest.mark.parametrize(("change", "message"), [
    (lambda b: Endless(b, len(b) + 1), "the loader ended after"),
    (lambda b: iter(b), "can be passed over again"),
    (lambda b: [], "no batches"),
    (lambda b: [SimpleNamespace(x=1)], "n_id of a SimpleNamespace is missing"),
    (lambda b: [SimpleNamespace(**{**vars(b[0]), "batch_size": 10**6})], "batch_size=1000000 must say"),
    (lambda b: [SimpleNamespace(**{**vars(b[0]), "x": torch.zeros(len(b[0].n_id), 3)})], "12 features"),
    (lambda b: [SimpleNamespace(**{**vars(b[0]), "x": torch.zeros(3, 12)})], "one row per node"),
    (lambda b: [SimpleNamespace(**{**vars(b[0]), "n_id": b[0].n_id[:5]})], "no place in n_id of 5 nodes"),
    (lambda b: [SimpleNamespace(n_id=torch.arange(90), edge_index=b[0].edge_index[:, :0], batch_size=40)],
     "40 seeds, the task says batch=32"),
])  # fmt: skip
def test_loaders_that_cannot_be_used(graph, change, message):
    with pytest.raises(InputError, match=message):
        weft.run(
            task_of(graph, Pyg()),
            options=weft.RunOptions(batches=change(hand_made(graph))),
            progress=False,
            device="cpu",
        )


def test_an_error_of_the_loader_is_named(graph):
    class Broken(Endless):
        def __iter__(self):
            yield self.batches[0]
            raise OSError("disk gone")

    with pytest.raises(TrainingError, match="stage 'source' failed at item 1: OSError: disk gone"):
        weft.run(
            task_of(graph, Pyg()),
            options=weft.RunOptions(batches=Broken(hand_made(graph), 3)),
            progress=False,
            device="cpu",
        )


@pytest.mark.parametrize(("settings", "options", "message"), [
    ({"batch_seed": 3}, {}, "batch_seed has no effect"),
    ({"feature_norm": "row"}, {}, "feature_norm has no effect"),
    ({}, {"resume": True, "out": "x"}, "resume=True: batches= comes from a loader"),
    ({}, {"ranks": 2}, "batches= does not go with ranks=2"),
])  # fmt: skip
def test_what_a_loader_excludes(graph, settings, options, message):
    with pytest.raises(SpecError, match=message):
        weft.run(
            task_of(graph, Pyg(), **settings),
            options=weft.RunOptions(batches=hand_made(graph)),
            progress=False,
            **options,
        )


def test_a_task_for_the_whole_graph_takes_no_batches(graph):
    with pytest.raises(SpecError, match="mode='sampled'"):
        weft.run(Task(graph=graph, model="gcn"), options=weft.RunOptions(batches=hand_made(graph)), progress=False)
