"""Where features and edges lie on a machine with a GPU: the same bits from everywhere, overlapped or not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import weft
from weft.batches import CacheChoice
from weft.batches import cache as cache_policy
from weft.batches import placement as pinning
from weft.batches import sampled as sampled_source
from weft.batches.features import FeatureStore
from weft.batches.placement import place_graph
from weft.batches.sampled import Sampling
from weft.batches.sampler import NeighbourSampler
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.runtime.group import GroupRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
FANOUT, BATCH, EPOCHS = (5, 3), 100, 3


@pytest.fixture(scope="module")
def graph():
    return citation(num_nodes=3000, num_edges=30000, num_features=12, num_classes=4, seed=1)


def task(model: str = "sage", **changes) -> Task:
    return Task(graph="g", model=model, **{"hidden": 8, "epochs": EPOCHS, "dropout": 0.5, "lr": 0.05, **changes})


def run_of(graph, placement: DataPlacement, model: str = "sage", members: int = 1, **sampling) -> GroupRun:
    names = tuple(map(str, range(members)))
    plan = Plan(names, join="stacked" if members > 1 else "solo", device="cuda", replay=True, placement=placement)
    make = Sampling(FANOUT, BATCH, placement=placement, **sampling)
    tasks = [task(model, seed=seed) for seed in range(members)]
    return GroupRun(tasks, graph, plan, DEVICE, make_source=make)


def trained(run: GroupRun) -> tuple[list, torch.Tensor]:
    rows = [update.rows for update in run.advance(EPOCHS)]
    assert run.recorded, run.notes
    return rows, run.stacks[0].state.flat.clone()


def assert_same(mine, theirs) -> None:
    """Weights and training losses bit for bit; evaluations, in chunks here and as a whole there, nearly."""
    assert torch.equal(mine[1], theirs[1])
    for member, other in zip(mine[0], theirs[0], strict=True):
        assert [row[0] for row in member] == [row[0] for row in other]
        for one, two in zip(member, other, strict=True):
            assert one == pytest.approx(two, rel=1e-3, abs=1e-3)


PLACEMENTS = {
    "host": DataPlacement("host"),
    "host, overlapped": DataPlacement("host", overlap=True),
    "gpu, overlapped": DataPlacement(overlap=True),
    "cached": DataPlacement("cached", cache_bytes=4 * 3000 + 500 * 48),
    "cached, overlapped": DataPlacement("cached", cache_bytes=4 * 3000 + 500 * 48, policy="presampling", overlap=True),
    "all in host memory": DataPlacement("host", "host", overlap=True),
    "lists cached": DataPlacement("host", "cached", cache_bytes=4 * 3000 + 10000, policy="benefit", overlap=True),
    "both cached": DataPlacement("cached", "cached", cache_bytes=8 * 3000 + 40000, policy="benefit", overlap=True),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("members", [1, 3])
def test_the_same_bits_from_everywhere(graph, name, members):
    """Training is that with everything on the GPU, one step after another, bit for bit; both are replayed."""
    expected = trained(run_of(graph, DataPlacement(), members=members))
    assert_same(trained(run_of(graph, PLACEMENTS[name], members=members)), expected)


@pytest.mark.parametrize("name", [None, "host", "gpu, overlapped", "all in host memory", "both cached"])
def test_the_paper_s_sampler_in_a_captured_step(graph, name):
    """Its picks are the reservoir's, so training is, bit for bit; the default sampler makes other batches."""
    expected = trained(run_of(graph, DataPlacement(sampler="reservoir"), members=2))
    placement = DataPlacement() if name is None else PLACEMENTS[name]
    assert_same(trained(run_of(graph, replace(placement, sampler="paper"), members=2)), expected)
    assert not torch.equal(trained(run_of(graph, placement, members=2))[1], expected[1])


def test_runs_with_a_sampler(graph, tmp_path):
    one = Task(graph=graph, model="sage", hidden=8, epochs=2, mode="sampled", batch=100, fanout=[5, 3])
    places = {name: weft.Placement(sampler=name) for name in ("default", "reservoir", "paper")}
    losses = {}
    for name, placement in places.items():
        result = weft.run(one, device="cuda", progress=False, placement=placement, out=tmp_path / name)
        assert result.plan.places.sampler == name
        losses[name] = result.history["loss"]
    assert losses["paper"] == losses["reservoir"] != losses["default"]
    longer = {"device": "cuda", "progress": False, "out": tmp_path / "paper", "extend": True}
    with pytest.raises(weft.SpecError, match="drawn by sampler='paper', not 'default'"):
        weft.run(one.with_values(epochs=4), **longer)
    extended = weft.run(one.with_values(epochs=4), placement=places["paper"], **longer)
    assert extended.history["loss"][:2] == losses["paper"]
    with pytest.raises(weft.SpecError, match="sampler='paper' needs one fan-out from 1 to 1,024 per hop"):
        weft.run(one.with_values(fanout=[-1, 3]), device="cuda", progress=False, placement=places["paper"])


@pytest.mark.parametrize("model", ["gcn", "gin", "gat", "gatv2"])
def test_other_models(graph, model):
    expected = trained(run_of(graph, DataPlacement(), model))
    assert_same(trained(run_of(graph, DataPlacement("host", overlap=True), model)), expected)


def test_what_is_left_early_is_resumed(graph):
    """A batch on its way when training stops does no harm, and the rest of the epoch is as if uninterrupted."""
    expected = trained(run_of(graph, DataPlacement("host", overlap=True)))
    run = run_of(graph, DataPlacement("host", overlap=True))
    answers = iter([False, False, True])
    run.advance(EPOCHS, lambda: next(answers))
    assert (run.epoch, run.step_in_epoch) == (0, 3)
    other = run_of(graph, DataPlacement("host", overlap=True))
    other.restore({name: tensor.clone() for name, tensor in run.tensors().items()})
    for one in (run, other):
        one.advance(EPOCHS)
        assert torch.equal(one.stacks[0].state.flat, expected[1])


def test_poisoned_buffers(graph, monkeypatch):
    """Whatever a buffer holds before a batch is fetched into it, nothing of it is trained on."""
    expected = trained(run_of(graph, DataPlacement("host", overlap=True)))
    run = run_of(graph, DataPlacement("host", overlap=True))
    run.prepare()
    (epoch,) = run._stepped
    train_on = type(epoch).train_on

    def poisoned(self, slot):
        train_on(self, slot)
        slot.fetched.x.fill_(1e6)  # on the stream of training, behind it: the next fetch waits for training
        slot.fetched.y.fill_(0)
        self._overlapped._trained[slot.buffer].record(torch.cuda.current_stream())

    monkeypatch.setattr(type(epoch), "train_on", poisoned)
    assert_same(trained(run), expected)


@pytest.mark.parametrize("topology", ["gpu", "host"])
@pytest.mark.parametrize("members", [1, 2])
def test_evaluation_in_chunks(graph, topology, members):
    few = graph.with_splits(graph.train[:50], graph.val[:20], graph.test[:20])
    placement = DataPlacement("host", topology, overlap=True, evaluation="layers", chunk_edges=500)
    assert_same(
        trained(run_of(few, placement, members=members)), trained(run_of(few, DataPlacement(), members=members))
    )


def test_hits_are_counted(graph):
    run = run_of(graph, DataPlacement("cached", cache_bytes=4 * 3000 + 1500 * 48, overlap=True))
    run.advance(1)
    reads = run.stacks[0].source.reads()
    assert 0.3 < reads["feature_hit_rate"] < 1.0
    steps = run.stacks[0].source.steps_per_epoch
    assert steps * BATCH < reads["rows_read"] < (steps + 1) * BATCH * 24


def test_rows_of_a_cache_and_pinning_in_place(graph, monkeypatch):
    monkeypatch.setattr(pinning, "LARGE", 1)
    monkeypatch.setattr(pinning, "IN_PLACE", 1)
    x = torch.randn(5000, 33)
    host = pinning.pinned(x)
    assert host.is_pinned()
    assert host.data_ptr() == x.data_ptr()
    assert pinning.pinned(x.cuda()).is_pinned()
    ids = torch.randint(0, 5000, (4000,), device=DEVICE, dtype=torch.int32)
    store = FeatureStore(host, DEVICE, cached=torch.arange(0, 5000, 3))
    assert torch.equal(store.read(ids).cpu(), x[ids.cpu().long()])
    out = torch.zeros(4000, 33, device=DEVICE)
    for beside in (False, True):
        store.read_padded(ids, torch.tensor([1234], dtype=torch.int32, device=DEVICE), out.zero_(), beside)
        assert torch.equal(out[:1234].cpu(), x[ids[:1234].cpu().long()])
        assert not out[1234:].any()


def test_a_graph_in_host_memory_is_sampled_alike(graph):
    host = place_graph(graph, DataPlacement("host", "host"), DEVICE)
    near = NeighbourSampler(graph.to(DEVICE), FANOUT)
    for cached in (None, torch.arange(0, 3000, 2)):
        far = NeighbourSampler(host, FANOUT, device=DEVICE, cached=cached)
        for batch in range(3):
            seeds = graph.train[batch * 50 : batch * 50 + 50].cuda()
            one, other = near.sample(seeds, 0, batch), far.sample(seeds, 0, batch)
            assert torch.equal(one.input_nodes, other.input_nodes)
            assert all(torch.equal(a.indices, b.indices) for a, b in zip(one.blocks, other.blocks, strict=True))


class FirstNodes:
    """A user's policy."""

    def choose(self, graph, row_bytes, budget):
        return CacheChoice(torch.arange(min(budget // row_bytes, graph.num_nodes)))


def test_runs_with_options(graph, tmp_path):
    one = Task(graph=graph, model="sage", hidden=8, epochs=2, mode="sampled", batch=100, fanout=[5, 3])
    plain = weft.run(one, device="cuda", progress=False)
    for options in (
        {"features": "host"},
        {"cache": "100KB"},
        {"cache": "100KB", "cache_policy": "presampling"},
        {"cache": "100KB", "cache_policy": FirstNodes()},
        {"features": "host", "topology": "host"},
    ):
        result = weft.run(one, device="cuda", progress=False, placement=weft.Placement(**options))
        assert result.history["loss"] == plain.history["loss"], options
        places = result.plan.places
        assert places.features == ("cached" if "cache" in options else "host")
        if "cache" in options:
            assert 0 < result.plan.measured["feature_hit_rate"] < 1
    graph.save(tmp_path / "graph")
    saved = one.with_values(graph=str(tmp_path / "graph"))
    result = weft.run(saved, device="cuda", progress=False, placement=weft.Placement(features="disk", topology="disk"))
    assert result.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-3)


@pytest.mark.parametrize("policy", ["degree", "presampling"])
def test_a_gpu_ranks_as_the_host_does(graph, monkeypatch, policy):
    """Edges in pinned memory are counted and sorted by the GPU: the same ids in the same order."""
    placed = place_graph(graph, DataPlacement("cached", "host", cache_bytes=1 << 20), DEVICE)
    monkeypatch.setattr(cache_policy, "EDGES_AT_ONCE", 1 << 12)
    sampler = NeighbourSampler(graph, FANOUT)
    batches = [sampler.sample(torch.arange(50), 0, number) for number in range(4)]
    make = {"degree": cache_policy.ByDegree, "presampling": partial(cache_policy.ByPresampling, batches)}[policy]
    room = 64 * graph.num_nodes + (1 << 20)
    assert cache_policy.ranking_device(placed, DEVICE, room) == DEVICE
    there = make(device=DEVICE).choose(placed, 4096, room).features
    assert there.device.type == "cpu"
    assert there.numel() > 50
    assert torch.equal(there, make().choose(graph, 4096, room).features)


def test_a_gpu_looks_for_loops_of_edges_on_the_host(graph):
    for given in (graph.adj, graph.adj.with_self_loops()):
        wanted = bool((given.rows() == given.indices).any())
        assert sampled_source.has_loops(given, DEVICE) is sampled_source.has_loops(given, given.device) is wanted
