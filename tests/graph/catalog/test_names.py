"""Loading by name: embedded, paths, data folders, shapes, and what an unknown name gets."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from tests.graph.catalog.demo_graph import demo_arrays, demo_graph
from weft.core.errors import GraphError, SpecError
from weft.graph import Graph, SparseFeatures
from weft.graph.catalog import datasets
from weft.graph.catalog import names as catalog
from weft.graph.catalog.listing import DATA_VARIABLE, DEMO_SIZES, entries
from weft.graph.generate import citation

CORA = {"num_nodes": 3, "src": [0, 1], "dst": [1, 2], "y": [0, 1, 0], "train": [0]}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No test reaches a network, or the user's own data."""

    def refuse(*_args, **_options):
        raise AssertionError("a test tried to reach the network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(datasets, "reachable", lambda *_args: False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def test_demo_is_embedded_small_and_whole():
    graph = catalog.load("demo").verify()
    assert graph.name == "demo"
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes) == DEMO_SIZES
    assert isinstance(graph.x, SparseFeatures)
    assert graph.adj.symmetric
    assert [part.numel() for part in (graph.train, graph.val, graph.test)] == [140, 500, 1_000]
    assert catalog.DEMO.stat().st_size < 300_000


def test_demo_is_what_its_recipe_makes():
    made, loaded = demo_graph(), catalog.load("demo")
    assert torch.equal(made.adj.indices, loaded.adj.indices)
    assert torch.equal(made.x.to_dense(), loaded.x.to_dense())
    for name in ("y", "train", "val", "test"):
        assert torch.equal(getattr(made, name), getattr(loaded, name))
    assert set(demo_arrays()) == set(np.load(catalog.DEMO).files)


def test_a_path_is_read(tmp_path):
    citation(20, 40, 3, 2, name="mine").save(tmp_path / "saved")
    assert catalog.load(tmp_path / "saved").name == "mine"
    assert catalog.load(str(tmp_path / "saved")).num_edges == 40
    shutil.copy(catalog.DEMO, tmp_path / "copy.npz")
    assert catalog.load(tmp_path / "copy.npz").name == "copy"
    with pytest.raises(GraphError, match="nothing-here does not exist"):
        catalog.load(tmp_path / "nothing-here")
    with pytest.raises(GraphError, match=r"nothing\.npz does not exist; check the path"):
        catalog.load("nothing.npz")


def test_a_file_without_a_separator_is_a_path_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(catalog.DEMO, "here.npz")
    assert catalog.load("here.npz").name == "here"


def test_data_folders_are_searched_in_order(tmp_path, monkeypatch):
    for folder, nodes in (("root", 5), ("variable", 6), ("home/.cache/weft/data", 7)):
        (tmp_path / folder).mkdir(parents=True)
        np.savez(tmp_path / folder / "cora.npz", **{**CORA, "num_nodes": nodes, "y": [0] * nodes})
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "variable"))
    assert catalog.load("cora", root=tmp_path / "root").num_nodes == 5
    assert catalog.load("cora").num_nodes == 6
    monkeypatch.delenv(DATA_VARIABLE)
    assert catalog.load("cora").num_nodes == 7


def test_a_saved_folder_in_a_data_folder_has_a_name(tmp_path):
    citation(20, 40, 3, 2).save(tmp_path / "mine")
    assert catalog.load("mine", root=tmp_path).num_edges == 40
    assert "mine" in [entry.name for entry in entries(tmp_path) if entry.kind == "file"]


def test_shapes_take_a_scale_and_a_seed():
    tenth = catalog.load("shape:cora?scale=0.1")
    assert tenth.num_nodes == 271
    seeded = catalog.load("shape:cora?scale=0.1&seed=4")
    assert torch.equal(seeded.adj.indices, catalog.load("shape:cora?scale=0.1", seed=4).adj.indices)
    assert not torch.equal(seeded.adj.indices, tenth.adj.indices)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shape:cora?size=2", "no option 'size'; a shape takes scale and seed"),
        ("shape:cora?scale=big", "scale='big' is not a number"),
        ("shape:cora?seed=0.5", "seed='0.5' is not an integer"),
        ("shape:corra", r"no shape 'corra' \(did you mean 'cora'"),
        ("dmeo", r"no graph 'dmeo'.*did you mean 'demo'"),
        ("xyzzy", "no graph 'xyzzy'.*weft data ls"),
        ("redit", "did you mean 'reddit'"),
        ("reddit", "choose 'shape:reddit'"),
        ("ogbn-arxiv", "choose 'shape:ogbn-arxiv' or 'ogb:ogbn-arxiv'"),
        ("cora", "planetoid:cora is not on this machine yet.*cora.npz into .*shape:cora"),
        ("planetoid:cora", "github.com does not answer.*shape:cora"),
        ("planetoid:corra", r"planetoid:corra is not one of cora, citeseer, pubmed \(did you mean 'cora'"),
        ("ogb:ogbn-arxiv", "arxiv.zip does not answer.*shape:ogbn-arxiv"),
        ("ogb:ogbn-arxif", "did you mean 'ogbn-arxiv'"),
        ("pyg:Reddit", "data.pyg.org does not answer.*shape:reddit"),
        ("pyg:Redit", "torch_geometric.datasets has no 'Redit'.*'Reddit'"),
    ],
)
def test_a_name_that_cannot_be_loaded_says_what_can(name, says):
    with pytest.raises(GraphError, match=says) as caught:
        catalog.load(name)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_is_no_name():
    with pytest.raises(SpecError, match=r"graph=None must be a name, a path, a weft\.Graph, or a Data"):
        catalog.load(None)


def test_everything_listed_has_a_kind_and_every_shape_its_size():
    listed = {entry.name: entry for entry in entries()}
    assert {entry.kind for entry in listed.values()} == {"embedded", "generated", "download"}
    assert listed["shape:ogbn-products"].num_edges == 123_718_280
    assert isinstance(catalog.load("shape:bgs?scale=0.01"), Graph)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_loaded_onto_a_device():
    assert catalog.load("demo", device="cuda").device.type == "cuda"
    assert catalog.load("shape:cora?scale=0.1", device="cuda").x.device.type == "cuda"
