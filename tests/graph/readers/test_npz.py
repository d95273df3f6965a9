"""Graphs in numpy archives."""

from __future__ import annotations

import os

import numpy as np
import pytest
import scipy.sparse as sp

from tests.graphs_for_tests import assert_same, small_graph
from weft.core.errors import GraphError
from weft.graph import SparseFeatures
from weft.graph.readers import read


def fields_of_small_graph() -> dict[str, np.ndarray]:
    graph = small_graph()
    src, dst = graph.edge_index().numpy()
    x = sp.csr_array(graph.x.numpy())
    return {
        "num_nodes": np.int64(6),
        "src": src.astype(np.int32),
        "dst": dst.astype(np.int32),
        "x_indptr": x.indptr,
        "x_indices": x.indices,
        "x_data": x.data,
        "x_shape": np.array(x.shape),
        "y": graph.y.numpy().astype(np.int16),
        **{name: getattr(graph, name).numpy() for name in ("train", "val", "test", "edge_weight", "relation")},
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_key_is_read(tmp_path, save):
    save(tmp_path / "small.npz", **fields_of_small_graph())
    graph = read(tmp_path / "small.npz")
    assert isinstance(graph.x, SparseFeatures)
    assert_same(graph, small_graph(sparse=True))


def test_dense_features_and_an_edge_index_do_too(tmp_path):
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]]), x=np.eye(3, dtype=np.float16))
    graph = read(tmp_path / "g.npz", directed=False, name="mine")
    assert graph.name == "mine"
    assert graph.num_edges == 4
    assert graph.x.dtype.itemsize == 2


@pytest.mark.parametrize("missing", ["src", "x_shape"])
def test_missing_keys_are_named(tmp_path, missing):
    fields = fields_of_small_graph()
    del fields[missing]
    np.savez(tmp_path / "g.npz", **fields)
    with pytest.raises(GraphError, match=missing):
        read(tmp_path / "g.npz")


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
def test_truncated_archives_are_one_clear_error(tmp_path, share):
    file = tmp_path / "g.npz"
    np.savez_compressed(file, **fields_of_small_graph())
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(GraphError, match=r"g.npz \(\d+ bytes\) is not a readable npz archive.*truncated"):
        read(file)


def test_damaged_members_pickles_and_other_files_are_refused(tmp_path):
    file = tmp_path / "g.npz"
    np.savez_compressed(file, **fields_of_small_graph())
    content = bytearray(file.read_bytes())
    content[60:90] = b"\xff" * 30
    file.write_bytes(content)
    with pytest.raises(GraphError, match="is not a readable npz archive"):
        read(file)
    np.savez(file, src=np.array([{}], dtype=object), dst=np.array([0]))
    with pytest.raises(GraphError, match=r"g.npz: src holds Python objects, which are never loaded"):
        read(file)
    with file.open("wb") as plain:
        np.save(plain, np.arange(3))
    with pytest.raises(GraphError, match="is not a readable npz archive"):
        read(file)


def test_what_is_wrong_with_the_arrays_names_the_file(tmp_path):
    np.savez(tmp_path / "g.npz", src=[0, -3], dst=[1, 1])
    with pytest.raises(GraphError, match=r"g.npz: src\[1\] = -3 is out of range: .*; renumber the nodes$"):
        read(tmp_path / "g.npz")
