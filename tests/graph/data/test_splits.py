"""Splits: masks, ids, random ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs_for_tests import small_graph
from weft.core.errors import GraphError
from weft.graph import Graph


def test_masks_and_ids_in_any_order_mean_the_same():
    by_mask = Graph.from_edges([0], [3], train=[True, False, True, False], test=torch.tensor([False] * 4))
    by_ids = Graph.from_edges([0], [3], train=[2, 0])
    assert by_mask.train.tolist() == by_ids.train.tolist() == [0, 2]
    assert by_mask.test.numel() == by_mask.val.numel() == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 60), st.floats(0, 0.6), st.floats(0, 0.4), st.integers(0, 2**31))
def test_random_splits_are_disjoint_cover_and_repeat(nodes, train, val, seed):
    graph = Graph.from_edges([0], [nodes - 1]).random_split(train=train, val=val, seed=seed)
    everything = torch.cat([graph.train, graph.val, graph.test]).sort().values
    assert everything.tolist() == list(range(nodes))
    assert graph.train.numel() == round(train * nodes)
    again = Graph.from_edges([0], [nodes - 1]).random_split(train=train, val=val, seed=seed)
    assert torch.equal(graph.train, again.train)
    assert torch.equal(graph.test, again.test)


def test_random_splits_take_counts_skip_unlabelled_nodes_and_leave_the_graph_alone():
    graph = small_graph()
    split = graph.random_split(train=2, val=1, test=1, seed=3)
    assert [split.train.numel(), split.val.numel(), split.test.numel()] == [2, 1, 1]
    assert 4 not in torch.cat([split.train, split.val, split.test]).tolist()
    assert graph.train.tolist() == [0, 2]
    assert split.adj is graph.adj
    assert (
        graph.random_split(train=3, val=1, seed=1).train.tolist()
        != graph.random_split(train=3, val=1, seed=2).train.tolist()
    )


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [0, 1], "test": [1]}, "node 1 is in both the train and the test split"),
        ({"train": [0, 9]}, r"train\[1\] = 9 is out of range"),
        ({"val": [-1]}, r"val\[0\] = -1 is out of range"),
        ({"val": [2, 2]}, "node 2 is listed twice in the val split"),
        ({"test": [True, False]}, "test mask has 2 entries but the graph has 6 nodes"),
        ({"test": [0.5]}, r"test\[0\] = 0.5"),
        ({"train": [4]}, r"node 4 of the train split has no label"),
        ({"train": [[0, 1]]}, r"train has shape \[1, 2\]"),
    ],
)
def test_wrong_splits_are_named(splits, message):
    with pytest.raises(GraphError, match=message):
        small_graph(**({"train": None, "val": None, "test": None} | splits))


@pytest.mark.parametrize(
    "sizes", [{"train": 0.9, "val": 0.3}, {"train": 5, "val": 1}, {"train": 1.5}, {"val": -1}, {"train": "most"}]
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(GraphError, match=r"train|val"):
        small_graph().random_split(**sizes)
