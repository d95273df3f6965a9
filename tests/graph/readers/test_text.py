"""Edge lists in text."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest
import torch

from weft.core.errors import GraphError
from weft.graph.readers import read

GOOD = {
    "plain.csv": "0,1\n1,2\n2,0\n",
    "blanks.txt": "0 1\n1   2\n2 0\n",
    "tabs.tsv": "0\t1\n1\t2\n2\t0\n",
    "semicolons.csv": "0;1\n1;2\n2;0\n",
    "header.csv": "source,target\n0,1\n1,2\n2,0\n",
    "swapped.csv": "dst,src\n1,0\n2,1\n0,2\n",
    "quoted.csv": '"src","dst"\n0,1\n1,2\n2,0\n',
    "other names.csv": "paper,cited\n0,1\n1,2\n2,0\n",
    "snap.txt": "# Directed graph\n# FromNodeId\tToNodeId\n\n0\t1\n1\t2 # why not\n\n2\t0\n",
    "konect.edges": "% asym\n% 3 3\n0 1\n1 2\n2 0\n",
    "windows.edgelist": "0,1\r\n1,2\r\n2,0\r\n",
    "no end.csv": "0,1\n1,2\n2,0",
    "UPPER.CSV": "0,1\n1,2\n2,0\n",
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("packed", [False, True])
def test_all_these_are_the_same_triangle(tmp_path, name, packed):
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(GOOD[name].encode()) if packed else GOOD[name].encode())
    graph = read(file)
    assert sorted(graph.edge_index().T.tolist()) == [[0, 1], [1, 2], [2, 0]]
    assert graph.edge_weight is None
    assert graph.name == name.rsplit(".", 1)[0]


def test_weights_and_relations(tmp_path):
    (tmp_path / "w.txt").write_text("0 1 0.5\n1 0 2e-1\n")
    assert read(tmp_path / "w.txt").edge_weight.tolist() == pytest.approx([0.2, 0.5])
    (tmp_path / "r.csv").write_text("src,dst,year,relation,weight\n0,1,1999,4,0.5\n1,0,2001,2,1.5\n")
    graph = read(tmp_path / "r.csv")
    assert graph.edge_weight.tolist() == [1.5, 0.5]
    assert graph.relation.tolist() == [2, 4]


def test_arguments_of_from_edges_are_passed_on(tmp_path):
    (tmp_path / "e.csv").write_text("0,1\n")
    graph = read(tmp_path / "e.csv", directed=False, num_nodes=4, y=[0, 1, 1, 0], train=[0], name="mine")
    assert (graph.num_nodes, graph.num_edges, graph.name) == (4, 2, "mine")
    assert graph.train.tolist() == [0]


def test_a_header_alone_is_a_graph_without_edges(tmp_path):
    (tmp_path / "e.csv").write_text("src,dst\n")
    assert read(tmp_path / "e.csv", num_nodes=2).num_edges == 0


def test_many_edges_equal_numpy(tmp_path):
    edges = np.random.default_rng(0).integers(0, 300, (5000, 2))
    np.savetxt(tmp_path / "e.csv.gz", edges, fmt="%d", delimiter=",")
    graph = read(tmp_path / "e.csv.gz", num_nodes=300)
    found = graph.edge_index().T
    expected = torch.from_numpy(edges[np.lexsort((edges[:, 0], edges[:, 1]))])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n1,x\n", r"line 2: dst 'x' is not an integer"),
        ("# note\n0,1\n\n1,2.5\n", r"line 4: dst '2.5' is not an integer"),
        ("src,dst\n0,1\n1\n", r"line 3: '1' has 1 columns where 2 were expected"),
        ("alice,bob\nbob,carol\n", r"line 2: 'bob,carol' holds no integer node ids"),
        ("0.5,1\n", r"line 1: src '0.5' is not an integer"),
        ("0,1,heavy\n", r"line 1: edge_weight 'heavy' is not a number"),
        ("0,1,2,3\n", "has 4 columns and no header"),
        ("7\n", "has 1 column; an edge needs two"),
        ("nodes\n7\n", "single column 'nodes'"),
        ("src,other\n0,1\n", "only the source is recognised; name the other one 'dst'"),
        ("", "holds no edges"),
        ("# only\n# words\n", "holds no edges"),
        ("0,1\n-4,1\n", r"src\[1\] = -4 is out of range"),
        ("0,99999999999999999999\n", r"line 1: dst '99999999999999999999' is not an integer"),
        ("0,1,inf\n", r"edge_weight\[0\] is inf"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(GraphError, match=message):
        read(tmp_path / "e.csv")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_truncated_gzip_is_one_clear_error(tmp_path, share):
    file = tmp_path / "e.csv.gz"
    edges = np.random.default_rng(0).integers(0, 10**6, (20_000, 2))
    np.savetxt(file, edges, fmt="%d", delimiter=",")
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(GraphError, match=r"e.csv.gz \(\d+ bytes\) cannot be read.*truncated"):
        read(file)


def test_binary_files_are_refused(tmp_path):
    (tmp_path / "e.csv").write_bytes(b"\xff\xfe\x00\x80" * 10)
    with pytest.raises(GraphError, match="cannot be read"):
        read(tmp_path / "e.csv")
