"""Saving and mapping back: the same graph, whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs_for_tests import assert_same, small_graph
from weft.core.errors import GraphError
from weft.graph import Graph
from weft.graph import saved as arrayfile
from weft.graph import saved as store
from weft.graph.readers import read


@pytest.fixture
def saved(tmp_path) -> Path:
    small_graph().save(tmp_path / "g")
    return tmp_path / "g"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_round_trip(tmp_path, sparse, dtype):
    graph = small_graph(sparse=sparse, dtype=dtype)
    graph.save(tmp_path / "g")
    assert_same(read(tmp_path / "g", verify=True), graph)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    st.booleans(),
    st.sampled_from([None, "classes", "labels"]),
)
def test_round_trip_of_any_graph(tmp_path_factory, features, edges, directed, labels):
    src, dst = [list(ends) for ends in zip(*edges, strict=True)] or ([], []) if edges else ([], [])
    y = {None: None, "classes": [0, 1, 2, 0, 1, -1], "labels": np.eye(6)}[labels]
    graph = Graph.from_edges(src, dst, num_nodes=6, x=torch.rand(6, features), y=y, directed=directed, val=[1])
    folder = tmp_path_factory.mktemp("store") / "g"
    graph.save(folder)
    assert_same(read(folder, verify=True), graph)


def test_arrays_are_mapped_and_writing_to_them_stays_private(saved):
    graph = read(saved)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(saved) in line]
    assert any("x.npy" in line for line in mapped)
    graph.x[0, 0] = 77
    assert read(saved).x[0, 0] == 1


def test_numpy_reads_the_files_as_they_are(saved):
    assert np.load(saved / "indices.npy").tolist() == read(saved).adj.indices.tolist()
    assert np.load(saved / "x.npy", mmap_mode="r").dtype == np.dtype("<f4")


def test_a_graph_far_larger_than_memory_opens_at_once(tmp_path):
    """Sparse files stand in for the data: 2^37 feature bytes, of which none is read."""
    small_graph().save(tmp_path / "g")
    nodes, meta = 2**28, json.loads((tmp_path / "g" / "meta.json").read_text())
    for name, dtype, shape in (
        ("indptr", "int32", [nodes + 1]),
        ("x", "float32", [nodes, 128]),
        ("y", "int64", [nodes]),
    ):
        spec = arrayfile.ArraySpec(dtype, tuple(shape))
        meta["arrays"][name] = asdict(spec)
        with (tmp_path / "g" / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_2_0(
                file, {"descr": spec.numpy.str, "fortran_order": False, "shape": spec.shape}
            )
            try:
                file.truncate(file.tell() + spec.nbytes)
            except OSError:
                pytest.skip("this file system keeps no sparse files of that size")
    (tmp_path / "g" / "meta.json").write_text(json.dumps(meta))
    graph = read(tmp_path / "g")
    assert graph.x.shape == (nodes, 128)
    assert graph.x[nodes - 1].sum() == 0


def test_existing_graphs_are_replaced_only_when_asked(saved):
    other = Graph.from_edges([0], [1], name="other")
    with pytest.raises(GraphError, match="already holds a graph; pass overwrite=True"):
        other.save(saved)
    assert read(saved).name == "small"
    still_open = read(saved)
    other.save(saved, overwrite=True)
    assert_same(read(saved), other)
    assert_same(still_open, small_graph())
    assert [entry.name for entry in saved.parent.iterdir()] == ["g"]


def test_a_graph_can_be_saved_over_the_folder_it_is_mapped_from(saved):
    read(saved).save(saved, overwrite=True)
    assert_same(read(saved), small_graph())


def test_folders_that_are_no_graphs_are_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(GraphError, match="is not a saved graph; it is left alone"):
        small_graph().save(tmp_path / "home", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(GraphError, match="is not a saved graph"):
        small_graph().save(tmp_path / "file", overwrite=True)
    (tmp_path / "empty").mkdir()
    small_graph().save(tmp_path / "empty")
    assert_same(read(tmp_path / "empty"), small_graph())
    small_graph().save(tmp_path / "new" / "deep" / "g")


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_written_half(tmp_path, monkeypatch, overwrite):
    target = tmp_path / "g"
    if overwrite:
        small_graph(name="old").save(target)
    written = []

    def fail_at_the_third(path, tensor):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return arrayfile.write_array(path, tensor)

    monkeypatch.setattr(store, "write_array", fail_at_the_third)
    with pytest.raises(GraphError, match="No space left on device; nothing was kept"):
        small_graph().save(target, overwrite=overwrite)
    assert [entry.name for entry in tmp_path.iterdir()] == (["g"] if overwrite else [])
    if overwrite:
        assert read(target, verify=True).name == "old"


def test_the_old_graph_comes_back_when_the_last_rename_fails(saved, monkeypatch):
    rename = os.replace

    def refuse_drafts(source, target):
        if "draft" in str(source):
            raise OSError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse_drafts)
    with pytest.raises(GraphError, match="Permission denied"):
        Graph.from_edges([0], [1]).save(saved, overwrite=True)
    monkeypatch.undo()
    assert_same(read(saved), small_graph())
    assert [entry.name for entry in saved.parent.iterdir()] == ["g"]


def test_truncated_and_lengthened_arrays_are_named_with_their_bytes(saved):
    file = saved / "x.npy"
    size = file.stat().st_size
    with file.open("ab") as tail:
        tail.write(b"more")
    with pytest.raises(GraphError, match=f"x.npy holds {size + 4} bytes but {size} were expected"):
        read(saved)
    os.truncate(file, size - 10)
    with pytest.raises(GraphError, match=f"x.npy holds {size - 10} bytes but {size} were expected.*truncated"):
        read(saved)
    os.truncate(file, 5)
    with pytest.raises(GraphError, match=r"x.npy \(5 bytes, 72 bytes of values expected\) has no readable header"):
        read(saved)
    file.unlink()
    with pytest.raises(GraphError, match=r"x.npy is missing; the saved graph is incomplete"):
        read(saved)


def test_an_array_of_another_type_or_shape_is_refused(saved):
    with (saved / "y.npy").open("wb") as file:
        np.lib.format.write_array(file, np.zeros(3, dtype="<i8"), version=(2, 0))
    with pytest.raises(GraphError, match=r"y.npy holds int64 \[3\] but int64 \[6\] was saved"):
        read(saved)


def _edit_meta(folder: Path, **changes) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))


def test_descriptions_that_cannot_be_read_are_refused(saved):
    _edit_meta(saved, version=99)
    with pytest.raises(GraphError, match="format version 99 and this Weft reads version 1"):
        read(saved)
    _edit_meta(saved, version=1, arrays={})
    with pytest.raises(GraphError, match="lacks or garbles an entry: 'indptr'"):
        read(saved)
    _edit_meta(saved, format="other")
    with pytest.raises(GraphError, match="not the description of a saved graph"):
        read(saved)
    (saved / "meta.json").write_text("{")
    with pytest.raises(GraphError, match="not readable JSON"):
        read(saved)


def test_verify_reads_every_value(saved):
    values = np.load(saved / "indices.npy")
    values[1] = 60
    with (saved / "indices.npy").open("wb") as file:
        np.lib.format.write_array(file, values, version=(2, 0))
    assert read(saved).num_nodes == 6
    with pytest.raises(GraphError, match=r"indices\[1\] = 60"):
        read(saved, verify=True)


def test_the_summary_needs_no_pass_over_a_mapped_graph(saved):
    graph = read(saved)
    assert graph._stats == small_graph().stats()


def test_large_arrays_are_written_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(arrayfile, "BLOCK_BYTES", 16)
    values = torch.arange(35, dtype=torch.int64).reshape(5, 7)
    spec = arrayfile.write_array(tmp_path / "a.npy", values.T)
    assert torch.equal(arrayfile.map_array(tmp_path / "a.npy", spec), values.T)
