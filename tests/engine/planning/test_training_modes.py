"""Plans of sampled training: chosen where the whole graph does not fit, and trained as planned."""

from __future__ import annotations

import pytest

import weft
from weft.core.errors import SpecError
from weft.engine import choosing as training_modes

QUIET = {"progress": False, "device": "cpu"}
PRODUCTS = {"graph": "shape:ogbn-products", "model": "sage", "layers": 3, "hidden": 256}


def test_a_sampled_plan_counts_its_steps_and_its_largest_batch():
    whole = weft.plan(weft.Task(**PRODUCTS), machine="h200").groups[0]
    sampled = weft.plan(weft.Task(**PRODUCTS, mode="sampled"), machine="h200").groups[0]
    assert sampled.plan.mode == "sampled"
    assert [stage.name for stage in sampled.plan.stages] == ["sample", "fetch", "transfer", "train"]
    assert sampled.cost.total_bytes < whole.cost.total_bytes
    assert any("193 steps per epoch of up to 1,024 seeds" in reason for reason in sampled.plan.why)
    twice = weft.plan(weft.Task(**PRODUCTS, mode="sampled", batch=2048), machine="h200").groups[0]
    assert any("97 steps" in reason for reason in twice.plan.why)
    assert twice.cost.total_bytes > sampled.cost.total_bytes


def test_what_does_not_fit_as_a_whole_is_sampled():
    task = weft.Task(**PRODUCTS)
    assert weft.plan(task, machine="h200").groups[0].plan.mode == "full"
    tight = weft.plan(task, machine="h200", budget="16GiB")
    assert tight.fits
    assert tight.groups[0].plan.mode == "sampled"
    assert not weft.plan(weft.Task(**PRODUCTS, mode="full"), machine="h200", budget="16GiB").fits


def test_a_sampled_plan_is_trained_as_planned(tmp_path):
    sweep = weft.Sweep(graph="demo", model="sage", hidden=8, epochs=3, batch=64, fanout=[4, 3], lr=[0.01, 0.02])
    report = weft.plan(sweep, machine="cpu")
    result = weft.run(report, out=tmp_path / "out", **QUIET)
    plain = weft.run(sweep, **QUIET)
    assert [one.plan.mode for one in result] == ["sampled"] * 2
    assert [one.history["loss"] for one in result] == [one.history["loss"] for one in plain]


def test_a_run_that_does_not_fit_as_a_whole_is_sampled_and_resumed(tmp_path):
    graph = weft.load("demo")
    task = weft.Task(graph=graph, model="gcn", hidden=256, layers=3, epochs=4)
    whole = weft.plan(task, machine="cpu").groups[0].cost.total_bytes
    small = weft.plan(task.with_values(mode="sampled", batch=16, fanout=[2, 2, 2]), machine="cpu").groups[0]
    assert small.cost.total_bytes < whole * 1.5  # batches gather dense rows, and this graph's features are sparse
    asked = task.with_values(batch=16, fanout=[2, 2, 2])
    first = weft.run(asked, out=tmp_path / "out", **QUIET)
    again = weft.run(asked, out=tmp_path / "out", resume=True, **QUIET)
    assert first.history["loss"] == again.history["loss"]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_resumed_run_keeps_its_mode_however_much_memory_is_free_by_then(tmp_path, monkeypatch, sampled):
    task = weft.Task(graph="demo", model="sage", epochs=4)
    monkeypatch.setattr(training_modes, "needs_sampling", lambda *_: sampled)
    first = weft.run(task, out=tmp_path, **QUIET)
    assert first.plan.mode == ("sampled" if sampled else "full")
    monkeypatch.setattr(training_modes, "needs_sampling", lambda *_: not sampled)
    longer = weft.run(task.with_values(epochs=6), out=tmp_path, extend=True, **QUIET)
    assert longer.plan.mode == first.plan.mode
    assert longer.history["loss"][:4] == first.history["loss"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "full", "batch": 64}, "batch=64 would have no effect: mode='full' trains on the whole graph"),
        ({"fanout": [3]}, r"fanout=\[3\] has 1 hops for layers=2"),
        ({"fanout": [0, 3]}, "must list neighbours per hop"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"mode": "some"}, "mode='some' must be one of auto, full, sampled"),
    ],
)
def test_mistakes_are_one_sentence(settings, words):
    with pytest.raises(SpecError, match=words):
        weft.run(weft.Task(graph="demo", model="sage", epochs=1, **settings), **QUIET)
