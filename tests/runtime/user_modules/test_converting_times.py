"""Where steps are not captured, layers of PyG are converted if that is faster; a resumed run does as the first one."""

from __future__ import annotations

import pytest

import weft
from tests.runtime.user_modules import test_converting as cases
from weft.runtime.step.members import conversion
from weft.runtime.user_modules import converting

pytest.importorskip("torch_geometric")
SAMPLED = {"mode": "sampled", "batch": 8, "fanout": (3, 3)}
KEPT = "not converted: PyG's layers take 10 ms per step and evaluation here, Weft's 20 ms"


def takes(monkeypatch, pyg: float, weft: float) -> list[str]:
    """Let the clock say that steps take so long; which steps were timed."""
    order: list[str] = []
    monkeypatch.setattr(converting, "_one", cases.clock(pyg, weft, order))
    return order


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["full", "sampled"])
def test_layers_that_are_slower_are_left_to_pyg(monkeypatch, settings):
    takes(monkeypatch, 0.01, 0.02)
    mine, notes = cases.run(cases.Weighted, **settings)
    plain, _ = cases.run(cases.Weighted, **settings, convert=False)
    assert [note for note in notes if note.startswith(KEPT)], notes
    assert mine[0].history["loss"] == plain[0].history["loss"]
    takes(monkeypatch, 0.02, 0.01)
    assert [note for note in cases.run(cases.Weighted, **settings)[1] if note.startswith("converted: 1 GCNConv")]


def test_both_are_warm_and_timed_in_turn(monkeypatch):
    order = takes(monkeypatch, 0.011, 0.01)
    cases.run(cases.Weighted, **SAMPLED)
    assert order == ["pyg"] * 2 + ["weft"] * 2 + ["pyg", "weft"] * 4


def test_a_clear_difference_of_warm_steps_is_enough(monkeypatch):
    order = takes(monkeypatch, 0.02, 0.01)
    cases.run(cases.Weighted, **SAMPLED)
    assert order == ["pyg"] * 2 + ["weft"] * 2


def test_long_steps_are_timed_once_more_only(monkeypatch):
    order = takes(monkeypatch, 1.1, 1.0)
    cases.run(cases.Weighted, **SAMPLED)
    assert order == ["pyg"] * 2 + ["weft"] * 2 + ["pyg", "weft"] * 2


def test_who_asks_gets_them_whatever_they_take(monkeypatch):
    takes(monkeypatch, 0.01, 0.02)
    assert [note for note in cases.run(cases.Weighted, convert=True)[1] if note.startswith("converted")]


def test_a_stack_is_converted_whatever_one_alone_takes(monkeypatch):
    takes(monkeypatch, 0.01, 0.02)
    assert [note for note in cases.run(cases.Weighted, seeds=(0, 1))[1] if note.startswith("converted")]


def test_captured_steps_are_converted_whatever_a_trial_takes(monkeypatch):
    """On a GPU over the whole graph; the trial is not captured."""
    asked: list[bool] = []
    given = conversion._Steps._trials_on

    def trials_on(self, source):
        for device in ("cuda", "cpu"):
            self._device = type("Device", (), {"type": device})()
            asked.append(given(self, source).by_time)
        self._device = self._members.builder.inputs.device
        return given(self, source)

    monkeypatch.setattr(conversion._Steps, "_trials_on", trials_on)
    cases.run(cases.Weighted)
    assert asked == [False, True]
    asked.clear()
    cases.run(cases.Weighted, **SAMPLED)
    assert asked == [True, True]


def test_features_that_stay_sparse_count_in_the_time(monkeypatch):
    takes(monkeypatch, 0.02, 0.01)
    graph = cases.small(sparse=True)
    assert any("features stay sparse" in note for note in cases.run(cases.OtherEdges, graph)[1])


@pytest.mark.parametrize("first", [0.01, 0.03], ids=["converted", "kept"])
@pytest.mark.parametrize(
    "settings", [{}, SAMPLED, {"graph": cases.small(sparse=True)}], ids=["full", "sampled", "sparse"]
)
def test_a_resumed_run_has_the_layers_that_it_began_with(monkeypatch, tmp_path, first, settings):
    """Bit for bit, even if the other ones have become faster meanwhile."""
    settings = {"graph": cases.GRAPH, **settings}
    task = weft.Task(model=cases.Weighted, epochs=6, name="one", **settings)
    takes(monkeypatch, 0.02, first)
    whole = weft.run(task, device="cpu", progress=False)

    control = weft.Control()
    control.pause()
    listen = lambda event: control.preempt() if event.kind == "paused" else None  # noqa: E731
    weft.run(task, device="cpu", progress=False, out=tmp_path, on_event=listen, control=control)
    takes(monkeypatch, 0.02, 0.04 - first)
    resumed = weft.run(task, device="cpu", progress=False, out=tmp_path, resume=True)
    assert resumed.status == "finished"
    assert resumed.history["loss"] == whole.history["loss"]
    other = weft.run(task.with_values(convert=first > 0.02), device="cpu", progress=False)
    assert resumed.history["loss"] != other.history["loss"], "there is a difference"
