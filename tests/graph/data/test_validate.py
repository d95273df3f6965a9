"""Bad input gets one clear error that names the value, its position and what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graphs_for_tests import small_graph
from weft.core.errors import GraphError, InputError
from weft.graph import Graph
from weft.graph import check as validate
from weft.ops import Adjacency

BAD = {
    "negative id": ({"src": [0, -3], "dst": [1, 1]}, r"src\[1\] = -3 is out of range"),
    "id too large": ({"src": [0, 1], "dst": [1, 5], "num_nodes": 3}, r"dst\[1\] = 5 .* 0..2; .*give a larger"),
    "fractional id": ({"src": [0, 1.5], "dst": [1, 1]}, r"src\[1\] = 1.5 .*integers"),
    "float ids": ({"src": [0.0], "dst": [1]}, r"src\[0\] = 0.0 is of type float64"),
    "names as ids": ({"src": ["a"], "dst": ["b"]}, "src has dtype <U1, for example .*'a'"),
    "boolean ids": ({"src": [True], "dst": [1]}, r"src\[0\] = True"),
    "missing id": ({"src": [None], "dst": [1]}, "src has dtype object"),
    "ragged": ({"src": [[0], [1, 2]], "dst": [1]}, "src is not a rectangular array"),
    "matrix of ids": ({"src": [[0, 1]], "dst": [1]}, r"src has shape \[1, 2\]"),
    "lengths": ({"src": [0, 1], "dst": [1]}, "src has 2 entries but dst has 1"),
    "no nodes": ({"src": [], "dst": []}, "num_nodes=0: a graph needs at least 1 node"),
    "too many nodes": (
        {"src": [], "dst": [], "num_nodes": 2**31},
        r"num_nodes=2147483648 is more than 2\^31",
    ),
    "fractional nodes": ({"src": [0], "dst": [1], "num_nodes": 2.5}, r"num_nodes=2.5 must be a whole number"),
    "narrow ids": (
        {"src": np.array([0, 100], np.int8), "dst": np.array([0, 1], np.uint8), "num_nodes": 50},
        r"src\[1\] = 100 is out of range",
    ),
    "x rows": (
        {"src": [0], "dst": [1], "num_nodes": 2, "x": np.eye(3)},
        "x has 3 rows but the graph has 2 nodes",
    ),
    "y rows": ({"src": [0], "dst": [1], "y": [0, 1, 0], "x": np.eye(2)}, "y has 3 rows but the graph has 2"),
    "weight rows": ({"src": [0], "dst": [1], "edge_weight": [1, 2]}, "edge_weight has 2 rows .* 1 edges"),
    "relation rows": ({"src": [0], "dst": [1], "relation": [1, 2]}, "relation has 2 rows .* 1 edges"),
    "nan feature": (
        {"src": [0], "dst": [1], "x": [[0, 1], [2, float("nan")]]},
        r"x\[1, 1\] is nan: values must be finite",
    ),
    "feature beyond float32": ({"src": [0], "dst": [1], "x": [[1e300], [0]]}, r"x\[0, 0\] is inf"),
    "sparse nan": (
        {"src": [0], "dst": [1], "x": torch.tensor([[0, float("nan")], [0, 0]]).to_sparse()},
        r"x\[0, 1\] is nan",
    ),
    "flat features": ({"src": [0], "dst": [1], "x": [1.0, 2.0]}, r"x has shape \[2\].*x\[:, None\]"),
    "complex features": ({"src": [0], "dst": [1], "x": torch.ones(2, 1, dtype=torch.cfloat)}, "complex64"),
    "infinite weight": ({"src": [0], "dst": [1], "edge_weight": [float("inf")]}, r"edge_weight\[0\] is inf"),
    "negative relation": ({"src": [0], "dst": [1], "relation": [-2]}, r"relation\[0\] = -2 is out of range"),
    "negative label": ({"src": [0], "dst": [1], "y": [0, -2]}, r"y\[1\] = -2 is negative"),
    "float labels": ({"src": [0], "dst": [1], "y": [0.0, 1.0]}, r"y\[0\] = 0.0 is of type float64.*column \[N, 1\]"),
    "infinite target": ({"src": [0], "dst": [1], "y": [0.5, float("inf")]}, r"y\[1\] is inf: numbers to predict"),
    "no target": (
        {"src": [0], "dst": [1], "y": [0.5, float("nan")], "train": [1]},
        r"node 1 of the train split has no label \(y = nan\)",
    ),
    "label matrix": ({"src": [0], "dst": [1], "y": [[0, 1], [3, 0]]}, r"y\[1, 0\] = 3.0: .* 0 or 1"),
    "label cube": ({"src": [0], "dst": [1], "y": np.zeros((2, 2, 2))}, r"y has shape \[2, 2, 2\]"),
    "too few classes": ({"src": [0], "dst": [1], "y": [0, 4], "num_classes": 3}, "num_classes=3 .* 5"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    fields, message = BAD[case]
    with pytest.raises(GraphError, match=message) as caught:
        Graph.from_edges(**fields)
    assert isinstance(caught.value, InputError)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([1, 1], [0], r"indptr\[0\] = 1: row offsets start at 0"),
        ([0, 1], [0, 0], r"indptr\[1\] = 1 but there are 2 entries"),
        ([0, 2, 1, 3], [0, 1, 2], r"indptr\[2\] = 1 is less than indptr\[1\]"),
        ([0], [], "indptr has 1 entries"),
        ([0, 1, 2], [0, 2], r"indices\[1\] = 2 is out of range"),
        ([0, 0, 2], [1, 0], r"indices\[1\] = 0 follows 1 in the same row"),
    ],
)
def test_bad_csr_is_named(indptr, indices, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_csr(indptr, indices)


def test_ids_may_fall_where_a_row_begins():
    assert Graph.from_csr([0, 2, 2, 4], [1, 2, 0, 2]).num_edges == 4


def test_unlabelled_nodes_are_allowed_outside_the_splits_only():
    assert small_graph().y[4] == -1
    with pytest.raises(GraphError, match="node 4 of the val split has no label"):
        small_graph(val=[4])


def test_a_graph_is_made_of_a_plain_square_adjacency():
    indptr, indices = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(GraphError, match="plain square adjacency"):
        Graph(Adjacency(indptr, indices, 3))
    with pytest.raises(GraphError, match="plain square adjacency"):
        Graph(Adjacency(indptr, indices, row_scale=torch.ones(1)))
    with pytest.raises(GraphError, match="relation has 2 rows"):
        Graph(Adjacency(indptr, indices), relation=torch.zeros(2, dtype=torch.int32))


def test_scans_find_the_first_bad_value_across_blocks(monkeypatch):
    monkeypatch.setattr(validate, "BLOCK", 4)
    monkeypatch.setattr(validate.blocks, "__defaults__", (4,))
    values = torch.arange(15)
    assert validate.first_where(values, lambda part: part > 8) == 9
    assert validate.first_where(values, lambda part: part > 20) is None
    indptr = torch.tensor([0, 5, 9, 15])
    indices = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 3])
    with pytest.raises(GraphError, match=r"indices\[14\] = 3 follows 4"):
        validate.check_ascending(indptr, indices)
    validate.check_ascending(indptr, indices.clone().index_fill_(0, torch.tensor([14]), 5))
