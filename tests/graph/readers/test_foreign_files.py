"""Files as other programs write them: numpy's headers, pandas' index, marks at the beginning, no edges at all."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError


def test_an_array_that_numpy_saved_is_read(tmp_path):
    """D5: "no readable header" for version 1 of the format, which np.save writes."""
    graph = tiny_graph()
    graph.save(tmp_path / "graph")
    np.save(tmp_path / "graph" / "x.npy", graph.x.numpy() * 2)
    assert (tmp_path / "graph" / "x.npy").read_bytes()[6] == 1
    assert torch.equal(weft.load(tmp_path / "graph", verify=True).x, graph.x * 2)


def test_an_ogb_folder_without_edges_is_a_graph(tmp_path):
    """D5: refused."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, text in {"edge": "", "num-edge-list": "0\n", "num-node-list": "3\n", "node-feat": "1\n2\n3\n"}.items():
        (raw / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    graph = weft.load(tmp_path)
    assert (graph.num_nodes, graph.num_edges) == (3, 0)


@pytest.mark.parametrize("names", ["a,b", "src,dst"])
def test_the_index_of_pandas_is_no_end_of_an_edge(tmp_path, names):
    """D5: read as edges."""
    (tmp_path / "edges.csv").write_text(f",{names}\n0,5,6\n1,6,4\n2,4,5\n")
    found = {tuple(edge) for edge in weft.load(tmp_path / "edges.csv").edge_index().T.tolist()}
    assert found == {(5, 6), (6, 4), (4, 5)}


def test_an_index_without_names_is_refused_and_a_weight_is_not(tmp_path):
    (tmp_path / "edges.csv").write_text("0,5,6\n1,6,4\n2,4,5\n")
    with pytest.raises(GraphError, match="counts the lines, as an index does that pandas writes"):
        weft.load(tmp_path / "edges.csv")
    (tmp_path / "edges.csv").write_text("0,5,0.5\n1,6,4\n2,4,5\n")
    assert weft.load(tmp_path / "edges.csv").num_edges == 3
    (tmp_path / "edges.csv").write_text("src,dst,weight\n0,5,6\n1,6,4\n2,4,5\n")
    assert weft.load(tmp_path / "edges.csv").num_edges == 3


def test_a_mark_at_the_beginning_does_not_count(tmp_path):
    """D5: a BOM was taken for a part of the first name."""
    (tmp_path / "edges.csv").write_text("dst,src\n1,0\n2,0\n", encoding="utf-8-sig")
    assert {tuple(edge) for edge in weft.load(tmp_path / "edges.csv").edge_index().T.tolist()} == {(0, 1), (0, 2)}
    (tmp_path / "edges.csv").write_text("3,0\n2,0\n", encoding="utf-8-sig")
    assert weft.load(tmp_path / "edges.csv").num_edges == 2


def test_ids_out_of_range_in_a_saved_graph_are_found_before_training(tmp_path):
    """D1: a segmentation fault."""
    graph = tiny_graph()
    for bad in (60, -1):
        graph.save(tmp_path / "graph", overwrite=True)
        indices = np.load(tmp_path / "graph" / "indices.npy")
        indices[3] = bad
        np.save(tmp_path / "graph" / "indices.npy", indices)
        with pytest.raises(GraphError, match="out of range"):
            weft.run(weft.Task(graph=str(tmp_path / "graph"), epochs=1), progress=False)
        result = weft.run(weft.Task(graph=graph, hidden=4, epochs=1), progress=False, device="cpu")
        with pytest.raises(GraphError, match="out of range"):
            result.predict(tmp_path / "graph")


def test_columns_and_files_that_are_not_read_are_named(tmp_path):
    (tmp_path / "edges.csv").write_text(",src,dst,year\n0,5,6,1999\n1,6,4,2000\n")
    assert weft.load(tmp_path / "edges.csv").notes == ("edges.csv: columns not read: year",)
    (tmp_path / "plain.csv").write_text("src,dst,weight\n5,6,1\n")
    assert weft.load(tmp_path / "plain.csv").notes == ()
    raw = tmp_path / "raw"
    raw.mkdir()
    files = {"edge": "0,1\n", "num-edge-list": "1\n", "num-node-list": "2\n", "node_year": "1\n2\n"}
    for name, text in files.items():
        (raw / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert weft.load(tmp_path).notes == (f"{tmp_path.name}: not read: node_year.csv.gz",)


def test_what_is_not_read_of_pyg_data_is_named():
    data = pytest.importorskip("torch_geometric.data").Data(
        x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]), pos=torch.zeros(2, 3)
    )
    assert weft.Graph.from_pyg(data).notes == ("not read of the PyG data: pos",)
    assert weft.Graph.from_pyg(tiny_graph().to_pyg()).notes == ()
