"""Graphs and models that are written anew while a server runs: the next task has what is there now."""

from __future__ import annotations

import json
import os
import shutil
import sys
from types import ModuleType

import pytest

import weft
from tests.serve.serving import ROOT, Queue, environment
from weft.serve.queue_db import Submission
from weft.serve.state import stamps_of, unchanged

MODEL = """
import torch
import weft
from {package}.width import WIDTH

class Net(torch.nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.first = weft.nn.GCNConv(in_features, WIDTH)
        self.second = weft.nn.GCNConv(WIDTH, out_features)

    def forward(self, x, adj):
        return self.second(self.first(x, adj), adj)
"""


def train(queue, path, **more):
    spec = {"task": {"graph": "ours", "model": "gcn", "hidden": 8, "epochs": 3, **more}, "graph_path": str(path)}
    task = queue.db.submit(Submission(spec))
    queue.supervisor.wake()
    return queue.wait([task.id])[0]


def test_a_graph_that_is_written_anew_is_trained_on(tmp_path):
    place, queue = tmp_path / "ours", Queue(tmp_path)
    try:
        weft.load("shape:cora").save(place)
        first = train(queue, place)
        assert first.state == "done", first.error
        again = train(queue, place)
        assert again.state == "done", again.error
        shutil.rmtree(place)
        weft.load("shape:citeseer").save(place)
        for seed in (1, 2):
            after = train(queue, place, seed=seed)
            assert after.state == "done", after.error
        assert nodes_of(queue, first) == 2708
        assert nodes_of(queue, after) == 3327
    finally:
        queue.close()


def nodes_of(queue, task):
    plan = json.loads((queue.options.runs / task.result["folder"] / "result.json").read_text())
    return next(value for value in _numbers(plan, "num_nodes"))


def _numbers(data, name):
    if isinstance(data, dict):
        for key, value in data.items():
            if key == name:
                yield value
            else:
                yield from _numbers(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from _numbers(value, name)


def test_a_task_that_was_planned_for_another_graph_is_planned_again(tmp_path):
    place, queue = tmp_path / "ours", Queue(tmp_path)
    try:
        weft.load("shape:cora").save(place)
        queue.wait([train(queue, place).id])
        [slow] = queue.submit({"hidden": 64, "epochs": 600, "seed": 8})
        queue.until(lambda: queue.epoch(slow) > 0)
        spec = {"task": {"graph": "ours", "model": "gcn", "hidden": 8, "epochs": 3, "seed": 5}}
        name = queue.db.submit(Submission({**spec, "graph_path": str(place)})).id
        queue.supervisor.wake()
        queue.until(lambda: queue.db.get(name).state == "planned")
        shutil.rmtree(place)
        weft.load("shape:citeseer").save(place)
        [done] = queue.wait([name])
        assert done.state == "done", done.error
        kinds = [event.kind for event in queue.db.events(task=name)]
        assert kinds.count("planned") == 2
    finally:
        queue.close()


def test_an_edited_model_is_what_later_tasks_train(tmp_path, monkeypatch):
    folder = tmp_path / "code" / "mine_for_weft"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text(MODEL.format(package="mine_for_weft"))
    (folder / "width.py").write_text("WIDTH = 4\n")
    found = environment(tmp_path)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(tmp_path / "code")])
    queue = Queue(tmp_path, environment=found, models=("mine_for_weft.models:*",))
    try:
        assert parameters(queue, seed=1) == 4
        (folder / "width.py").write_text("WIDTH = 16  # edited: a file that the model imports\n")
        assert parameters(queue, seed=2) == 16
        (folder / "models.py").write_text(
            MODEL.format(package="mine_for_weft")
            .replace("WIDTH)", "WIDTH + 1)", 1)
            .replace("Conv(WIDTH,", "Conv(WIDTH + 1,")
        )
        assert parameters(queue, seed=3) == 17
    finally:
        queue.close()


def parameters(queue, **more):
    """The width of the model that a task trained."""
    from safetensors import safe_open

    settings = {"graph": "demo", "model": "mine_for_weft.models:Net", "epochs": 2, **more}
    task = queue.db.submit(Submission({"task": settings}))
    queue.supervisor.wake()
    [done] = queue.wait([task.id])
    assert done.state == "done", done.error
    with safe_open(queue.options.runs / done.result["folder"] / "model.safetensors", "pt") as file:
        return min(min(file.get_slice(name).get_shape()) for name in file.keys() if "first" in name)  # noqa: SIM118


def test_stamps_notice_what_changes(tmp_path):
    folder = tmp_path / "graph"
    folder.mkdir()
    (folder / "x").write_text("one")
    before = stamps_of([str(folder), str(tmp_path / "missing")])
    assert unchanged(before)
    assert unchanged(None)
    (folder / "x").write_text("three")
    assert not unchanged(before)
    now = stamps_of([str(folder)])
    (folder / "y").write_text("")
    os.utime(folder, ns=(1, 1))
    assert not unchanged(now)


@pytest.mark.parametrize("name", ["torch.optim", "json", "weft.nn"])
def test_installed_packages_are_left_alone(name, tmp_path, monkeypatch):
    from weft.core.changed_modules import own_modules

    __import__(name)
    made = f"{name.partition('.')[0]}.made_by_a_compiler"
    monkeypatch.setitem(sys.modules, made, ModuleType(made))
    sys.modules[made].__file__ = str(tmp_path / "made.py")
    assert own_modules(name) == {}
