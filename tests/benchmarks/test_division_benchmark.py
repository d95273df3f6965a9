"""The division benchmark in its quick mode: cells for every side, a report, and the simulator beside the epochs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.harness import division_case, steady_division
from benchmarks.harness.division_report import rows_of, verdicts
from benchmarks.harness.speed_plot import speed_svg
from benchmarks.suites import division
from weft.core.division import Division, PhaseTime, PhaseTimes, built_in
from weft.core.placement import Placement
from weft.planner.division.partitioner import Limits

pytestmark = pytest.mark.timeout(240)
SMALL = ["--quick", "--shapes", "uk", "--models", "sage", "--workers", "2", "--batches", "6", "--repeats", "1"]


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Runs the suite and returns its cells; ten times as fast as the quick mode is."""
    short = {shape: {key: value / 10 for key, value in some.items()} for shape, some in division_case.QUICK.items()}
    monkeypatch.setattr(division_case, "QUICK", short)
    out = tmp_path / "division.json"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["division", *SMALL, *words, "--out", str(out)])
        division.main()
        return json.loads(out.read_text())["cells"]

    return run


def test_quick_mode_compares_sides_and_ratios_and_goes_on_where_it_ended(cells, capsys):
    words = ["--ratios", "2", "--budgets", "", "--no-stress"]
    found = cells(*words)
    assert [cell["side"] for cell in found] == ["profile", "device", "weft", "host", "share 0.50"]
    assert all(cell["status"] == "ok" for cell in found), found
    for cell in found[1:]:
        assert cell["epoch_seconds"] > 0
        assert cell["simulated_seconds"] > 0
    told = capsys.readouterr().out
    assert "better side / weft" in told
    assert "simulator within 10%, 12 configurations" in told
    assert "| not measured |" in told.splitlines()[-1]  # no neighbour, and the table is the last thing printed
    again = cells(*words[:2], "--no-stress", "--budgets", "12", "--budget-shape", "uk", "--resume")
    assert again[:5] == found  # not run again
    assert {one["batches"] for one in found[1:]} == {6}
    more = again[5:]
    assert [cell["side"] for cell in more] == ["plan", "device", "weft", "host"]
    assert more[0]["placement"]["features"] == "gpu"
    assert more[1]["ms_per_batch"] == more[2]["ms_per_batch"] > 0
    assert more[3]["same_as"] == "host"
    assert "uk sage 12 GiB: features gpu, edges gpu" in capsys.readouterr().out


def test_a_division_is_measured_when_it_has_settled(cells, monkeypatch, capsys):
    """Begun as predicted; here the epochs of divided ones take longer than that, and it is left for one side."""
    plain, counted = steady_division.train_batches, []

    def slow(group, count):
        counted.append(count)
        divided = division_case.divided_source(group).division.divided
        return plain(group, count) * (20.0 if divided else 1.0)

    monkeypatch.setattr(steady_division, "train_batches", slow)
    # Phases long beside what a busy machine adds to them: it is to begin divided.
    longer = {shape: {key: 3 * value for key, value in some.items()} for shape, some in division_case.QUICK.items()}
    monkeypatch.setattr(division_case, "QUICK", longer)
    monkeypatch.setattr(division_case, "QUICK_TRAINING", {"sage": 0.001})
    found = cells("--shapes", "products", "--ratios", "1", "--budgets", "", "--no-stress")
    (weft,) = (one for one in found if one["side"] == "weft")
    assert weft["began_with"]["host_batches"] * weft["began_with"]["device_batches"] > 0
    assert not weft["division"]["host_batches"] * weft["division"]["device_batches"]
    assert weft["epochs_until_steady"] >= 2
    assert len(weft["first_epochs_ms"]) == len(counted) >= 4
    left = [note for note in weft["notes"] if "divided anew, because an epoch takes" in note]
    assert left, weft["notes"]  # a busy machine may have made a phase drift before
    assert left[0] in capsys.readouterr().out
    (profile,) = (one for one in found if one["side"] == "profile")
    assert PhaseTimes.from_dict(profile["times"]).crowding == pytest.approx(profile["crowding"], abs=1e-4)


def test_a_cell_with_few_workers_is_divided_anew_with_so_many(monkeypatch):
    """Here the host turns out to be four times as fast as profiled."""
    registry = built_in(True)
    times = PhaseTimes({key: PhaseTime(0.01) for key in registry.keys("gpu")} | {"batching_cpu": PhaseTime(0.2)})
    used, found = [], {"batching_cpu": PhaseTime(0.05), "epoch": PhaseTime(1.0)}
    source = Namespace(hardware=Namespace(registry=lambda: registry, name="gpu"), steps_per_epoch=64, slots=19)
    source.divide = lambda one: used.append(one) or setattr(source, "division", one)
    source.phases = lambda: found
    monkeypatch.setattr(steady_division, "train_batches", lambda group, count: 1.0)
    case = division_case.Case(None, source, times, Limits(18, 4, 14), 0.0)
    begun = case.side("share 0.75", 4)
    kept, about = steady_division.settled(case, begun, float("inf"), begun.workers)
    assert about["epochs_until_steady"] >= 1
    assert len(used) > 1
    assert {one.workers for one in used if one.host_batches} == {4}
    assert kept.workers <= 4


def test_the_host_prepares_nothing_beyond_a_short_epoch():
    """The end of an epoch would otherwise wait for batches that nobody trains on; the next one is as short."""
    group = Namespace()
    ran = []
    pipeline = Namespace(run=lambda seeds, then=(): ran.append((list(seeds), list(then))))
    source = Namespace(divided=pipeline, division=Division(1, 1), steps_per_epoch=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division_case, "divided_source", lambda one: source)
        with division_case.shortened(group, 3):
            source.divided.run(list(range(10)), list(range(10, 20)))
            assert source.steps_per_epoch == 3
        source.divided.run(list(range(5)))
    assert ran == [([0, 1, 2], [10, 11, 12]), ([0, 1, 2, 3, 4], [])]
    assert source.steps_per_epoch == 10


def test_the_figure_has_a_panel_per_group_and_a_line_per_side():
    cells = [
        {
            "status": "ok",
            "shape": "uk",
            "model": model,
            "side": side,
            "workers": count,
            "ms_per_batch": 10.0 * count,
        }
        for model in ("sage", "gat")
        for side in division.SIDES
        for count in (1, 4)
    ]
    panels = division.speed_panels([*cells, {"status": "ok", "shape": "uk", "model": "sage", "side": "profile"}])
    assert list(panels) == ["uk, gat", "uk, sage"]  # whatever was measured first
    assert panels["uk, gat"]["weft"] == {1: 100.0, 4: 25.0}
    drawn = ElementTree.fromstring(speed_svg(panels))
    assert sum(part.tag.endswith("path") for part in drawn.iter()) == 6


def cell(side, ms=None, workers=14, model="sage", budget=12.0, shape="papers100m", **more):
    about = {"status": "ok", "shape": shape, "model": model, "budget_gib": budget, "side": side}
    return {**about, **({} if ms is None else {"ms_per_batch": ms, "workers": workers}), **more}


def test_the_last_table_says_pass_or_miss():
    sides = [cell("device", 10.0), cell("host", 12.0), cell("weft", 7.0), cell("share 0.50", 6.9)]
    kinds = [(model, shape) for model in ("sage", "gcn", "gat") for shape in ("products", "papers100m", "uk")]
    errors = [cell(f"share {place}", 9.0, place, *kinds[place % 9][:1], shape=kinds[place % 9][1], error=0.02)
              for place in range(12)]  # fmt: skip
    profiled = [cell("profile", shape="products", budget=None, profile_seconds=2.5)]
    profiled += [cell(side, 8.0, shape="products", budget=None) for side in ("device", "weft")]
    about = {"later_seconds": 1.0, "budget": None}
    stress = [cell("stress", adapting=on, adapted_after_epochs=1 if on else None, **about) for on in (True, False)]
    found = {what: (verdict, told) for what, verdict, told in verdicts([*sides, *errors, *profiled, *stress])}
    assert [verdict for verdict, _ in found.values()] == ["pass"] * 5 + ["MISS"] + ["pass"] * 2  # one of 45 cells
    assert "1 of 1; least 1.43" in found["1.3x where sides are close (within 1.25x)"][1]
    assert "1.62 epochs" in found["profile within 2 epochs of products"][1]
    slow = [cell("device", 10.0), cell("host", 12.0), cell("weft", 11.0), cell("share 0.50", 6.9), profiled[0]]
    late = [cell("weft", 4.0, shape="products", budget=None), {**stress[0], "adapted_after_epochs": None}]
    wrong = [{**one, "error": 0.2} for one in errors]
    assert [verdict for _, verdict, _ in verdicts([*slow, *late, *wrong])] == ["MISS"] * 8
    assert {verdict for _, verdict, _ in verdicts([])} == {"not measured"}


def test_sides_that_are_far_apart_are_no_case_to_gain_in():
    (row,) = rows_of([cell("device", 10.0), cell("host", 13.0), cell("weft", 10.0)])
    assert not row.close(1.25)
    assert row.close(1.5)
    assert row.gain == 1.0


class Recorded:
    """A recorder that runs plans and nothing else."""

    def __init__(self) -> None:
        self.cells, self.device = [{"status": "ok", "side": "stress"}], torch.device("cpu")

    def cell(self, key, work, free=True):
        return {"status": "ok", **key, **work()} if key["side"] == "plan" else {"status": "ok"}


def test_a_run_that_ends_early_has_the_telling_cells(monkeypatch):
    """The leading case with every ratio and a neighbour, every shape, plans within budgets; other models last."""
    about = {"shapes": "products,uk", "models": "sage,gcn", "budgets": "12,80", "budget_shape": "papers100m"}
    about |= {"workers": "4,14", "few_workers": "14", "most_workers": 14, "searched": "sage", "ratios": 3}
    about["machine"] = "h200"
    suite, asked = division.Suite(Recorded(), Namespace(**about, stress=True, quick=True)), []
    places = {12.0: Placement("cached", "host"), 80.0: Placement()}
    planned = lambda shape, model, budget: {"placement": places[budget].to_dict(), "device_buffer": 4}  # noqa: E731
    monkeypatch.setattr(suite, "_cells", lambda part, keys, make: asked.append((part.label, [k["side"] for k in keys])))
    monkeypatch.setattr(suite, "_planned", planned)
    suite.run()
    labels = [label for label, _ in asked]
    assert labels[:3] == ["products sage", "uk sage", "papers100m sage within 12 GiB"]
    assert labels[-2:] == ["products gcn", "uk gcn"]
    sides = asked[0][1]
    assert sides[:4] == ["profile", "device", "weft", "host"]
    assert sides[-4:] == ["share 0.33", "share 0.67", "stress", "stress"]
    assert asked[2][1][-2:] == ["share 0.33", "share 0.67"]


def test_a_graph_is_made_before_memory_is_capped(monkeypatch):
    """Making one takes more of the GPU than a small budget allows, also in a run that found its plan before."""
    happened = []

    @contextmanager
    def cap(device, machine, most):
        happened.append(("cap", most))
        yield
        happened.append("no cap")

    suite = division.Suite(
        Recorded(), Namespace(machine="h200", workers="14", few_workers="14", most_workers=14, ratios=3)
    )
    part = division.Part("papers100m", "sage", 12.0, whole=True)
    made = {"placement": Placement("cached", "host").to_dict(), "device_buffer": 2}
    monkeypatch.setattr(division, "memory_cap", cap)
    monkeypatch.setattr(division, "make_case", lambda *given: happened.append("case"))
    monkeypatch.setattr(suite, "_planned", lambda *about: made)
    monkeypatch.setattr(suite, "graph", lambda shape: happened.append("graph"))
    monkeypatch.setattr(suite, "_cells", lambda part, keys, make: make())
    suite.within_budget(part)
    assert happened == ["graph", ("cap", 12 << 30), "case", "no cap"]


def test_a_plan_that_does_not_divide_trains_by_the_gpu_alone(monkeypatch):
    """Though a division would be found, which was not planned for and may not fit."""
    about = {"shape": "papers100m", "model": "sage", "budget_gib": 12.0}
    recorder = Recorded()
    recorder.cells = [{"status": "ok", **about, "side": "plan", "divides": False}]
    recorder.cells += [{"status": "ok", **about, "side": "device", "workers": 14, "ms_per_batch": 12.2}]
    suite = division.Suite(recorder, Namespace(cell_seconds=1.0, most_workers=14, repeats=1))
    elastic = Division(1, 1, 2, in_step=True, elastic=True)
    case = Namespace(side=lambda name, workers: elastic)
    monkeypatch.setattr(division, "measure", lambda *given: {"ms_per_batch": 5.0})
    key = {**about, "workers": 14, "side": "weft"}
    assert suite._measured(case, key)["ms_per_batch"] == 12.2
    recorder.cells[0]["divides"] = True
    assert suite._measured(case, key)["ms_per_batch"] == 5.0


def test_when_the_time_is_over_nothing_is_made(cells):
    found = cells("--budgets", "12", "--budget-seconds", "0")
    assert {cell["status"] for cell in found} == {"skipped"}


def test_worker_counts_from_the_most_down():
    args = Namespace(workers="1,2,8", few_workers="2,8")
    assert division._counts(args, whole=True) == [8, 2, 1]
    assert division._counts(args, whole=False) == [8, 2]


def test_a_forecast_has_every_part_and_leaves_out_what_is_known(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["division", "--device", "cpu"])
    args = division.arguments()
    recorder = Namespace(cells=[], device=None)
    suite = division.Suite(recorder, args)
    first = dict(suite.forecast())
    assert len(first) == 15  # three models on two shapes, and within three budgets on another
    assert all(seconds >= 10 for seconds in first.values())
    assert sum(first.values()) < 570
    part = division.parts_of(args)[0]
    recorder.cells = [{"status": "ok", **key} for key in suite.keys(part)]
    again = dict(suite.forecast())
    assert again[part.label] == 0.0
    assert sum(again.values()) < sum(first.values()) - 30


def test_a_profile_is_limited_by_the_epochs_of_its_shape():
    assert division_case.profile_limit(218_237_996, 193) == pytest.approx(1.7, abs=0.05)  # products
    assert division_case.profile_limit(543_967_244, 193) == pytest.approx(4.2, abs=0.1)  # UK-like
    assert division_case.profile_limit(0, 193) == 1.7  # all in a cache


def test_slow_sides_are_measured_over_fewer_batches():
    registry = built_in(True)
    times = PhaseTimes({key: PhaseTime(0.01) for key in registry.keys("gpu")} | {"batching_cpu": PhaseTime(0.08)})
    source = Namespace(hardware=Namespace(registry=lambda: registry), steps_per_epoch=193)
    case = division_case.Case(None, source, times, Limits(18, 4, 14), 0.0)
    host = [Division(1, 0, workers, 18, 4) for workers in (1, 4, 14)]
    counts = [division_case.batches_of_cell(case, one, 1.2) for one in host]
    assert counts[0] == 16  # 80 ms each
    assert 50 < counts[1] < 70
    assert counts[2] == 193
    assert division_case.batches_of_cell(case, host[2], 0.5) == 56  # four rounds


def test_what_was_not_planned_counts_for_nothing():
    """A division where the plan has none, or one that took more than the budget."""
    about = {"status": "ok", "shape": "papers100m", "model": "sage", "budget_gib": 12.0}
    sides = [{**about, "side": "device", "workers": 4, "ms_per_batch": 12.0}]
    sides += [{**about, "side": "host", "workers": 4, "ms_per_batch": 13.0}]
    divided = {"division": Division(1, 1).to_dict(), "ms_per_batch": 6.0, "needed_gb": 12.0}
    sides += [{**about, "side": "weft", "workers": 4, **divided}]

    def planned(**plan) -> bool:
        (row,) = rows_of([*sides, {**about, "side": "plan", **plan}])
        return row.as_planned

    assert planned(divides=True)
    assert not planned(divides=False)
    assert planned(why=["batches: the host prepares some"])
    assert not planned(why=["edges on the GPU"])
    found = verdicts([*sides, {**about, "side": "plan", "divides": False}])
    assert found[2][1] == "not measured"
    assert "1 more were not measured as planned" in found[5][2]
    sides[-1]["needed_gb"] = 13.5
    assert not planned(divides=True)
