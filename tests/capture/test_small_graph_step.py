"""A real step on a small graph, scaled, equals the dry run at full size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.capture.test_capture import Plain, made
from tests.capture.test_cognn import Chain
from tests.graphs_for_tests import PRODUCTS
from weft.capture.meta_graph import META, meta_graph
from weft.capture.small_graph_step import EDGES, NODES, TEST, TRAIN, VAL, Sizes, small_graph
from weft.core.task import Task
from weft.runtime.dry_run import CPU, _follow, default_plan


def test_dimensions_say_what_they_count():
    sizes = Sizes.for_graph(PRODUCTS)
    nodes, edges = PRODUCTS.num_nodes, PRODUCTS.num_edges
    assert sizes.shape((NODES, 64)) == (nodes, 64)
    assert sizes.shape((2, EDGES)) == (2, edges)
    assert sizes.shape((EDGES + NODES, 8)) == (edges + nodes, 8)
    assert sizes.shape((NODES + 1,)) == (nodes + 1,)
    assert sizes.shape((2 * EDGES,)) == (2 * edges,)
    assert sizes.shape((TRAIN, 3)) == (PRODUCTS.num_train, 3)
    assert sizes.shape((TRAIN + VAL + TEST, 3)) == (2_449_029, 3)
    assert sizes.shape((64, 100, 47, 1)) == (64, 100, 47, 1)


@pytest.mark.parametrize(
    "changes", [{}, {"multilabel": True}, {"weighted": True}, {"num_val": 0, "num_test": 0}], ids=str
)
def test_the_small_graph_has_its_primes_and_the_large_ones_features(changes):
    graph = small_graph(Sizes.for_graph(replace(PRODUCTS, **changes)))
    assert (graph.num_nodes, graph.num_edges) == (NODES, EDGES)
    assert (graph.num_features, graph.num_classes) == (100, 47)
    assert graph.train.numel() == TRAIN
    assert graph.test.numel() == (0 if "num_test" in changes else TEST)
    assert not bool((graph.adj.rows() == graph.adj.indices).any())


class Mixed(nn.Module):
    """PyG's calling convention with a norm, a dropout of torch's own, and self loops appended."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inputs, 24), nn.Linear(24, outputs)
        self.norm, self.drop = nn.BatchNorm1d(24), nn.Dropout(0.5)

    def forward(self, x, edge_index):
        loops = torch.arange(x.shape[0], device=x.device).expand(2, -1)
        src, dst = torch.cat([edge_index, loops], 1)
        x = self.drop(self.norm(self.one(x)).relu())
        messages = self.two(x)[src]
        return messages.new_zeros(x.shape[0], messages.shape[1]).index_add(0, dst, messages)


def chain(inputs: int, outputs: int) -> nn.Module:
    return Chain([inputs, 16, 32, outputs])


@pytest.mark.parametrize("model", [chain, Mixed, Plain])
def test_scaled_is_followed(model):
    task = Task(graph="products", model=model)
    plan = default_plan([task], "cpu")
    sizes = Sizes.for_graph(PRODUCTS)
    directed = replace(PRODUCTS, symmetric=False)  # as the small graph is
    followed = _follow([task], lambda: meta_graph(directed), plan, META).program
    scaled = _follow([task], lambda: small_graph(sizes), plan, CPU, sizes).program
    assert made(scaled) == made(followed)
    for kind in ("activation", "gradient", "weight", "input"):
        assert scaled.bytes_by_kind()[kind] == followed.bytes_by_kind()[kind]
