"""Expected sizes of batches are near those of sampled ones, whatever the degrees."""

from __future__ import annotations

import pytest
import torch

from weft.core.graph_stats import GraphStats
from weft.flow import NeighbourSampler
from weft.graph.generate import citation
from weft.planner.sampling.batch_sizes import expected_batch


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
    assert found.nodes == pytest.approx(nodes, rel=0.25)
    assert sum(found.edges) == pytest.approx(edges, rel=0.25)


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
