"""Rows by cluster on a GPU: the same bits as by length, in every model, and temporary memory is released."""

from __future__ import annotations

import pytest
import torch

from tests import stacks
from tests.graphs_for_tests import with_relations
from tests.stacks import MODELS
from weft import ops
from weft.graph.catalog import shapes
from weft.graph.generate import citation
from weft.ops.csr.worklist import worklist
from weft.ops.sparse.row_clusters import clusters, order_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEMBERS = [{"seed": seed, "lr": 0.01 * seed, "dropout": 0.2 * seed, "epochs": 12} for seed in (1, 2, 3)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("directed", [False, True])
def test_training_has_the_same_bits(model, directed):
    graph = with_relations(citation(6000, 60000, 20, 5, seed=1, directed=directed))
    looks = []
    for rows in ("by_length", "clustered"):
        run = stacks.start(stacks.tasks_of(graph, MEMBERS, model=model), graph, "cuda", row_order=rows)
        looks.append([poll.rows for poll in run.advance(100)])
        assert run.recorded, run.notes
        assert ("clusters" in run.graph.adj.nodes) == (rows == "clustered")
    assert looks[0] == looks[1]


def test_products_have_the_same_bits():
    adj = shapes.make("ogbn-arxiv", device=torch.device("cuda"), scale=0.2).adj
    matrix = adj.gcn()
    before = worklist(matrix)
    for width, tasks in ((16, 3), (64, 4), (256, 1)):
        x = torch.randn(tasks, matrix.num_cols, width, device="cuda")
        by_length = ops.spmm(matrix, x)
        ordered = type(matrix)(matrix.indptr, matrix.indices, row_scale=matrix.row_scale, col_scale=matrix.col_scale)
        order_rows(ordered)
        assert torch.equal(ops.spmm(ordered, x), by_length)
        assert not torch.equal(worklist(ordered).light_row, before.light_row)


def test_clusters_are_the_same_in_every_run():
    adj = shapes.make("ogbn-arxiv", device=torch.device("cuda"), scale=0.2).adj
    found = clusters(adj)
    for _ in range(3):
        assert torch.equal(clusters(adj), found)
    inside = (found[adj.rows().long()] == found[adj.indices.long()]).float().mean()
    assert inside > 5 * (found.bincount().float() / adj.num_rows).square().sum()


def test_what_it_took_is_given_back():
    adj = shapes.make("ogbn-arxiv", device=torch.device("cuda")).adj
    order_rows(shapes.make("ogbn-arxiv", device=torch.device("cuda")).adj)  # kernels and workspaces are there from here
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    order_rows(adj)
    assert torch.cuda.memory_allocated() - allocated <= 4 * adj.num_rows + (1 << 20)
    assert torch.cuda.memory_reserved() - reserved <= 24 << 20


def test_a_step_that_was_recorded_before_goes_on():
    graph = citation(6000, 60000, 20, 5, seed=1).to("cuda")
    tasks = stacks.tasks_of(graph, MEMBERS)
    whole = stacks.start(tasks, graph, "cuda")
    expected = [poll.rows for poll in whole.advance(100)]
    run = stacks.start(tasks, graph, "cuda")
    run.advance(4)
    order_rows(graph.adj)
    junk = [torch.full((6000,), 1 << 30, dtype=torch.int32, device="cuda") for _ in range(64)]
    run.advance(100)
    del junk
    assert [poll.rows for poll in run.poll()] == expected
