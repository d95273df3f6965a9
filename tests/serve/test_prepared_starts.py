"""What a worker makes ready while another group trains: the same numbers, nothing left to draw or read at a start."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.serve.serving import TASK, Queue, history_of
from tests.serve.test_supervisor import same
from weft.nn.initial import DRAWN_AHEAD
from weft.ops import random_bits as torch_bits
from weft.runtime import checkpoint
from weft.runtime.checkpoint import PREFETCHED, read_checkpoint, write_checkpoint
from weft.runtime.modules.build import build_model
from weft.serve.worker_memory import KeptGraphs, PreparedStarts


@pytest.fixture
def prepared():
    yield PreparedStarts(KeptGraphs("cpu", 0))
    for ahead in (DRAWN_AHEAD, PREFETCHED):
        ahead.clear()


@pytest.fixture
def draws(monkeypatch):
    """Shapes of initial weights that are drawn from now on."""
    drawn, uniform = [], torch_bits.uniform

    def counted(seed, stream, shape, device):
        drawn.append(tuple(shape))
        return uniform(seed, stream, shape, device)

    monkeypatch.setattr(torch_bits, "uniform", counted)
    return drawn


def sizes(task):
    graph = weft.load(task.graph)
    return task, graph.num_features, graph.num_classes


@pytest.mark.parametrize(
    "given",
    [{"model": "gcn"}, {"model": "sage", "norm": "batch"}, {"model": "gat", "heads": 2}, {"model": "gin", "layers": 3}],
    ids=lambda given: given["model"],
)
def test_weights_drawn_ahead_are_those_of_the_model(given, prepared, draws, tmp_path):
    task = weft.Task(graph="demo", hidden=8, seed=7, name="t", **given)
    plain = build_model(*sizes(task)).state_dict()
    assert prepared.ready([task], tmp_path) == {"graph": False, "weights": 0, "checkpoint": None}
    before = torch.get_rng_state()
    prepared.prepare([task.to_dict()], [])
    assert torch.equal(torch.get_rng_state(), before)  # a model that trains meanwhile may draw from it
    assert prepared.ready([task], tmp_path)["weights"] == 1
    draws.clear()
    ready = build_model(*sizes(task)).state_dict()
    prepared.drop_used()
    assert draws == []
    assert all(torch.equal(plain[name], ready[name]) for name in plain)
    assert prepared.ready([task], tmp_path)["weights"] == 0  # used, and let go
    build_model(*sizes(task.with_values(seed=8)))
    assert draws


def test_a_task_that_cannot_be_prepared_is_left_to_its_run(prepared, tmp_path):
    prepared.prepare([{"graph": "no such graph", "model": "gcn"}, {"model": 3}], [str(tmp_path / "none")])
    prepared.prepare([], [str(damaged(tmp_path / "run"))])
    assert PREFETCHED.bytes == 0


def damaged(folder):
    write_checkpoint(folder, {"a": torch.ones(4)}, {"epoch": 1})
    (folder / checkpoint.FILE).write_bytes(b"half")
    return folder


def test_a_checkpoint_read_ahead_is_not_read_again(prepared, monkeypatch, tmp_path):
    write_checkpoint(tmp_path, {"a": torch.arange(4.0)}, {"epoch": 3, "tasks": [1]})
    prepared.prepare([], [str(tmp_path)])
    task = weft.Task(graph="demo", name="t")
    assert prepared.ready([task], tmp_path)["checkpoint"] is True
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "safe_open", None)  # whoever reads now fails
        one, two = read_checkpoint(tmp_path), read_checkpoint(tmp_path)
        one.about["tasks"].append(2)  # a reader's own
        assert two.about["tasks"] == [1]
        assert torch.equal(two.tensors["a"], torch.arange(4.0))
    write_checkpoint(tmp_path, {"a": torch.zeros(4)}, {"epoch": 4})
    assert prepared.ready([task], tmp_path)["checkpoint"] is False
    assert read_checkpoint(tmp_path).about["epoch"] == 4  # as it is now
    prepared.drop_used()
    assert PREFETCHED.bytes == 0


def test_what_is_ready_is_bounded(prepared, monkeypatch):
    monkeypatch.setattr(DRAWN_AHEAD, "_most", 40_000)
    for seed in range(20):
        prepared.prepare([weft.Task(graph="demo", hidden=8, seed=seed, name=f"t{seed}").to_dict()], [])
    assert 0 < DRAWN_AHEAD.bytes <= 40_000


def test_a_queue_has_weights_and_checkpoints_ready(tmp_path):
    queue = Queue(tmp_path)
    try:
        (first,) = queue.submit({"seed": 1, "epochs": 4000, "hidden": 9})
        queue.until(lambda: queue.epoch(first) > 0)
        (second,) = queue.submit({"seed": 2, "model": "sage", "epochs": 100_000})
        queue.until(lambda: queue.db.get(second).state == "planned")
        queue.until(lambda: bool(queue.supervisor.pool.workers["cpu/0"].fetched))
        queue.db.pause(first)
        queue.supervisor.wake()
        queue.until(lambda: queue.epoch(second) > 0)
        queue.db.resume(first)
        queue.supervisor.wake()
        queue.until(lambda: bool(queue.supervisor.pool.workers["cpu/0"].fetched.get("folders")))
        queue.db.cancel(second)
        queue.supervisor.wake()
        done = queue.wait([first, second])
        assert [task.state for task in done] == ["done", "cancelled"], queue.told()
        said = {name: [e.data for e in queue.db.events(task=name, limit=10_000) if e.kind == "ready"]
                for name in (first, second)}  # fmt: skip
        assert [one["checkpoint"] for one in said[first]] == [None, True]
        assert [(one["weights"], one["checkpoint"]) for one in said[second]] == [(1, None)]
        counters = queue.supervisor.state.counters
        assert (counters["weights_ready"], counters["checkpoints_ready"]) == (1, 1)
        expected = history_of(weft.Task(**{**TASK, **done[0].spec["task"], "name": first}))
        assert same(queue.history(first), expected[first])
    finally:
        queue.close()
