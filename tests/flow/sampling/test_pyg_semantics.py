"""What a local subgraph is: as PyG's ``NeighborLoader`` gives it, by the rules and, where PyG can sample, in fact."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import random_graph
from weft.batches import NeighbourSampler

SEEDS = torch.tensor([5, 79, 3, 60])


def pairs(nodes, edge_index) -> list[tuple[int, int]]:
    src, dst = nodes.long()[edge_index]
    return sorted(zip(src.tolist(), dst.tolist(), strict=True))


@pytest.mark.parametrize("fanouts", [[-1], [-1, -1], [3, 2], [1, 1, 1]], ids=str)
def test_every_node_is_sampled_for_once_in_the_hop_after_it_was_found(fanouts):
    graph = random_graph()
    local = NeighbourSampler(graph, fanouts, subgraph=True).sample(SEEDS)
    degree = torch.bincount(graph.edge_index()[1], minlength=graph.num_nodes)
    sampled = torch.bincount(local.edge_index[1], minlength=local.nodes.numel())
    hop, found = torch.full((local.nodes.numel(),), len(fanouts)), set(range(SEEDS.numel()))
    frontier = found
    for number, fanout in enumerate(fanouts):
        for place in frontier:
            hop[place] = number
            here = int(degree[local.nodes[place]])
            assert sampled[place] == (here if fanout == -1 else min(fanout, here))
        reached = {int(s) for s, d in local.edge_index.T.tolist() if d in frontier}
        frontier = reached - found
        found = found | frontier
    assert found == set(range(local.nodes.numel()))
    assert torch.equal(hop, hop.sort().values)  # nodes come hop by hop
    assert not sampled[hop == len(fanouts)].any()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fanouts", [[-1], [-1, -1]], ids=str)
def test_equals_pyg_with_all_neighbours(fanouts):
    loaders = pytest.importorskip("torch_geometric.loader")
    typing = pytest.importorskip("torch_geometric.typing")
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        pytest.skip("PyG's NeighborLoader needs pyg-lib or torch-sparse")
    graph = random_graph()
    (theirs,) = loaders.NeighborLoader(graph.to_pyg(), fanouts, input_nodes=SEEDS, batch_size=SEEDS.numel())
    mine = NeighbourSampler(graph, fanouts, subgraph=True).sample(SEEDS)
    assert torch.equal(theirs.n_id[: SEEDS.numel()], mine.seeds.long())
    assert sorted(theirs.n_id.tolist()) == sorted(mine.nodes.tolist())
    assert pairs(theirs.n_id, theirs.edge_index) == pairs(mine.nodes, mine.edge_index)
