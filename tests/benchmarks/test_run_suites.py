"""Sampled epochs and first minutes are measured on tiny graphs, and say what they could not do."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.harness.host_graph import fitting_scale
from benchmarks.harness.timing import covered
from benchmarks.suites import first_minute, sampled_epoch, sampled_ranks, settings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_sampled_epochs_are_measured(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["sampled_epoch", "--device", "cpu", "--scale", "0.0005", "--batch", "16", "--hidden", "4", "--fanout",
               "3,2", "--pyg-steps", "2", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    sampled_epoch.main()
    cells = json.loads(out.read_text())["cells"]
    good = [cell for cell in cells if cell["status"] == "ok" and cell["side"] == "weft"]
    assert [(cell["case"], cell["tasks"]) for cell in good] == [
        ("stages, one after another", 1),
        ("stages, overlapped", 1),
        ("stages, overlapped", 2),
    ]
    for cell in good:
        assert cell["epoch_seconds"] == pytest.approx(cell["ms"] * cell["steps_per_epoch"] / 1e3, rel=0.01)
        assert set(cell["stages"]) == {"sample", "fetch", "transfer"}
        assert cell["ms_per_task"] == pytest.approx(cell["ms"] / cell["tasks"], rel=0.01)
    printed = capsys.readouterr().out
    assert "| case |" in printed
    assert "stages, overlapped" in printed


def test_parts_keep_to_their_time(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    command = ["sampled_epoch", "--device", "cpu", "--scale", "0.0005", "--part-seconds", "-1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    sampled_epoch.main()
    cells = json.loads(out.read_text())["cells"]
    assert {cell["status"] for cell in cells} == {"skipped"}
    assert "seconds were spent" in cells[0]["reason"]


def test_busy_time_is_that_of_any_kernel():
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.5)]) == 4.0


def test_a_part_of_a_shape_where_host_memory_is_short():
    assert fitting_scale(1.0, 45 << 30) == 0.5
    assert fitting_scale(1.0, 100 << 30) == 1.0
    assert fitting_scale(0.5, 1 << 30) == 0.05


def test_papers100m_is_planned_and_trained_where_there_is_no_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["sampled_epoch", "--device", "cpu", "--shapes", "papers100M", "--papers-scale", "0.00005", "--out"]
    small = ["--machine", "cpu", "--papers-steps", "2", "--batch", "4", "--hidden", "8"]
    monkeypatch.setattr(sys, "argv", [*command, str(out), *small])
    sampled_epoch.main()
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["status"] == "ok", cell
    assert cell["epoch_seconds"] > 0
    assert "papers100m x 5e-05" in capsys.readouterr().out


def test_the_first_minute_is_measured_in_processes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["first_minute", "--device", "cpu", "--scale", "0.05", "--cells", "cora-gcn", "--sides", "cold,disk",
               "--epochs", "2", "--hidden", "4", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    first_minute.main()
    cold, disk = json.loads(out.read_text())["cells"]
    assert cold["status"] == disk["status"] == "ok", (cold, disk)
    assert cold["process_seconds"] > cold["seconds"] > 0
    assert 0 < disk["epochs_seconds"] < disk["second_seconds"] < disk["process_seconds"]
    assert "| cora | GCN |" in capsys.readouterr().out


def test_a_process_that_fails_is_recorded(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    command = ["first_minute", "--device", "cpu", "--cells", "nowhere-gcn", "--sides", "cold", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    first_minute.main()
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["status"] == "failed"
    assert "nowhere" in cell["error"]


def test_every_process_has_caches_of_its_own(tmp_path):
    env = first_minute.environment_in(tmp_path)
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "WEFT_HOME")
    assert {env[name] for name in names} == {str(tmp_path / part) for part in ("triton", "inductor", "home")}


@pytest.mark.rest
def test_ranks_that_sample_have_the_losses_of_one(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sampled_ranks.json"
    monkeypatch.setattr(sys, "argv", ["sampled_ranks", "--quick", "--device", "cpu", "--out", str(out)])
    sampled_ranks.main()
    data = json.loads(out.read_text())
    assert [(cell["status"], cell["ranks"]) for cell in data["cells"]] == [("ok", 1), ("ok", 2)]
    assert data["cells"][1]["largest_difference"] < 1e-5
    assert set(data["predicted"]) == {"2", "4", "8"}
    assert "| predicted, H200s with NVLink |" in capsys.readouterr().out


@pytest.mark.rest
def test_settings_of_a_gpu_are_skipped_with_the_reason_on_a_cpu(tmp_path, monkeypatch):
    out = tmp_path / "settings.json"
    command = ["settings", "--quick", "--device", "cpu", "--parts", "weave,sharded", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    settings.main()
    cells = {cell["side"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert cells["merged"]["difference"] < 1e-4
    for side in ("concurrent", "tiles", "interleaved", "staged", "fetched"):
        assert cells[side]["status"] == "skipped"
        assert "GPU" in cells[side]["reason"]
