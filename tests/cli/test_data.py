"""``weft data``: listing, inspecting, making and converting graphs from a shell."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import weft.cli.main as shell
from weft.cli.data import app
from weft.core.errors import GraphError, SpecError
from weft.graph.catalog import datasets
from weft.graph.catalog.listing import DATA_VARIABLE
from weft.graph.readers import read


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "reachable", lambda *_args: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))


def data(*words: object) -> str:
    """What a command that succeeds prints on stdout."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_ls_shows_everything_as_a_table_and_as_json(tmp_path):
    data("make", "citation", "--nodes", 50, "--out", tmp_path / "data" / "mine")
    table = data("ls")
    for name in ("demo", "mine", "shape:ogbn-papers100M", "1,615,685,872", "planetoid:cora", "ogb:ogbn-arxiv"):
        assert name in table
    listed = {entry["name"]: entry for entry in map(json.loads, data("ls", "--json").splitlines())}
    assert listed["mine"]["kind"] == "file"
    assert listed["shape:bgs"]["num_edges"] == 672_884


def test_info_shows_sizes_and_degrees():
    shown = data("info", "demo")
    for fact in ("2,400", "9,600 (symmetric)", "140 / 500 / 1,000", "sparse"):
        assert fact in shown
    stats = json.loads(data("info", "demo", "--json"))
    assert (stats["num_nodes"], stats["num_classes"]) == (2_400, 7)
    assert sum(stats["degree_histogram"]) == 2_400
    assert "relations" in data("info", "shape:bgs?scale=0.01")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cora", "--scale", "0.1"], (271, 1_086, 7)),
        (["shape:cora", "--scale", "0.1"], (271, 1_086, 7)),
        (["citation", "--nodes", "60", "--edges", "200", "--classes", "3", "--directed"], (60, 200, 3)),
        (["citation", "--nodes", "60", "--features", "90", "--density", "0.1", "--relations", "4"], (60, 600, 8)),
    ],
)
def test_make_saves_what_was_asked_for(words, expected, tmp_path):
    data("make", *words, "--out", tmp_path / "made")
    graph = read(tmp_path / "made").verify()
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == expected
    assert json.loads(data("info", tmp_path / "made", "--json"))["num_nodes"] == expected[0]


def test_make_follows_the_seed_and_replaces_only_when_told(tmp_path):
    words = ["make", "citation", "--nodes", "40", "--edges", "100", "--out", tmp_path / "made"]
    data(*words, "--seed", "1")
    first = read(tmp_path / "made").adj.indices.clone()
    with pytest.raises(GraphError, match="already holds a graph"):
        data(*words)
    data(*words, "--seed", "1", "--overwrite")
    assert read(tmp_path / "made").adj.indices.equal(first)
    data(*words, "--seed", "2", "--overwrite")
    assert not read(tmp_path / "made").adj.indices.equal(first)


def test_convert_saves_any_readable_graph(tmp_path):
    np.savez(tmp_path / "edges.npz", src=[0, 1, 1], dst=[1, 2, 2], num_nodes=4)
    data("convert", tmp_path / "edges.npz", tmp_path / "as-is")
    data("convert", tmp_path / "edges.npz", tmp_path / "both-ways", "--undirected")
    data("convert", "demo", tmp_path / "demo")
    assert read(tmp_path / "as-is").num_edges == 3
    assert read(tmp_path / "both-ways").num_edges == 4
    assert read(tmp_path / "demo").num_nodes == 2_400


def test_convert_splits_at_random(tmp_path):
    data("convert", "demo", tmp_path / "shares", "--split", "0.5,0.25")
    data("convert", "demo", tmp_path / "counts", "--split", "140,500,100")
    shares, counts = read(tmp_path / "shares"), read(tmp_path / "counts")
    assert [len(part) for part in (shares.train, shares.val, shares.test)] == [1_200, 600, 600]
    assert [len(part) for part in (counts.train, counts.val, counts.test)] == [140, 500, 100]
    data("convert", "demo", tmp_path / "classes", "--split", "per-class:20,500,1000")
    data("convert", "demo", tmp_path / "folds", "--split", "stratified-folds:5")
    data("convert", "demo", tmp_path / "stratified", "--split", "stratified:0.6,0.2", "--seed", "3")
    assert read(tmp_path / "classes").train.numel() == 7 * 20
    assert read(tmp_path / "folds").num_splits == 5
    demo = read(tmp_path / "shares")
    assert read(tmp_path / "stratified").train.equal(demo.random_split(kind="stratified", seed=3).train)
    for text in ("half", "0.5", "1,2,3,4", "folds:2,3", "by-class:0.5,0.2"):
        with pytest.raises(SpecError, match=f"--split {text}: expected shares such as"):
            data("convert", "demo", tmp_path / "none", "--split", text)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["make", "cora", "--nodes", "5"], SpecError, "takes no --nodes; it takes --scale"),
        (["make", "citation", "--scale", "2"], SpecError, "takes no --scale; it takes .*--homophily"),
        (["make", "corra"], GraphError, "did you mean 'cora'"),
        (["make", "citation", "--nodes", "9", "--edges", "80"], GraphError, "num_edges=80"),
        (["make", "citation", "--device", "tpu9"], SpecError, "tpu9"),
    ],
)
def test_a_mistake_in_make_is_named_and_nothing_is_written(words, error, says, tmp_path):
    with pytest.raises(error, match=says):
        data(*words, "--out", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_undirected_is_for_files():
    with pytest.raises(SpecError, match="'demo' is not the path of one"):
        data("convert", "demo", "out", "--undirected")


def test_the_command_exits_with_two_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["weft", "data", "info", "no-such-graph"])
    with pytest.raises(SystemExit) as ended:
        shell.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("weft: error: there is no graph 'no-such-graph'")
    assert said.count("\n") == 1
