"""Sampling, compaction, gathering and the pipeline on a GPU: what a CPU gives, bit for bit."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from tests.ops.sampling.chi_square import normal_score
from tests.ops.sampling.graphs import assert_same_sample, many_stars, random_csr, shared_hubs
from weft.batches import FeatureStore, NeighbourSampler, Pipeline, SeedOrder, training_stages
from weft.batches.sampler import torch_hops
from weft.graph.graph import Graph
from weft.ops.sampling.compact_triton import EMPTY, Compactor, sample_hops_triton
from weft.ops.sampling.cpu import CpuSampler
from weft.ops.sampling.gather_rows import gather_rows_triton
from weft.ops.sampling.paper_cuda import ALWAYS, NEVER, ORDERS, PaperLaunch, launch_paper, sample_paper
from weft.ops.sampling.reference import HopSample, make_clock, sample_reservoir_torch, sample_torch
from weft.ops.sampling.reservoir_triton import AS_DGL, launch_reservoir, sample_reservoir_triton
from weft.ops.sampling.sample_triton import CachedLists, sample_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NODES = 5000
FANOUTS = [15, 10, 5]


def on_cpu(sample: HopSample) -> HopSample:
    sample = sample.trimmed()
    edges = None if sample.edges is None else sample.edges.cpu()
    return HopSample(sample.indptr.cpu(), sample.sources.cpu(), edges)


def arrays(pinned: bool = False, dtype=torch.int64):
    """``(CPU arrays, the same for the GPU)``."""
    csr = random_csr(NODES, 60, dtype=dtype)
    return csr, tuple(t.pin_memory() if pinned else t.cuda() for t in csr)


SEEDS = torch.randint(0, NODES, (3001,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 15, 30, 100, 500])
def test_default_sampler(fanout, replace, pinned):
    csr, there = arrays(pinned)
    clock = make_clock(1, 2, 3)
    mine = sample_triton(*there, SEEDS.cuda(), fanout, clock.cuda(), 1, replace=replace, edges=True)
    assert_same_sample(on_cpu(mine), sample_torch(*csr, SEEDS, fanout, clock, 1, replace=replace))


def test_weighted_and_full():
    csr, there = arrays()
    weight = torch.rand(csr[1].numel(), generator=torch.Generator().manual_seed(0))
    clock = make_clock(1, 2, 3)
    mine = sample_triton(*there, SEEDS.cuda(), 7, clock.cuda(), weight=weight.cuda())
    assert_same_sample(on_cpu(mine), sample_torch(*csr, SEEDS, 7, clock, weight=weight))
    assert_same_sample(
        on_cpu(sample_triton(*there, SEEDS.cuda(), -1, clock.cuda())), sample_torch(*csr, SEEDS, -1, clock)
    )


LAUNCHES = [
    (sample_reservoir_triton, {}),
    (sample_reservoir_triton, {"edges": True, "launch": AS_DGL}),
    (sample_paper, {}),
    (sample_paper, {"edges": True}),
    *(
        (sample_paper, {"launch": PaperLaunch(order, threshold, few, warps, rows)})
        for order in ORDERS
        for threshold, few, warps, rows in (
            (ALWAYS, 10, 4, 4),
            (16, 1 << 20, 8, 1),
            (32, 10, 1, 32),
            (NEVER, 600, 3, 5),
        )
    ),
]


@cache
def expected_reservoir(fanout: int) -> HopSample:
    """By the reference, on the GPU: it takes one step per neighbour of the largest hub."""
    there = (t.cuda() for t in random_csr(NODES, 60))
    return on_cpu(sample_reservoir_torch(*there, SEEDS.cuda(), fanout, make_clock(1, 2, 3, "cuda"), 2))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fanout", [1, 15, 30, 100])
def test_reservoir_and_paper(fanout, dtype, pinned):
    there, clock, expected = arrays(pinned, dtype)[1], make_clock(1, 2, 3), expected_reservoir(fanout)
    for sampler, options in LAUNCHES:
        mine = sampler(*there, SEEDS.cuda(), fanout, clock.cuda(), 2, **options)
        assert_same_sample(on_cpu(mine), expected)
        assert mine.edges is None or torch.equal(mine.trimmed().edges.cpu(), expected.edges)


@pytest.mark.parametrize("launch", [launch_paper, launch_reservoir])
def test_rows_that_do_not_exist_and_lists_on_the_device(launch):
    """Rows beyond the number on the device hold anything; neighbours of cached nodes are read from their lists."""
    (indptr, indices), there = arrays()
    held = torch.arange(0, NODES, 3)
    counts = (indptr[held + 1] - indptr[held]).long()
    place = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    lists = indices[torch.repeat_interleave(indptr[held], counts) + place]
    starts = torch.full((NODES,), -1, dtype=torch.int32)
    starts[held] = (counts.cumsum(0) - counts).to(torch.int32)
    cached = CachedLists(lists.cuda() + NODES, starts.cuda(), torch.zeros(2, dtype=torch.int64, device="cuda"))
    rows, clock = SEEDS.cuda(), make_clock(4, 5, 6)
    rows[2000:] = 2**31 - 1
    exist = torch.tensor([2000], dtype=torch.int32, device="cuda")
    mine = on_cpu(launch(*there, rows, exist, 7, clock.cuda(), 1, cached=cached))
    plain = sample_reservoir_torch(indptr, indices, SEEDS[:2000], 7, clock, 1)
    here = torch.isin(SEEDS[:2000].long(), held)
    assert torch.equal(mine.indptr[:2001], plain.indptr)
    assert torch.equal(mine.sources, plain.sources + NODES * here.repeat_interleave(plain.indptr.diff().long()))
    assert cached.read.tolist() == [2000, int(here.sum())]


def test_a_pick_is_as_likely_as_any_other_set():
    """All 20 sets of 3 of 6 neighbours, each as often as the others."""
    nodes = 100_000
    csr = tuple(t.cuda() for t in many_stars(6, nodes))
    seeds = torch.arange(nodes, dtype=torch.int32, device="cuda")
    for launch in (PaperLaunch(), PaperLaunch("classes", ALWAYS), PaperLaunch("given", NEVER)):
        counts = torch.zeros(64)
        for batch in range(4):
            sample = sample_paper(*csr, seeds, 3, make_clock(9, 0, batch, "cuda"), launch=launch)
            sets = (1 << sample.trimmed().sources.reshape(nodes, 3)).sum(1)
            counts += torch.bincount(sets, minlength=64).cpu()
        drawn = counts[counts > 0].double()
        assert drawn.numel() == 20
        assert abs(normal_score(drawn, torch.full_like(drawn, 4 * nodes / 20))) < 4.5


KERNELS = [sample_triton, *dict.fromkeys(sampler for sampler, _ in LAUNCHES)]


@pytest.mark.parametrize("sampler", KERNELS)
@pytest.mark.parametrize("fanout", [1, 6])
def test_every_neighbour_is_as_likely(sampler, fanout):
    degree, nodes = 7, 200_000
    csr = tuple(t.cuda() for t in many_stars(degree, nodes))
    seeds = torch.arange(nodes, dtype=torch.int32, device="cuda")
    sample = sampler(*csr, seeds, fanout, make_clock(3, 0, 0, "cuda")).trimmed()
    counts = torch.bincount(sample.sources, minlength=degree).double().cpu()
    expected = torch.full((degree,), nodes * fanout / degree)
    assert abs(normal_score(expected + (counts - expected) / (1 - fanout / degree) ** 0.5, expected)) < 4.5


HUB, HUBS = 1_000_000, 400


@pytest.mark.parametrize("sampler", KERNELS)
@pytest.mark.parametrize("fanout", [1, 15])
def test_picks_fall_evenly_over_hubs(sampler, fanout):
    """Hubs of a million neighbours, and for the default sampler the bits of the CPU."""
    csr = shared_hubs(HUB, HUBS)
    indptr, indices, hubs = (t.cuda() for t in csr)
    clock = make_clock(5, 0, 0)
    sample = on_cpu(sampler(indptr, indices, hubs, fanout, clock.cuda()))
    assert all(row.unique().numel() == fanout for row in sample.sources.reshape(HUBS, fanout)[:50])
    counts = torch.bincount(sample.sources.long() * 40 // HUB, minlength=40).double()
    assert abs(normal_score(counts, torch.full_like(counts, HUBS * fanout / 40))) < 4.5
    if sampler is sample_triton:
        assert_same_sample(sample, sample_torch(*csr, fanout, clock))


@pytest.mark.parametrize(
    ("sampler", "reference"), [(sample_triton, sample_torch), (sample_paper, sample_reservoir_torch)]
)
def test_almost_all_neighbours_on_a_gpu(sampler, reference):
    """k = degree - 1 at the largest fan-out of the kernel."""
    csr = shared_hubs(1025, 2000)
    clock = make_clock(6, 0, 0)
    sample = on_cpu(sampler(*(t.cuda() for t in csr), 1024, clock.cuda()))
    left = 1025 * 1024 // 2 - sample.sources.long().reshape(2000, 1024).sum(1)
    counts = torch.bincount(left * 25 // 1025, minlength=25).double()
    assert abs(normal_score(counts, torch.full_like(counts, 80.0))) < 4.5
    assert_same_sample(sample, reference(*csr, 1024, clock))


def check_hops(hops, sampler: CpuSampler, seeds, clock) -> None:
    sampler.begin(seeds, clock)
    for number, (hop, fanout) in enumerate(zip(hops, FANOUTS, strict=True)):
        sample, found = sampler.hop(fanout, number)
        rows, nodes, edges = (int(n) for n in (hop.num_rows, hop.num_nodes, hop.indptr[-1]))
        assert torch.equal(hop.nodes[:nodes].cpu(), found.nodes)
        assert torch.equal(hop.indptr[: rows + 1].cpu(), sample.indptr)
        assert torch.equal(hop.indices[:edges].cpu(), found.indices)


def test_three_hops_with_compaction_launched_and_replayed():
    csr, there = arrays()
    compactor, sampler = Compactor(NODES, torch.device("cuda")), CpuSampler(*csr)
    seeds, clock = SEEDS[:100].cuda(), make_clock(0, 0, 0, "cuda")
    check_hops(sample_hops_triton(*there, seeds, FANOUTS, clock, compactor), sampler, SEEDS[:100], clock.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hops = sample_hops_triton(*there, seeds, FANOUTS, clock, compactor)
    for batch in (1, 2):
        clock.copy_(make_clock(0, 0, batch))
        seeds.copy_(SEEDS[100 * batch : 100 * batch + 100])
        graph.replay()
        check_hops(hops, sampler, SEEDS[100 * batch : 100 * batch + 100], clock.cpu())
    assert bool((compactor.table == EMPTY).all())


@pytest.mark.parametrize("sample_hop", [launch_paper, launch_reservoir])
def test_three_hops_of_the_paper_s_sampler_launched_and_replayed(sample_hop):
    there = arrays()[1]
    compactor, seeds, clock = Compactor(NODES, torch.device("cuda")), SEEDS[:100].cuda(), make_clock(0, 0, 0, "cuda")
    sample = partial(sample_hops_triton, *there, seeds, FANOUTS, clock, compactor, sample_hop=sample_hop)

    def check(hops, batch: int) -> None:
        some, number = SEEDS[100 * batch : 100 * batch + 100].cuda(), make_clock(0, 0, batch, "cuda")
        wanted = torch_hops(partial(sample_reservoir_torch, *there), some, FANOUTS, number, "all")
        for hop, plain in zip(hops, wanted, strict=True):
            rows, edges = int(hop.num_rows), int(hop.indptr[-1])
            assert torch.equal(hop.nodes[: int(hop.num_nodes)], plain.nodes)
            assert torch.equal(hop.indptr[: rows + 1], plain.indptr)
            assert torch.equal(hop.indices[:edges], plain.indices)

    check(sample(), 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hops = sample()
    for batch in (1, 2):
        clock.copy_(make_clock(0, 0, batch))
        seeds.copy_(SEEDS[100 * batch : 100 * batch + 100])
        graph.replay()
        check(hops, batch)
    assert bool((compactor.table == EMPTY).all())


@pytest.mark.parametrize("width", [1, 100, 602])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather(width, dtype):
    x, ids = torch.randn(NODES, width).to(dtype), SEEDS.cuda()
    expected = x[SEEDS.long()]
    for table in (x.cuda(), x.pin_memory()):
        assert torch.equal(gather_rows_triton(table, ids).cpu(), expected)
    slots, hits = torch.full((NODES,), -1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64).cuda()
    slots[:1000] = torch.arange(1000, dtype=torch.int32, device="cuda")
    mine = gather_rows_triton(x.pin_memory(), ids, cached=(x[:1000].cuda(), slots, hits))
    assert torch.equal(mine.cpu(), expected)
    assert int(hits) == int((SEEDS < 1000).sum())


def flow_graph() -> Graph:
    indptr, indices = random_csr(NODES, 60)
    rows = torch.repeat_interleave(torch.arange(NODES), indptr.diff())
    x = torch.randn(NODES, 20, generator=torch.Generator().manual_seed(0))
    return Graph.from_edges(indices, rows, NODES, x=x, y=torch.arange(NODES) % 4, train=torch.arange(2000))


@pytest.mark.parametrize("place", ["device", "pinned", "host", "cached"])
@pytest.mark.parametrize("depth", [1, 3])
def test_pipeline_equals_the_cpu(depth, place):
    graph = flow_graph()
    order = SeedOrder(graph.train, 256)
    plain = training_stages(NeighbourSampler(graph, FANOUTS), FeatureStore(graph.x), graph.y)
    x = {"device": graph.x.cuda(), "host": graph.x}.get(place, graph.x.pin_memory())
    store = FeatureStore(x, "cuda", torch.arange(500) if place == "cached" else None)
    stages = training_stages(NeighbourSampler(graph.to("cuda"), FANOUTS), store, graph.y.cuda(), "cuda")
    mine, theirs = (Pipeline(s, d).run(order.epochs(2)) for s, d in ((stages, depth), (plain, 1)))
    for batch, expected in zip(mine, theirs, strict=True):
        assert torch.equal(batch.x.cpu(), expected.x)
        assert torch.equal(batch.y.cpu(), expected.y)
        for block, other in zip(batch.blocks, expected.blocks, strict=True):
            assert torch.equal(block.indptr.cpu(), other.indptr)
            assert torch.equal(block.indices.cpu(), other.indices)
        for tensor in batch.tensors():
            tensor.fill_(77)  # no other batch may see this
    if place == "cached":
        assert 0 < store.counts.hit_rate < 1


KINDS = [
    {}, {"replace": True}, {"direction": "out"}, {"subgraph": True}, {"subgraph": True, "direction": "out"},
    {"fanouts": [-1, 3]}, {"weight": True}, {"weight": True, "direction": "out", "subgraph": True},
    *({"backend": name, **more} for name in ("paper", "reservoir") for more in ({}, {"subgraph": True})),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_batch_is_the_cpu_s(kind):
    graph = flow_graph()
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(3))
    about = {"fanouts": [7, 3], **kind}
    batches = []
    for one in (graph, graph.to("cuda")):
        if "weight" in kind:
            about["weight"] = weight.to(one.device)
        batches.append(NeighbourSampler(one, **about).sample(SEEDS[:300].to(one.device), 2, 3))
    mine, theirs = batches[1].to("cpu"), batches[0]
    assert torch.equal(mine.input_nodes, theirs.input_nodes)
    if "subgraph" in kind:
        assert torch.equal(mine.edge_index, theirs.edge_index)
        assert torch.equal(mine.edges, theirs.edges)
        return
    for block, other in zip(mine.blocks, theirs.blocks, strict=True):
        assert torch.equal(block.indptr, other.indptr)
        assert torch.equal(block.indices, other.indices)


def test_cpu_sampling_feeds_the_gpu():
    graph = flow_graph()
    stages = training_stages(NeighbourSampler(graph, FANOUTS), FeatureStore(graph.x, "cuda"), graph.y, "cuda")
    batches = list(Pipeline(stages, 3).run(SeedOrder(graph.train, 256).epoch(0)))
    assert len(batches) == -(-graph.train.numel() // 256)
    for batch in batches:
        assert torch.equal(batch.x.cpu(), graph.x[batch.input_nodes.cpu().long()])
        assert batch.blocks[0].indices.is_cuda
