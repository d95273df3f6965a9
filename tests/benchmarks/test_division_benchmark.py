"""The division benchmark in its quick mode: cells for every side, a report, and the simulator beside the epochs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from xml.etree import ElementTree

import pytest

from benchmarks.harness import division_case
from benchmarks.harness.speed_plot import speed_svg
from benchmarks.suites import division

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
    assert "simulator within 10 % of measured epochs" in told
    again = cells(*words[:2], "--no-stress", "--budgets", "12", "--budget-shape", "uk", "--resume")
    assert again[:5] == found  # not run again
    more = again[5:]
    assert [cell["side"] for cell in more] == ["plan", "device", "weft", "host"]
    assert more[0]["placement"]["features"] == "gpu"
    assert more[1]["ms_per_batch"] == more[2]["ms_per_batch"] > 0
    assert more[3]["same_as"] == "host"
    assert "within 12 GiB: features gpu, edges gpu" in capsys.readouterr().out


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
    assert list(panels) == ["uk, sage", "uk, gat"]
    assert panels["uk, gat"]["weft"] == {1: 100.0, 4: 25.0}
    drawn = ElementTree.fromstring(speed_svg(panels))
    assert sum(part.tag.endswith("path") for part in drawn.iter()) == 6


def test_when_the_time_is_over_nothing_is_made(cells):
    found = cells("--budgets", "12", "--budget-seconds", "0")
    assert {cell["status"] for cell in found} == {"skipped"}


def test_worker_counts_from_the_most_down():
    args = Namespace(workers="1,2,8", few_workers="2,8")
    assert division._counts(args, whole=True) == [8, 2, 1]
    assert division._counts(args, whole=False) == [8, 2]
