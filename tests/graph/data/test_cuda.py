"""The same graphs on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graphs_for_tests import assert_same, small_graph
from weft.core.errors import GraphError
from weft.graph import Graph
from weft.graph.readers import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("related", [True, False])
def test_edges_on_the_gpu_build_the_same_graph(directed, related):
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 500, (2, 20_000))
    fields = {
        "num_nodes": 500,
        "edge_weight": rng.random(20_000).astype(np.float32),
        "relation": rng.integers(0, 4, 20_000) if related else None,
        "x": rng.random((500, 8)),
        "y": rng.integers(0, 3, 500),
        "train": np.arange(100),
        "directed": directed,
    }
    here = Graph.from_edges(src, dst, **fields)
    there = Graph.from_edges(torch.tensor(src).cuda(), torch.tensor(dst).cuda(), **fields)
    assert there.device.type == there.x.device.type == there.train.device.type == "cuda"
    assert_same(there.verify().to("cpu"), here)


@pytest.mark.parametrize("sparse", [False, True])
def test_there_and_back_and_stored(tmp_path, sparse):
    graph = small_graph(sparse=sparse)
    there = graph.to("cuda")
    assert there.to("cuda") is there
    assert_same(there.to("cpu"), graph)
    there.save(tmp_path / "g")
    assert_same(read(tmp_path / "g", verify=True), graph)


def test_symmetry_is_found_on_the_gpu():
    once = torch.randint(0, 300, (2, 4000), device="cuda")
    both = torch.cat([once, once.flip(0)], dim=1)
    assert Graph.from_edges(*both, num_nodes=300).adj.symmetric
    assert not Graph.from_edges(*both[:, :-1], num_nodes=300).adj.symmetric


def test_a_seed_means_the_same_split_everywhere():
    here = small_graph().random_split(train=3, val=1, seed=5)
    there = small_graph().to("cuda").random_split(train=3, val=1, seed=5)
    assert torch.equal(here.train, there.train.cpu())
    assert torch.equal(here.test, there.test.cpu())


def test_errors_name_values_that_lie_on_the_gpu():
    with pytest.raises(GraphError, match=r"src\[1\] = 9 is out of range"):
        Graph.from_edges(torch.tensor([0, 9]).cuda(), torch.tensor([0, 1]).cuda(), num_nodes=3)
    with pytest.raises(GraphError, match=r"x\[1, 0\] is nan"):
        Graph.from_edges([0], [1], x=torch.tensor([[0.0], [float("nan")]]).cuda())
