"""Runs whose batches two sides prepare: profiled, divided, also with a host that slows down, with unchanged numbers."""

from __future__ import annotations

import pytest

import weft
from examples.thread_accelerator import ThreadAccelerator
from weft.core.errors import SpecError
from weft.engine import dividing

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    profile = dividing.profile_group
    monkeypatch.setattr(
        dividing, "profile_group", lambda group, workers, limit: profile(group, workers, steps=4, limit=3.0)
    )
    monkeypatch.setattr(dividing, "host_workers", lambda machine: 2)


class Slowed:
    """Delays of a fake accelerator whose host becomes slow after some batches."""

    def __init__(self, after: int, factor: float) -> None:
        self.after, self.factor, self.batches = after, factor, 0

    def __call__(self, key: str) -> float:
        if key == "batching_cpu":
            self.batches += 1
            return 0.012 * (self.factor if self.batches > self.after else 1.0)
        return {"transfer_pcie": 0.001, "batching_npu": 0.004, "transfer_npu": 0.004}.get(key, 0.0)


def sweep(**changes):
    about = {"model": "sage", "mode": "sampled", "fanout": [5, 3], "batch": 16, "hidden": 8, "epochs": 8}
    return weft.Sweep("demo", **{**about, **changes})


def run(npu, **options):
    notes = []
    result = weft.run(
        sweep(),
        device="cpu",
        progress=False,
        options=weft.RunOptions(hardware=npu),
        on_event=lambda event: notes.append(event.data.get("message", "")) if event.kind == "note" else None,
        **options,
    )
    npu.stop()
    return result, notes


def test_a_divided_run_has_the_numbers_of_any_other():
    plain = weft.run(sweep(), device="cpu", progress=False)
    mine, notes = run(ThreadAccelerator("npu", Slowed(10**9, 1.0)))
    assert mine[0].history == plain[0].history
    assert any("predicted per epoch" in note for note in notes)
    assert mine[0].plan.division.trainer == "npu"
    assert set(mine[0].plan.phases["phases"]) >= {"batching_cpu", "training_npu"}


def test_a_host_that_becomes_slow_changes_no_number():
    slowed = Slowed(10**9, 6.0)
    npu = ThreadAccelerator("npu", slowed)
    task, since = sweep(epochs=10).tasks()[0], []

    def slow_down(event) -> None:
        if event.kind == "progress" and event.data["epoch"] >= 2 and not since:
            slowed.after = 0
            since.append(event.data["epoch"])

    about = {"device": "cpu", "progress": False}
    mine = weft.run(task, options=weft.RunOptions(hardware=npu), on_event=slow_down, **about)
    npu.stop()
    assert since
    assert mine.history == weft.run(task, **about).history


# Preparing takes so long that both sides share it, also if a step takes tens of milliseconds on a busy machine.
SLOW = {"batching_cpu": 0.2, "batching_npu": 0.05, "transfer_npu": 0.05}


@pytest.mark.parametrize(("division", "words"), [("fixed", "of every"), (0.5, "of every 8 batches the npu prepares 4")])
def test_the_strategy_can_be_set_and_changes_no_number(division, words):
    mine, notes = run(ThreadAccelerator("npu", SLOW), placement=weft.Placement(division=division))
    assert words in notes[0]
    assert mine[0].plan.division.strategy == "fixed"
    assert mine[0].history == weft.run(sweep(), device="cpu", progress=False)[0].history


def test_what_was_profiled_is_not_profiled_again(monkeypatch):
    run(ThreadAccelerator("npu", Slowed(10**9, 1.0)))
    monkeypatch.setattr(dividing, "profile_group", lambda *_, **__: pytest.fail("profiled twice"))
    result, _ = run(ThreadAccelerator("npu", Slowed(10**9, 1.0)))
    assert result[0].status == "finished"


def test_an_interrupted_run_is_resumed_with_its_division(tmp_path):
    control = weft.Control()
    npu = ThreadAccelerator("npu")
    seen = []

    def stop(event) -> None:
        seen.append(event.kind)
        if seen.count("progress") == 3:
            control.preempt()

    about = {"device": "cpu", "progress": False, "out": tmp_path / "run"}
    weft.run(sweep(), options=weft.RunOptions(hardware=npu), control=control, on_event=stop, **about)
    resumed = weft.run(sweep(), options=weft.RunOptions(hardware=npu), resume=True, **about)
    npu.stop()
    assert resumed[0].history == weft.run(sweep(), device="cpu", progress=False)[0].history


@pytest.mark.parametrize(
    ("work", "options", "message"),
    [
        (weft.Sweep("demo", model="sage", epochs=1), {}, "hardware= would have no effect"),
        (sweep(), {"hardware": object()}, r"must be an object with name, registry\(\) and preparers\(parts\)"),
    ],
)
def test_hardware_that_nothing_would_use_is_refused(work, options, message):
    npu = ThreadAccelerator("npu")
    with pytest.raises(SpecError, match=message):
        weft.run(work, device="cpu", progress=False, options=weft.RunOptions(**{"hardware": npu, **options}))
    npu.stop()
