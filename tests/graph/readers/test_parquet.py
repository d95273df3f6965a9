"""Edge lists in Parquet."""

from __future__ import annotations

import os
import sys

import pytest

from weft.core.errors import GraphError
from weft.graph.readers import read

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def test_columns_by_name(tmp_path):
    table = pa.table({"weight": [0.5, 2.0], "dst": [1, 0], "src": [0, 2], "etype": pa.array([1, 0], pa.int8())})
    pq.write_table(table, tmp_path / "e.parquet")
    graph = read(tmp_path / "e.parquet", num_nodes=5)
    assert graph.edge_index().tolist() == [[2, 0], [0, 1]]
    assert graph.edge_weight.tolist() == [2.0, 0.5]
    assert graph.relation.tolist() == [0, 1]
    assert (graph.num_nodes, graph.name) == (5, "e")


def test_columns_by_position_and_options(tmp_path):
    pq.write_table(pa.table({"paper": [0, 1], "cites": [1, 2]}), tmp_path / "e.pq")
    assert read(tmp_path / "e.pq", directed=False).num_edges == 4


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"src": ["a"], "dst": ["b"]}, r"column 'src' holds object values, for example \['a'\]"),
        ({"src": [0], "dst": [1.5]}, "column 'dst' holds float64 values"),
        ({"src": [0, None], "dst": [1, 2]}, "row 1 of column 'src' is empty"),
        ({"src": [0]}, "single column 'src'"),
    ],
)
def test_bad_columns_are_named(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "e.parquet")
    with pytest.raises(GraphError, match=message):
        read(tmp_path / "e.parquet")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_truncated_files_are_one_clear_error(tmp_path, share):
    file = tmp_path / "e.parquet"
    pq.write_table(pa.table({"src": list(range(500)), "dst": list(range(500))}), file)
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(GraphError, match=r"e.parquet \(\d+ bytes\) is not a readable Parquet file"):
        read(file)


def test_without_pyarrow_there_is_one_clear_error(tmp_path, monkeypatch):
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "e.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(GraphError, match="needs pyarrow"):
        read(tmp_path / "e.parquet")
