"""Expected sizes of batches are near those of sampled ones, whatever the degrees."""

from __future__ import annotations

import pytest
import torch

from weft.batches import NeighbourSampler
from weft.core.batch_sizes import expected_batch, large_batch
from weft.core.graph_stats import GraphStats
from weft.graph.generate import citation


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("fanouts", [(5, 3), (-1,)])
def test_they_are_near_sampled_batches(directed, fanouts):
    graph = citation(8000, 90000, 4, 5, seed=1, directed=directed)
    sampler, random = NeighbourSampler(graph, fanouts), torch.Generator().manual_seed(0)
    seeds = [torch.randperm(8000, generator=random)[:128] for _ in range(8)]
    batches = [sampler.sample(some, 0, place) for place, some in enumerate(seeds)]
    nodes = sum(batch.input_nodes.numel() for batch in batches) / len(batches)
    edges = sum(block.num_edges for batch in batches for block in batch.blocks) / len(batches)
    found = expected_batch(graph.stats(), fanouts, 128)
    assert found.rows[0] == pytest.approx(128)
    near = 0.25 if directed else 0.1
    assert found.nodes == pytest.approx(nodes, rel=near)
    assert sum(found.edges) == pytest.approx(edges, rel=near)
    large = large_batch(graph.stats(), fanouts, 128)
    assert all(batch.input_nodes.numel() <= large.nodes for batch in batches)
    assert all(sum(block.num_edges for block in batch.blocks) <= sum(large.edges) for batch in batches)


def test_no_more_nodes_than_there_are():
    stats = GraphStats("g", 100, 5000, symmetric=True, max_degree=60, degree_histogram=(0, 0, 0, 0, 0, 50, 50))
    found = expected_batch(stats, (50, 50, 50), 100)
    assert found.nodes == pytest.approx(100)
    assert found.hit_rate(0) == 0
    assert found.hit_rate(100) == pytest.approx(1)


def test_a_cache_of_hubs_has_more_than_its_share():
    graph = citation(8000, 90000, 4, 5, seed=1)
    found = expected_batch(graph.stats(), (5, 3), 128)
    assert found.hit_rate(800) > 0.15
    assert found.hit_rate(1600) > found.hit_rate(800)


def test_a_summary_without_degrees():
    found = expected_batch(GraphStats("g", 1000, 10000), (3,), 10)
    assert found.edges == (30.0,)
