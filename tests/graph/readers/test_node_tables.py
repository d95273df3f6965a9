"""Node tables beside edge tables, with the user's own ids."""

from __future__ import annotations

import pytest

import weft
from weft.core.errors import GraphError
from weft.engine.graphs import state_of

NODES = "id,age,income,label,split\nann,1,0.5,cs,train\nbob,2,1.5,math,val\ncid,3,2.5,cs,test\ndan,4,3.5,,\n"
EDGES = "src,dst,weight\nann,bob,1.0\nbob,cid,2.0\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "edges.csv").write_text(EDGES)
    return tmp_path


def test_tables_become_a_graph_that_keeps_the_ids(folder):
    for path in (folder, folder / "edges.csv"):
        graph = weft.load(path)
        assert graph.ids.tolist() == ["ann", "bob", "cid", "dan"]
        assert graph.edge_index().tolist() == [[0, 1], [1, 2]]
        assert graph.edge_weight.tolist() == [1.0, 2.0]
        assert graph.x.tolist() == [[1, 0.5], [2, 1.5], [3, 2.5], [4, 3.5]]
        assert graph.y.tolist() == [0, 1, 0, -1]
        assert (graph.train.tolist(), graph.val.tolist(), graph.test.tolist()) == ([0], [1], [2])
        assert "0 = cs, 1 = math" in graph.notes[0]
    graph.save(folder / "saved")
    assert weft.load(folder / "saved").to("cpu").ids.tolist() == graph.ids.tolist()


def test_parquet_tables_read_the_same(folder, tmp_path):
    parquet, pandas = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pandas")
    assert parquet is not None
    expected = weft.load(folder)
    for name in ("nodes", "edges"):
        pandas.read_csv(folder / f"{name}.csv").to_parquet(folder / f"{name}.parquet")
        (folder / f"{name}.csv").unlink()
    graph = weft.load(folder)
    assert graph.ids.tolist() == expected.ids.tolist()
    assert graph.x.equal(expected.x)
    assert graph.y.equal(expected.y)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("edges.csv", "bob,cid", "bob,eve", r"edges.csv line 3: dst 'eve' is no id that nodes.csv has"),
        ("nodes.csv", "cid,3", "ann,3", r"nodes.csv line 4: id 'ann' is there twice, first in line 2"),
        ("nodes.csv", "bob,2", ",2", r"nodes.csv line 3: id is empty"),
        ("nodes.csv", "2,1.5", "2,", r"nodes.csv line 3: 'income' is empty"),
        ("nodes.csv", "2,1.5", "2,much", r"nodes.csv line 3: 'income' is 'much', which is not a number"),
        ("nodes.csv", ",val", ",later", r"nodes.csv line 3: split 'later' must be train, val, test or empty"),
        ("nodes.csv", "id,", "who,", r"is the id of a node; name it 'id'"),
        ("nodes.csv", "income", "y", r"nodes.csv: 'y' and 'label' can both be its label; rename or leave out one"),
        ("nodes.csv", "income", "Node_ID", r"nodes.csv: 'id' and 'Node_ID' can both be the id of a node"),
        ("nodes.csv", "income", "age", r"nodes.csv has two columns 'age'; give each a name of its own"),
        ("nodes.csv", "2,1.5", f"2,{'x' * 99_999}", r"'income' is '(x){80}', which is not a number"),
        ("nodes.csv", "2,1.5", f"2,{'x' * 200_000}", r"nodes.csv \(.* bytes\) cannot be read: field larger than"),
        ("nodes.csv", "dan", "d" * 1_001, r"nodes.csv: an id has 1,001 characters; at most 1000 are read"),
        ("edges.csv", "src,dst,weight\n", "", r"edges.csv: its first line is an edge; add a line of names above it"),
        ("edges.csv", "weight\nann,bob,1.0", "relation\nann,bob,1.5", r"relation\[0\] = 1.5 is of type float64"),
    ],
)
def test_a_mistake_is_named_with_its_line(folder, file, old, new, message):
    path = folder / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(GraphError, match=message) as caught:
        weft.load(folder)
    assert str(caught.value).count(str(folder)) == 1, "one sentence, about one file"


def test_the_index_of_pandas_is_no_feature_and_nan_is_no_label(folder):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    expected = weft.load(folder)
    tables = {name: pandas.read_csv(folder / f"{name}.csv") for name in ("nodes", "edges")}
    tables["nodes"]["label"] = tables["nodes"]["label"].fillna("nan")
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv")  # with its index, in front
    as_csv = weft.load(folder)
    for name, table in tables.items():
        table.set_index(table.index * 7).to_parquet(folder / f"{name}.parquet")  # with its index, behind
        (folder / f"{name}.csv").unlink()
    for graph in (as_csv, weft.load(folder)):
        assert graph.x.equal(expected.x)
        assert graph.y.tolist() == expected.y.tolist() == [0, 1, 0, -1]
        assert graph.edge_index().equal(expected.edge_index())


def test_columns_of_edges_that_are_not_read_are_noted(folder):
    (folder / "edges.csv").write_text("src,dst,year\nann,bob,1999\n")
    assert "edges.csv: columns not read: year" in weft.load(folder).notes


def test_a_graph_that_is_kept_between_runs_is_read_again_after_its_nodes_changed(folder):
    before = state_of(str(folder / "edges.csv"))
    assert state_of(str(folder / "edges.csv")) == before
    (folder / "nodes.csv").write_text(NODES.replace("ann,1,", "ann,100,"))
    assert state_of(str(folder / "edges.csv")) != before
