"""Clusters of nodes, and work lists ordered by them: every row once, the same items, in another order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs_for_tests import GRAPHS, adjacencies, from_pairs, mixed
from weft import ops
from weft.graph.generate import citation
from weft.nn.conv import with_identity
from weft.ops import Adjacency
from weft.ops.csr.worklist import build_worklist, worklist, worklist_by_length
from weft.ops.sparse.row_clusters import BLOCK, SEEDS, _best_column, chain, clusters, order_rows, ordered_rows

SQUARE = {name: make for name, make in GRAPHS.items() if name not in ("mixed", "wide offsets", "no rows")}


def one_node(loop: bool) -> Adjacency:
    ids = torch.zeros(int(loop), dtype=torch.int64)
    return from_pairs(ids, ids, 1, 1)


def no_nodes() -> Adjacency:
    none = torch.zeros(0, dtype=torch.int64)
    return from_pairs(none, none, 0, 0)


ODD = {
    **SQUARE,
    "one node": lambda: one_node(False),
    "one loop": lambda: one_node(True),
    "no nodes": no_nodes,
    "directed": lambda: citation(300, 2000, 4, 3, seed=1, directed=True).adj,
    "wide offsets": lambda: Adjacency(mixed(num_cols=24).indptr.long(), mixed(num_cols=24).indices),
}


@pytest.mark.parametrize("name", ODD)
def test_every_node_has_a_cluster_and_always_the_same(name):
    adj = ODD[name]()
    found = clusters(adj)
    assert found.shape == (adj.num_rows,)
    assert found.dtype == torch.int32
    assert all(0 <= cluster < min(SEEDS, adj.num_rows) for cluster in found.tolist())
    assert torch.equal(found, clusters(ODD[name]()))


def test_weights_and_scales_change_nothing():
    adj = citation(300, 2000, 4, 3, seed=1).adj
    other = adj.scaled(weight=-torch.rand(adj.num_edges), row_scale=torch.zeros(300))
    assert torch.equal(clusters(other), clusters(adj))


def test_nothing_is_left_behind():
    adj = citation(300, 2000, 4, 3, seed=1).adj
    clusters(adj)
    assert not adj._derived
    assert not adj.nodes


def test_rectangles_have_none():
    with pytest.raises(ValueError, match="24 x 19"):
        clusters(mixed())


def test_parts_that_know_nothing_of_each_other_are_apart():
    """Two cliques with a hub each: no cluster has nodes of both."""
    clique = torch.ones(70, 70).nonzero(as_tuple=True)
    rows, cols = (torch.cat([ids, ids + 70]) for ids in clique)
    found = clusters(from_pairs(rows, cols, 140, 140))
    assert not set(found[:70].tolist()) & set(found[70:].tolist())


def test_edges_stay_inside_more_than_by_chance():
    adj = citation(3000, 20000, 4, 8, seed=2).adj
    found = clusters(adj)
    inside = (found[adj.rows().long()] == found[adj.indices.long()]).float().mean()
    share = (found.bincount().float() / 3000).square().sum()
    assert inside > 5 * share


def test_a_chain_goes_on_where_most_edges_are():
    edges = [[9, 0, 0, 4], [0, 9, 5, 3], [0, 5, 9, 0], [4, 3, 0, 19]]
    places = chain([[float(value) for value in row] for row in edges])
    assert [places.index(at) for at in range(4)] == [3, 0, 1, 2]
    assert chain([[0.0, 0.0], [0.0, 0.0]]) == [0, 1]


# ---- work lists --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(adj=adjacencies(), light=st.integers(0, 5), more=st.integers(1, 5), seed=st.integers(0, 9))
def test_the_same_pieces_in_another_order(adj, light, more, seed):
    random = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, 4, (adj.num_rows,), generator=random, dtype=torch.int32)
    plain, ordered = (build_worklist(adj.indptr, light, light + more, given) for given in (None, cluster))
    chunks = plain.hub_of_partial.numel()
    for name in ("hub_row", "hub_ptr", "hub_of_partial"):
        assert torch.equal(getattr(plain, name), getattr(ordered, name))
    for kind in ("heavy", "light"):
        mine, theirs = (
            list(zip(*(getattr(work, f"{kind}_{name}").tolist() for name in ("row", "start", "len")), strict=True))
            for work in (ordered, plain)
        )
        first = chunks if kind == "heavy" else 0
        assert mine[:first] == theirs[:first]
        assert sorted(mine) == sorted(theirs)
        keys = [(int(cluster[row]), -length, row) for row, _, length in mine[first:]]
        assert keys == sorted(keys)


@pytest.mark.parametrize("directed", [False, True])
def test_all_forms_go_by_the_clusters_of_the_graph(directed):
    adj = citation(300, 2000, 4, 3, seed=1, directed=directed).adj
    forms = [adj, adj.gcn(), adj.gcn().transposed()]
    before = [worklist(form) for form in forms]
    order_rows(adj)
    assert torch.equal(adj.nodes["clusters"], clusters(adj))
    forms += [adj.mean(), adj.mean().transposed(), adj.transposed(), with_identity(adj)]
    for form in forms:
        cluster = adj.nodes["clusters"][worklist(form).light_row.long()]
        assert (cluster.diff() >= 0).all()
        assert worklist(form) is worklist(form)
    for form, earlier in zip(forms, before, strict=False):
        assert worklist(form) is not earlier
        assert worklist_by_length(form) is earlier  # a recorded step may still read it


def test_loops_that_are_there_already_share_them_too():
    pairs = torch.cat([torch.randint(0, 50, (200, 2), generator=torch.Generator().manual_seed(1)), torch.ones(1, 2)])
    adj = from_pairs(*pairs.long().T, 50, 50)
    assert with_identity(adj).nodes is adj.nodes
    assert adj.with_self_loops().nodes is adj.nodes


def test_tensors_without_data_have_no_clusters():
    adj = citation(30, 200, 4, 3, seed=1).adj.to("meta")
    order_rows(adj)
    assert not adj.nodes


@pytest.mark.parametrize("directed", [False, True])
def test_ordered_rows_leave_the_matrix_as_it_was(directed):
    adj = citation(300, 2400, 8, 3, seed=2, directed=directed).adj
    before = worklist(adj.gcn()).light_row.clone()
    ordered = ordered_rows(adj)
    assert "clusters" in ordered.nodes
    assert "clusters" not in adj.nodes
    assert ordered_rows(adj) is ordered, "clusters are found once"
    assert ordered.indices is adj.indices
    fresh = type(adj)(adj.indptr, adj.indices, symmetric=adj.symmetric)
    assert torch.equal(worklist(fresh.gcn()).light_row, before)
    assert not torch.equal(worklist(ordered.gcn()).light_row, before)
    x = torch.randn(adj.num_cols, 5)
    assert torch.equal(ops.spmm(ordered.gcn(), x), ops.spmm(adj.gcn(), x))


def test_of_equal_columns_the_first_is_taken():
    """In one block and over several: the same clusters on every device, whatever is compared first."""
    adj = from_pairs(torch.arange(3), torch.arange(3), 3, 3)
    tie = torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]])
    blocks = [torch.zeros(3, BLOCK) for _ in range(2)]
    for block in blocks:
        block[:, 3:5] = tie
    assert _best_column(iter(blocks), adj).tolist() == [3, 3, 0]
    later = [torch.zeros(3, BLOCK), blocks[1].clone()]
    assert _best_column(iter(later), adj).tolist() == [BLOCK + 3, BLOCK + 3, 0]


def test_of_equal_clusters_the_first_is_next_in_the_chain():
    ring = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    assert chain(ring) == [0, 1, 2, 3]
