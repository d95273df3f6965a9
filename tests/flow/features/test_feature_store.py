"""FeatureStore and cache policies: every tier returns the same rows, every policy keeps within its budget."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import NODES, random_graph
from weft.batches import BenefitDensity, ByDegree, ByPresampling, CacheChoice, FeatureStore, NeighbourSampler
from weft.batches.cache import EDGES_AT_ONCE, count_reads, ranking_device
from weft.core.errors import InputError

IDS = torch.tensor([3, 3, 79, 0, 5], dtype=torch.int32)


def stores(tmp_path, x):
    """A store of every tier that a CPU has."""
    x.numpy().tofile(tmp_path / "x")
    yield FeatureStore(x)
    yield FeatureStore(x, cached=torch.tensor([3, 79]))
    mapped = torch.from_file(str(tmp_path / "x"), size=x.numel()).view(x.shape)
    yield FeatureStore(mapped)
    yield FeatureStore(mapped, cached=torch.arange(NODES))


def test_every_tier_returns_the_rows(tmp_path):
    x = torch.randn(NODES, 5)
    for store in stores(tmp_path, x):
        for ids in (IDS, IDS.long(), IDS[:0]):
            assert torch.equal(store.read(ids), x[ids.long()])


def test_rows_belong_to_the_caller(tmp_path):
    x = torch.randn(NODES, 5)
    for store in stores(tmp_path, x):
        first = store.read(IDS)
        first.fill_(7)
        assert torch.equal(store.read(IDS), x[IDS.long()])


def test_hits_and_misses_are_counted():
    store = FeatureStore(torch.randn(NODES, 5), cached=torch.tensor([3, 79]))
    store.read(IDS)
    assert (store.counts.hits, store.counts.misses) == (3, 2)
    assert store.counts.hit_rate == 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureStore(torch.zeros(3)), "must be a matrix"),
        (lambda: FeatureStore(torch.zeros(3, 2), cached=torch.tensor([3])), "node ids from 0 to 2"),
        (lambda: FeatureStore(torch.zeros(3, 2), cached=torch.tensor([1, 1])), "different node ids"),
        (lambda: FeatureStore(torch.zeros(3, 2)).read(torch.tensor([0, 3])), "node id 3 must be from 0 to 2"),
        (lambda: FeatureStore(torch.zeros(3, 2)).read(torch.tensor([-1])), "node id -1 must be from 0 to 2"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# ---- policies --------------------------------------------------------------------------------------------


class Own:
    """A user's policy: the first nodes."""

    def choose(self, graph, row_bytes, budget):
        return CacheChoice(torch.arange(min(budget // row_bytes, graph.num_nodes)))


def batches():
    sampler = NeighbourSampler(random_graph(), [4, 3])
    return [sampler.sample(torch.arange(10), 0, number) for number in range(5)]


POLICIES = {
    "degree": ByDegree,
    "presampling": lambda: ByPresampling(batches()),
    "benefit": lambda: BenefitDensity(batches()),
    "own": Own,
}


@pytest.mark.parametrize("budget", [0, 30, 200, 1000, 10**9])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_within_their_budget(name, budget):
    graph = random_graph()
    choice = POLICIES[name]().choose(graph, 24, budget)
    assert choice.bytes(graph, 24) <= budget
    for ids in (choice.features, choice.topology):
        assert ids.dtype == torch.int64
        assert ids.unique().numel() == ids.numel()
        assert ids.numel() == 0 or (ids.min() >= 0 and ids.max() < NODES)
    if budget == 10**9:
        assert choice.features.numel() > 10
    store = FeatureStore(graph.x, cached=choice.features)
    assert torch.equal(store.read(IDS), graph.x[IDS.long()])


def test_degree_prefers_frequent_neighbours():
    graph = random_graph()
    counts = torch.bincount(graph.adj.indices, minlength=NODES)
    chosen = ByDegree().choose(graph, 24, 240).features
    assert counts[chosen].min() >= counts.sort(descending=True).values[9]


def test_a_device_ranks_if_the_cache_leaves_it_room():
    graph, device = random_graph(), torch.device("meta")
    enough = 64 * NODES + 8 * EDGES_AT_ONCE
    assert ranking_device(graph, device, enough) == device
    assert ranking_device(graph, device, enough - 1) == graph.adj.device


def test_presampling_prefers_what_batches_read():
    made = batches()
    chosen = ByPresampling(made).choose(random_graph(), 24, 240).features
    assert set(chosen.tolist()) <= set(torch.cat([b.input_nodes for b in made]).tolist())
    assert set(range(10)) == set(chosen.tolist())  # the seeds are in every batch


def test_what_no_batch_reads_is_not_kept():
    made = [NeighbourSampler(random_graph(), [2]).sample(torch.arange(5), 0, 0)]
    read = set(made[0].input_nodes.tolist())
    assert len(read) < NODES
    assert set(ByPresampling(made).choose(random_graph(), 24, 10**9).features.tolist()) == read


def test_lists_are_read_of_the_nodes_that_a_hop_samples_for():
    made = batches()
    features, lists = count_reads(made, NODES)
    assert features.sum() == sum(batch.input_nodes.numel() for batch in made)
    assert lists.sum() == sum(block.num_dst for batch in made for block in batch.blocks)


def test_benefit_density_divides_one_budget():
    graph = random_graph()
    wide, narrow = (BenefitDensity(batches(), size).choose(graph, 24, 600) for size in (1, 10_000))
    assert wide.topology.numel() < narrow.topology.numel()
    assert wide.features.numel() > narrow.features.numel()


def test_benefit_density_prefers_many_short_lists_to_a_long_one():
    """The hub's list saves most in all, but the bytes that it takes save more as several short lists."""
    graph, hub, short = random_graph(), 5, list(range(20, 32))
    sampler = NeighbourSampler(graph, [1])
    made = [sampler.sample(torch.tensor([hub, *short[i : i + 3]])) for i in range(0, 12, 3)]
    budget = CacheChoice(torch.tensor([], dtype=torch.int64), torch.tensor([hub])).bytes(graph, 24)
    chosen = BenefitDensity(made, features=False).choose(graph, 24, budget).topology.tolist()
    assert hub not in chosen
    assert len(chosen) > 4  # each was read once, the hub four times
