"""``read`` recognises what lies at a path, and says so when it cannot."""

from __future__ import annotations

import pytest

from tests.graphs_for_tests import SHARED_DATA, assert_same, small_graph
from weft.core.errors import GraphError
from weft.graph.readers import read


def test_a_saved_folder_is_mapped(tmp_path):
    small_graph().save(tmp_path / "g")
    assert_same(read(tmp_path / "g"), small_graph())
    assert_same(read(tmp_path / "g", verify=True), small_graph())


def test_open_reads_files_too(tmp_path):
    (tmp_path / "e.csv").write_text("0,1\n1,2\n")
    assert read(str(tmp_path / "e.csv"), directed=False).num_edges == 4


@pytest.mark.parametrize("name", ["graph.xlsx", "graph", "graph.gz", "graph.tar.gz"])
def test_unknown_kinds_are_refused_with_the_known_ones(tmp_path, name):
    (tmp_path / name).write_text("0 1\n")
    with pytest.raises(GraphError, match=r"not a known kind of graph file.*\.npz.*\.parquet"):
        read(tmp_path / name)


def test_missing_files_and_foreign_folders_are_named(tmp_path):
    with pytest.raises(GraphError, match=r"nowhere.csv does not exist"):
        read(tmp_path / "nowhere.csv")
    with pytest.raises(GraphError, match=r"neither meta.json .* nor raw/"):
        read(tmp_path)


def test_unknown_options_are_named(tmp_path):
    (tmp_path / "e.csv").write_text("0,1\n")
    with pytest.raises(GraphError, match=r"takes no option 'colour'; its options are .*directed"):
        read(tmp_path / "e.csv", colour="red")
    small_graph().save(tmp_path / "g")
    with pytest.raises(GraphError, match="takes no option 'directed'"):
        read(tmp_path / "g", directed=False)


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "max_degree"),
    [
        ("cora", 2_708, 10_556, 1_433, 7, 168),
        ("citeseer", 3_327, 9_104, 3_703, 6, 99),
        ("facebook", 22_470, 341_646, 4_714, 4, 709),
        ("squirrel", 5_201, 396_706, 3_148, 5, 1_903),
        ("twitch_de", 9_498, 306_276, 3_170, 2, 4_259),
    ],
)
def test_real_graphs(name, nodes, edges, features, classes, max_degree):
    file = SHARED_DATA / f"{name}.npz"
    if not file.exists():
        pytest.skip("the real graphs are not beside this checkout")
    stats = read(file).stats()
    assert (stats.name, stats.num_nodes, stats.num_edges) == (name, nodes, edges)
    assert (stats.num_features, stats.num_classes, stats.max_degree) == (features, classes, max_degree)
    assert stats.symmetric
    assert stats.sparse_features
