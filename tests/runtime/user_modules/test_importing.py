"""Models from files: files of one name are apart, and what is installed is never replaced."""

from __future__ import annotations

import os
import pickle
import sys

import numpy as np
import pytest

import weft
from weft.core.errors import SpecError
from weft.runtime.modules.settings import import_from

NET = """
from torch import nn
WIDTH = {width}
class Net(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.first, self.last = nn.Linear(i, WIDTH), nn.Linear(WIDTH, o)
    def forward(self, x):
        return self.last(self.first(x))
"""


def write(folder, width, name="net.py"):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(NET.format(width=width))
    return path


def load(path, name="Net"):
    return import_from("t", "model", f"{path}:{name}")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    paths = [write(tmp_path / user, width) for user, width in (("ada", 3), ("bob", 5))]
    kinds = [load(path) for path in paths]
    built = [kind(4, 2) for kind in kinds]
    assert [pickle.loads(pickle.dumps(one)).first.out_features for one in built] == [3, 5]
    assert load(paths[0]) is kinds[0]


def test_both_train_in_one_run(tmp_path):
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 20, (2, 60))
    x, y = draw.normal(size=(20, 4)).astype("float32"), draw.integers(0, 2, 20)
    graph = weft.Graph.from_edges(src, dst, num_nodes=20, x=x, y=y).random_split(0.5, 0.25)
    paths = [write(tmp_path / user, width) for user, width in (("ada", 3), ("bob", 5))]
    tasks = [weft.Task(graph=graph, model=f"{path}:Net", epochs=2, name=path.parent.name) for path in paths]
    results = weft.run(tasks, device="cpu", progress=False)
    assert [result.model.first.out_features for result in results] == [3, 5]


def test_a_file_called_like_a_library_does_not_replace_it(tmp_path):
    path = write(tmp_path / "ada", 3, "numpy.py")
    load(path)
    assert sys.modules["numpy"] is np


def test_a_file_that_has_changed_is_read_again(tmp_path):
    path = write(tmp_path / "ada", 3)
    first = load(path)
    write(tmp_path / "ada", 7)
    os.utime(path, ns=(1, 1))
    assert load(path) is not first
    assert load(path)(4, 2).first.out_features == 7


def test_a_file_that_fails_leaves_nothing_behind(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("import torch\nraise ValueError('broken')\n")
    before = set(sys.modules)
    with pytest.raises(SpecError, match=r"ValueError: broken \(line 2 of .*net.py\)"):
        load(path)
    assert not {name for name in set(sys.modules) - before if "net" in name}
