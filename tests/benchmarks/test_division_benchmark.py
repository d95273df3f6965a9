"""The division benchmark in its quick mode: cells for every side, a report, and the simulator beside the epochs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest
import torch

from benchmarks.suites import division
from benchmarks.suites.division import rows_of, verdicts
from weft.core.division import Division
from weft.core.placement import DataPlacement

pytestmark = pytest.mark.timeout(240)
SMALL = ["--quick", "--shapes", "uk", "--models", "sage", "--workers", "2", "--batches", "6", "--repeats", "1"]


@pytest.fixture
def cells(monkeypatch, tmp_path):
    """Runs the suite and returns its cells; ten times as fast as the quick mode is."""
    short = {shape: {key: value / 10 for key, value in some.items()} for shape, some in division.QUICK.items()}
    monkeypatch.setattr(division, "QUICK", short)
    out = tmp_path / "division.json"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["division", *SMALL, *words, "--out", str(out)])
        division.main()
        return json.loads(out.read_text())["cells"]

    return run


def test_quick_mode_compares_sides_and_ratios_and_goes_on_where_it_ended(cells, capsys):
    words = ["--ratios", "2", "--budgets", ""]
    found = cells(*words)
    assert [cell["side"] for cell in found] == ["profile", "device", "weft", "host", "share 0.50"]
    assert all(cell["status"] == "ok" for cell in found), found
    for cell in found[1:]:
        assert cell["epoch_seconds"] > 0
        assert cell["simulated_seconds"] > 0
    told = capsys.readouterr().out
    assert "better side / Weft" in told
    assert "simulator within 10%, 12 configurations" in told
    assert "| not measured |" in told.rstrip().splitlines()[-1]  # no products, and the table is the last thing printed
    again = cells(*words[:2], "--budgets", "12", "--budget-shape", "uk", "--resume")
    assert again[:5] == found  # not run again
    assert {one["batches"] for one in found[1:]} == {6}
    more = again[5:]
    assert [cell["side"] for cell in more] == ["plan", "device", "weft", "host"]
    assert more[0]["placement"]["features"] == "gpu"
    assert more[1]["ms_per_batch"] == more[2]["ms_per_batch"] > 0
    assert more[3]["same_as"] == "host"
    assert "| uk, SAGE | 12 | 2 |" in capsys.readouterr().out


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
    profiled += [cell("weft", 9.0, workers=4, shape="products", budget=None)]  # slower: not what counts
    found = {what: (verdict, told) for what, verdict, told in verdicts([*sides, *errors, *profiled])}
    assert [verdict for verdict, _ in found.values()] == ["pass"] * 5 + ["MISS", "pass"]  # one of 45 cells
    assert "1 of 1; least 1.43" in found["1.3x where sides are close (within 1.25x)"][1]
    assert "1.62 epochs" in found["profile within 2 epochs of products"][1]
    slow = [cell("device", 10.0), cell("host", 12.0), cell("weft", 11.0), cell("share 0.50", 6.9), profiled[0]]
    late = [cell("weft", 4.0, shape="products", budget=None)]
    wrong = [{**one, "error": 0.2} for one in errors]
    assert [verdict for _, verdict, _ in verdicts([*slow, *late, *wrong])] == ["MISS"] * 7
    one_off = verdicts([*errors, {**errors[0], "error": 0.2}])[0]
    assert one_off[1] == "MISS"  # 12 of 13 are not all
    assert one_off[2].startswith("12 of 13")
    assert {verdict for _, verdict, _ in verdicts([])} == {"not measured"}


def test_sides_that_are_far_apart_are_no_case_to_gain_in():
    (row,) = rows_of([cell("device", 10.0), cell("host", 13.0), cell("weft", 10.0)])
    assert not row.close(1.25)
    assert row.close(1.5)
    assert row.gain == 1.0


class Recorded:
    """A recorder that runs plans and nothing else."""

    def __init__(self) -> None:
        self.cells, self.device = [], torch.device("cpu")

    def cell(self, key, work, free=True):
        return {"status": "ok", **key, **work()} if key["side"] == "plan" else {"status": "ok"}


def test_a_run_that_ends_early_has_the_telling_cells(monkeypatch):
    """The leading case with every ratio, every shape, plans within budgets; other models last."""
    about = {"shapes": "products,uk", "models": "sage,gcn", "budgets": "12,80", "budget_shape": "papers100m"}
    about |= {"workers": "4,14", "few_workers": "14", "most_workers": 14, "searched": "sage", "ratios": 3}
    about["machine"] = "h200"
    suite, asked = division.Suite(Recorded(), Namespace(**about, quick=True)), []
    places = {12.0: DataPlacement("cached", "host"), 80.0: DataPlacement()}
    planned = lambda shape, model, budget: {"placement": places[budget].to_dict(), "device_buffer": 4}  # noqa: E731
    monkeypatch.setattr(suite, "_cells", lambda part, keys, make: asked.append((part.label, [k["side"] for k in keys])))
    monkeypatch.setattr(suite, "_planned", planned)
    suite.run()
    labels = [label for label, _ in asked]
    assert labels[:3] == ["products sage", "uk sage", "papers100m sage within 12 GiB"]
    assert labels[-2:] == ["products gcn", "uk gcn"]
    sides = asked[0][1]
    assert sides[:4] == ["profile", "device", "weft", "host"]
    assert sides[-2:] == ["share 0.33", "share 0.67"]
    assert asked[2][1][-2:] == ["share 0.33", "share 0.67"]


def test_when_the_time_is_over_nothing_is_made(cells):
    found = cells("--budgets", "12", "--budget-seconds", "0")
    assert {cell["status"] for cell in found} == {"skipped"}


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
    found = verdicts([*sides, {**about, "side": "plan", "divides": False}])
    assert found[2][1] == "not measured"
    assert "1 more were not measured as planned" in found[5][2]
    sides[-1]["needed_gb"] = 13.5
    assert not planned(divides=True)
