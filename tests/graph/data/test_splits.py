"""Splits: masks, ids, random ones."""

from __future__ import annotations

import numpy as np
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


def test_masks_of_zeros_and_ones():
    """As tables have them; ids would list a node twice. Two nodes are too few to tell."""
    mask = np.array([0, 1, 1, 0])
    graph = Graph.from_edges([0], [3], train=mask, val=torch.tensor([1, 0, 0, 0], dtype=torch.uint8))
    assert (graph.train.tolist(), graph.val.tolist()) == ([1, 2], [0])
    assert Graph.from_edges([0], [1], train=[0, 1]).train.tolist() == [0, 1]
    with pytest.raises(GraphError, match="node 1 is listed twice"):
        Graph.from_edges([0], [3], train=mask[:3])


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


def of_classes(*counts):
    """A graph with so many nodes of every class, in no order, and three nodes without a label."""
    y = torch.cat([torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)), torch.tensor([-1] * 3)])
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(7))]
    return Graph.from_edges([0], [1], y=y)


def classes_in(graph, ids):
    return torch.bincount(graph.y[ids], minlength=graph.num_classes).tolist()


def test_a_stratified_split_has_every_class_in_the_same_share_everywhere():
    graph = of_classes(50, 100, 10)
    split = graph.random_split(0.6, 0.2, kind="stratified", seed=1)
    assert [classes_in(graph, getattr(split, part)) for part in ("train", "val", "test")] == [
        [30, 60, 6], [10, 20, 2], [10, 20, 2],
    ]  # fmt: skip
    counts = graph.random_split(16, 32, 16, kind="stratified", seed=1)
    assert classes_in(graph, counts.train) == [5, 10, 1]
    assert split.train.equal(graph.random_split(0.6, 0.2, kind="stratified", seed=1).train)
    assert not split.train.equal(graph.random_split(0.6, 0.2, kind="stratified", seed=2).train)


def test_a_split_per_class_has_as_many_training_nodes_of_each():
    graph = of_classes(50, 100, 10)
    split = graph.random_split(8, 30, 40, kind="per_class", seed=1)
    assert classes_in(graph, split.train) == [8, 8, 8]
    assert (split.val.numel(), split.test.numel()) == (30, 40)
    assert graph.random_split(8, 30, kind="per_class").test.numel() == 160 - 24 - 30
    several = graph.random_splits(3, 8, 30, kind="per_class")
    assert several.num_splits == 3
    assert not several.split(0).train.equal(several.split(1).train)
    several.verify()


@pytest.mark.parametrize("stratified", [False, True])
def test_every_labelled_node_is_tested_in_one_fold(stratified):
    graph = of_classes(50, 100, 10)
    folds = graph.k_fold(5, seed=3, stratified=stratified).verify()
    parts = [folds.split(number) for number in range(folds.num_splits)]
    assert len(parts) == 5
    tested = torch.cat([part.test for part in parts]).sort().values
    assert tested.equal((graph.y >= 0).nonzero().squeeze(1))
    for part, following in zip(parts, [*parts[1:], parts[0]], strict=True):
        assert part.val.equal(following.test)
        assert part.train.numel() == 96
        if stratified:
            assert classes_in(graph, part.test) == [10, 20, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda graph: graph.random_split(20, 5, kind="per_class"), "class 2 has 4 .* fewer than train=20"),
        (lambda graph: graph.random_split(0.5, 0.2, kind="per_class"), "number of training nodes per class"),
        (lambda graph: graph.random_split(2, 200, kind="per_class"), "more nodes than the 58 labelled ones"),
        (lambda graph: graph.random_split(0.9, 0.05, kind="stratified"), "class 2 has 4 .* too few .* in val"),
        (lambda graph: graph.random_split(kind="classes"), "kind='classes': must be one of random, stratified"),
        (lambda graph: graph.k_fold(5, stratified=True), "class 2 has 4 labelled nodes, fewer than 5 folds"),
        (lambda graph: graph.k_fold(2), "folds=2: give a whole number from 3"),
        (lambda graph: Graph.from_edges([0], [1]).random_split(1, 1, kind="per_class"), "has no class per node"),
    ],
)  # fmt: skip
def test_classes_with_too_few_nodes_are_named(make, message):
    with pytest.raises(GraphError, match=message):
        make(of_classes(20, 40, 4))


@pytest.mark.parametrize("seed", [2**63, 1.5, "a"])
def test_a_seed_that_is_no_number_of_64_bits_is_refused(seed):
    for make in (small_graph().random_split, small_graph().k_fold):
        with pytest.raises(GraphError, match=r"seed=.*: must be a whole number, below 2\*\*63"):
            make(*([3] if make.__name__ == "k_fold" else []), seed=seed)
