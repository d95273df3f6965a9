"""Downloaded datasets, without downloading: fakes stand in for PyG's classes and for OGB's server."""

from __future__ import annotations

import gzip
import io
import threading
import urllib.error
import zipfile

import numpy as np
import pytest
import torch

from weft.core.errors import GraphError
from weft.graph import SparseFeatures
from weft.graph.catalog import datasets
from weft.graph.catalog import names as catalog

pyg_data = pytest.importorskip("torch_geometric.data")


def citation_data(masks: bool = True) -> pyg_data.Data:
    x = torch.zeros(10, 40)
    x[torch.arange(10), torch.arange(10) * 3] = 1.0
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    data = pyg_data.Data(x=x, edge_index=edges, y=torch.arange(10) % 2)
    if masks:
        for name, ids in {"train": [0, 1], "val": [2], "test": [5, 6]}.items():
            data[f"{name}_mask"] = torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
    return data


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(datasets, "reachable", lambda *_args: True)


def test_planetoid_comes_through_pyg_with_its_split_and_sparse_features(monkeypatch, online, tmp_path):
    asked = []

    def fake(root, name):
        asked.append((root, name))
        return [citation_data()]

    monkeypatch.setattr("torch_geometric.datasets.Planetoid", fake)
    graph = catalog.load("Cora", root=tmp_path)
    assert asked == [(str(tmp_path / "planetoid"), "Cora")]
    assert graph.name == "cora"
    assert isinstance(graph.x, SparseFeatures)
    assert graph.x.nnz == 10
    assert graph.train.tolist() == [0, 1]
    assert graph.test.tolist() == [5, 6]


def test_pyg_datasets_take_a_part_and_get_a_split(monkeypatch, online, tmp_path):
    monkeypatch.setattr("torch_geometric.datasets.Amazon", lambda root, name: [citation_data(name != "Photo")])
    graph = catalog.load("pyg:Amazon/Photo", root=tmp_path)
    assert graph.name == "amazon/photo"
    assert [part.numel() for part in (graph.train, graph.val, graph.test)] == [6, 2, 2]


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("bad\narchive"), EOFError()])
def test_a_loader_that_fails_is_one_clear_line(monkeypatch, online, tmp_path, error):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("torch_geometric.datasets.Planetoid", fail)
    with pytest.raises(GraphError, match=f"planetoid:cora could not be loaded: {type(error).__name__}") as caught:
        catalog.load("planetoid:cora", root=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_dataset_of_another_kind_is_refused(monkeypatch, online, tmp_path):
    monkeypatch.setattr("torch_geometric.datasets.Reddit", lambda root: [])
    with pytest.raises(GraphError, match="does not hold one graph"):
        catalog.load("pyg:Reddit", root=tmp_path)


def test_without_pyg_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "torch_geometric", None)
    with pytest.raises(GraphError, match="needs PyG: pip install torch-geometric"):
        catalog.load("planetoid:cora", root=tmp_path)


def test_files_from_an_earlier_time_need_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "reachable", lambda *_args: pytest.fail("the network was asked for"))
    monkeypatch.setattr("torch_geometric.datasets.Planetoid", lambda root, name: [citation_data()])
    processed = tmp_path / "planetoid" / "citeseer" / "processed"
    processed.mkdir(parents=True)
    (processed / "data.pt").touch()
    assert catalog.load("citeseer", root=tmp_path).num_nodes == 10


# ---- OGB ----------------------------------------------------------------------------------------------


def ogb_archive() -> bytes:
    """arxiv's layout with five nodes and four edges."""
    tables = {
        "raw/edge": [[0, 1], [1, 2], [3, 2], [4, 0]],
        "raw/num-node-list": [[5]],
        "raw/num-edge-list": [[4]],
        "raw/node-feat": np.eye(5),
        "raw/node-label": [[0], [1], [0], [1], [2]],
        "split/time/train": [[0], [1]],
        "split/time/valid": [[2]],
        "split/time/test": [[3], [4]],
    }
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, table in tables.items():
            text = "".join(",".join(str(value) for value in row) + "\n" for row in np.asarray(table).tolist())
            archive.writestr(f"arxiv/{name}.csv.gz", gzip.compress(text.encode()))
    return written.getvalue()


def serve(monkeypatch, body: bytes) -> list[str]:
    asked = []

    def answer(url, timeout):
        asked.append(url)
        return io.BytesIO(body)

    monkeypatch.setattr("urllib.request.urlopen", answer)
    return asked


def test_ogb_is_fetched_once_and_kept(monkeypatch, online, tmp_path):
    asked = serve(monkeypatch, ogb_archive())
    first, again = (catalog.load("ogb:ogbn-arxiv", root=tmp_path) for _ in range(2))
    assert asked == [f"{datasets.OGB_HOST}/arxiv.zip"]
    assert (first.num_nodes, first.num_edges, first.num_classes, first.name) == (5, 4, 3, "ogbn-arxiv")
    assert first.val.tolist() == [2]
    assert torch.equal(first.adj.indices, again.adj.indices)
    assert sorted(path.name for path in (tmp_path / "ogb").iterdir()) == ["ogbn-arxiv"]


@pytest.mark.parametrize("body", [b"not a zip", ogb_archive()[:200]], ids=["no archive", "torn"])
def test_a_broken_archive_leaves_nothing_behind(monkeypatch, online, tmp_path, body):
    serve(monkeypatch, body)
    with pytest.raises(GraphError, match="ogb:ogbn-arxiv could not be fetched: BadZipFile"):
        catalog.load("ogb:ogbn-arxiv", root=tmp_path)
    assert list((tmp_path / "ogb").iterdir()) == []


# ---- is there a network? ------------------------------------------------------------------------------


def test_a_host_that_answers_anything_is_reachable(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: io.BytesIO())
    assert datasets.reachable("https://example.invalid")

    def refuse(request, timeout):
        raise urllib.error.HTTPError(request.full_url, 405, "no HEAD", None, None)

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    assert datasets.reachable("https://example.invalid")


def test_a_host_that_refuses_or_hangs_is_not(monkeypatch):
    def refuse(request, timeout):
        raise urllib.error.URLError("no such host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    assert not datasets.reachable("https://example.invalid")
    released = threading.Event()

    def hang(request, timeout):
        released.wait()
        return io.BytesIO()

    monkeypatch.setattr("urllib.request.urlopen", hang)
    assert not datasets.reachable("https://example.invalid", seconds=0.05)
    released.set()
