"""Learning from runs: real results teach, what cannot teach is skipped by name, and nothing is learned twice."""

from __future__ import annotations

import json
import multiprocessing
import shutil

import pytest

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.sweep import Sweep
from weft.engine.learning import keep, learn
from weft.engine.machine import load_calibration
from weft.planner.cost.calibration import Observation
from weft.planner.machine_profiles import profile

CPU = profile("cpu")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two trainings of a few epochs, as `weft.run` leaves them."""
    place = tmp_path_factory.mktemp("runs")
    tiny_graph().save(place / "tiny")
    for name, model in (("a", "gcn"), ("b", "sage")):
        task = weft.Task(graph=str(place / "tiny"), model=model, hidden=8, epochs=6, name=name)
        weft.run(task, device="cpu", out=place / name, progress=False)
    return place


def test_runs_teach(runs, tmp_path):
    slow = shutil.copytree(runs, tmp_path / "slow")
    for path in slow.glob("*/result.json"):  # much slower than predicted: more than other programs' noise
        result = json.loads(path.read_text())
        result["metrics"]["seconds_per_epoch"] *= 10
        path.write_text(json.dumps(result))
    lesson = learn([slow], CPU)
    assert len(lesson.observations) == 2
    assert lesson.skipped == ()
    assert lesson.after < lesson.before
    kept = load_calibration(CPU)
    assert kept.factors == lesson.calibration.factors
    task = weft.Task(graph=str(runs / "tiny"), model="gcn", hidden=8, epochs=6)
    assert weft.plan(task, machine="cpu").groups[0].cost.corrected


def test_a_group_of_a_sweep_is_one_run(runs, tmp_path):
    sweep = Sweep(str(runs / "tiny"), hidden=8, epochs=6, seed=range(3))
    weft.run(sweep, device="cpu", out=tmp_path / "sweep", progress=False)
    lesson = learn([tmp_path / "sweep"], CPU)
    assert lesson.skipped == ()
    (one,) = lesson.observations
    members = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("tasks/*/result.json")]
    assert one.measured == pytest.approx(sum(member["metrics"]["seconds_per_epoch"] for member in members))
    next((tmp_path / "sweep").glob("tasks/*/result.json")).unlink()
    assert "did not all train to the same epoch" in learn([tmp_path / "sweep"], CPU).skipped[0]


def test_a_run_counts_once(runs):
    learn([runs / "a"], CPU)
    lesson = learn([runs, runs / "a" / "result.json"], CPU)
    assert len(lesson.calibration.observations) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"plan": {"members": ["a"], "device": "cuda"}}, "ran on cuda, not on cpu"),
        ({"metrics": {"epochs_run": 1, "seconds_per_epoch": 1.0}}, "only 1 epochs were run"),
        ({"task": {"graph": "<tiny>", "name": "a"}}, "<tiny>"),
        ({"task": {"graph": "tiny", "colour": 3}}, "unknown setting 'colour'"),
    ],
)
def test_what_cannot_teach_is_skipped_by_name(runs, tmp_path, change, reason):
    data = json.loads((runs / "a" / "result.json").read_text()) | change
    (tmp_path / "result.json").write_text(json.dumps(data))
    lesson = learn([tmp_path], CPU)
    assert lesson.observations == ()
    assert reason in lesson.skipped[0]
    assert load_calibration(CPU) is None


def test_files_that_are_no_results_are_skipped(tmp_path):
    (tmp_path / "result.json").write_text("{")
    assert "result.json" in learn([tmp_path], CPU).skipped[0]


def test_one_run_at_a_time():
    for index in range(3):
        keep(CPU, [Observation({"spmm": 0.5, "matmul": 0.5}, 3.0, f"run {index}")])
    assert load_calibration(CPU).factor("spmm") == pytest.approx(3.0, rel=0.05)
    keep(CPU, [Observation({}, 3.0, "nothing was predicted")])
    assert len(load_calibration(CPU).observations) == 3


def _observe(place, count):
    for number in range(count):
        keep(CPU, [Observation({"spmm": 0.001, "launch": 0.0001}, 0.002, f"run {place}.{number}")])


def test_processes_that_learn_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_observe, args=(place, 8)) for place in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    labels = {one.label for one in load_calibration(CPU).observations}
    assert labels == {f"run {place}.{number}" for place in range(3) for number in range(8)}
