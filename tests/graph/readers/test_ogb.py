"""OGB's folders, in the text and the binary layout."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from weft.core.errors import GraphError
from weft.graph.readers import read

EDGES = np.array([[0, 1], [1, 2], [3, 1], [0, 2]])
FEATURES = np.array([[0.5, 1], [1, 2], [2, 3], [-4, 0]], dtype=np.float32)


def write_csv(path: Path, rows: np.ndarray, fmt: str = "%d") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, np.atleast_1d(rows), fmt=fmt, delimiter=",")


def write_splits(folder: Path, scheme: str = "time") -> None:
    for name, ids in (("train", [0, 3]), ("valid", [1]), ("test", [2])):
        write_csv(folder / "split" / scheme / f"{name}.csv.gz", np.array(ids))


@pytest.fixture
def text_folder(tmp_path) -> Path:
    raw = tmp_path / "ogbn_arxiv" / "raw"
    write_csv(raw / "edge.csv.gz", EDGES)
    write_csv(raw / "node-feat.csv.gz", FEATURES, fmt="%g")
    write_csv(raw / "node-label.csv.gz", np.array([2, 0, 1, 1]))
    write_csv(raw / "num-node-list.csv.gz", np.array([4]))
    write_csv(raw / "num-edge-list.csv.gz", np.array([4]))
    write_splits(tmp_path / "ogbn_arxiv")
    return tmp_path / "ogbn_arxiv"


@pytest.fixture
def binary_folder(tmp_path) -> Path:
    raw = tmp_path / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    np.savez(
        raw / "data.npz",
        edge_index=EDGES.T,
        node_feat=FEATURES.astype(np.float16),
        num_nodes_list=np.array([4]),
        num_edges_list=np.array([4]),
    )
    np.savez(raw / "node-label.npz", node_label=np.array([[2.0], [0.0], [1.0], [1.0]], dtype=np.float32))
    write_splits(tmp_path / "ogbn_papers100M")
    return tmp_path / "ogbn_papers100M"


def test_the_text_layout(text_folder):
    graph = read(text_folder)
    assert sorted(graph.edge_index().T.tolist()) == sorted(EDGES.tolist())
    np.testing.assert_array_equal(graph.x.numpy(), FEATURES)
    assert graph.y.tolist() == [2, 0, 1, 1]
    assert (graph.train.tolist(), graph.val.tolist(), graph.test.tolist()) == ([0, 3], [1], [2])
    assert (graph.name, graph.adj.symmetric) == ("ogbn_arxiv", False)
    assert read(text_folder, directed=False).num_edges == 8


def test_the_binary_layout_keeps_half_precision_and_marks_unlabelled_nodes(binary_folder):
    graph = read(binary_folder)
    assert sorted(graph.edge_index().T.tolist()) == sorted(EDGES.tolist())
    assert str(graph.x.dtype) == "torch.float16"
    assert graph.y.tolist() == [2, 0, 1, 1]
    labels = np.array([[2.0], [0.0], [1.0], [np.nan]], dtype=np.float32)
    np.savez(binary_folder / "raw" / "node-label.npz", node_label=labels)
    write_csv(binary_folder / "split" / "time" / "train.csv.gz", np.array([0]))
    assert read(binary_folder).y.tolist() == [2, 0, 1, -1]


@pytest.mark.parametrize("name", ["ogbn_products", "ogbn_proteins"])
def test_one_way_datasets_get_their_way_back(text_folder, name):
    folder = text_folder.rename(text_folder.with_name(name))
    assert read(folder).num_edges == 8
    assert read(folder, directed=True).num_edges == 4


def test_several_labels_per_node_and_no_features(text_folder):
    write_csv(text_folder / "raw" / "node-label.csv.gz", np.array([[0, 1], [1, 1], [0, 0], [1, 0]]))
    (text_folder / "raw" / "node-feat.csv.gz").unlink()
    graph = read(text_folder)
    assert graph.multilabel
    assert graph.num_classes == 2
    assert graph.x is None


def test_split_schemes(text_folder):
    write_splits(text_folder, "random")
    with pytest.raises(GraphError, match="several schemes, random, time; choose one with split="):
        read(text_folder)
    assert read(text_folder, split="time").train.tolist() == [0, 3]
    with pytest.raises(GraphError, match=r"split='size' is not in .* random, time"):
        read(text_folder, split="size")


def test_no_splits_are_fine(text_folder):
    for file in (text_folder / "split" / "time").iterdir():
        file.unlink()
    (text_folder / "split" / "time").rmdir()
    assert read(text_folder).train.numel() == 0


@pytest.mark.parametrize(
    "file",
    ["raw/edge.csv.gz", "raw/num-node-list.csv.gz", "raw/num-edge-list.csv.gz", "split/time/valid.csv.gz"],
)
def test_missing_files_are_named(text_folder, file):
    (text_folder / file).unlink()
    with pytest.raises(GraphError, match=f"{Path(file).name} is missing"):
        read(text_folder)


def test_truncated_short_and_garbled_files_are_named(text_folder, binary_folder):
    file = text_folder / "raw" / "edge.csv.gz"
    write_csv(file, EDGES[:3])
    with pytest.raises(GraphError, match=r"edge.csv.gz holds \[3, 2\] values but .* 4 edges"):
        read(text_folder)
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(GraphError, match=r"edge.csv.gz .*cannot be read"):
        read(text_folder)
    file.write_bytes(gzip.compress(b"0,1\n1,two\n"))
    with pytest.raises(GraphError, match=r"edge.csv.gz is not a table of numbers: .*'two'"):
        read(text_folder)
    np.savez(binary_folder / "raw" / "data.npz", node_feat=FEATURES)
    with pytest.raises(GraphError, match=r"data.npz has no 'edge_index'"):
        read(binary_folder)


def test_graphs_of_several_node_types_are_refused(text_folder):
    (text_folder / "raw" / "triplet-type-list.csv.gz").touch()
    with pytest.raises(GraphError, match="several node types"):
        read(text_folder)
