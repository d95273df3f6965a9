"""A saved graph with an id that leads nowhere is refused in a sentence before a kernel reads past an array."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from tests.graphs_for_tests import NODES, tiny_graph
from weft.core.errors import GraphError


def saved(folder, array, position, value, **kind):
    """A saved graph with one value of one array overwritten on the disk."""
    graph = tiny_graph(**kind)
    graph.save(folder / "g")
    file = folder / "g" / f"{array}.npy"
    values = np.load(file)
    start = file.stat().st_size - values.nbytes
    values[position] = value
    with file.open("r+b") as handle:
        handle.seek(start)
        handle.write(values.tobytes())
    return str(folder / "g")


@pytest.mark.parametrize("value", [NODES, -1, 2**31 - 1])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_an_edge_to_a_node_that_is_not_there(tmp_path, value, model):
    task = weft.Task(graph=saved(tmp_path, "indices", 7, value), model=model, epochs=3)
    with pytest.raises(
        GraphError, match=rf"cannot be trained on: indices\[7\] = {value} is out of range.*0..{NODES - 1}"
    ):
        weft.run(task, device="cpu", progress=False)


@pytest.mark.parametrize(
    ("array", "position", "value", "kind", "words"),
    [
        ("indptr", 5, 10**6, {}, "offsets must not decrease"),
        ("x_indices", 3, 99, {"sparse": True}, r"x_indices\[3\] = 99 is out of range: feature ids"),
        ("train", 0, NODES, {}, rf"train\[0\] = {NODES} is out of range"),
        ("y", 4, 17, {}, r"y has a class outside 0..2"),
    ],
)
def test_other_arrays(tmp_path, array, position, value, kind, words):
    task = weft.Task(graph=saved(tmp_path, array, position, value, **kind), epochs=3)
    with pytest.raises(GraphError, match=words):
        weft.run([task, task.with_values(seed=1)], device="cpu", progress=False)


def test_a_sound_folder_trains(tmp_path):
    tiny_graph().save(tmp_path / "g")
    assert weft.run(weft.Task(graph=str(tmp_path / "g"), epochs=2), device="cpu").status == "finished"
