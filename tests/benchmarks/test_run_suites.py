"""Sampled epochs and first minutes are measured on tiny graphs, and say what they could not do."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.suites import first_minute, neighbor_loader, sampled_epoch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_a_sampled_epoch_is_measured_by_stages(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["sampled_epoch", "--device", "cpu", "--scale", "0.001", "--steps", "5", "--warmup", "2", "--batch", "16",
               "--hidden", "4", "--fanout", "3,2", "--depths", "1,2", "--tasks", "2", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    sampled_epoch.main()
    cells = json.loads(out.read_text())["cells"]
    good = [cell for cell in cells if cell["status"] == "ok" and cell["side"] == "weft"]
    assert [(cell["depth"], cell["tasks"]) for cell in good] == [(1, 1), (2, 1), (2, 2)]
    for cell in good:
        assert cell["epoch_seconds"] == pytest.approx(cell["ms"] * cell["steps_per_epoch"] / 1e3, rel=0.01)
        assert set(cell["stages"]) == {"sample", "fetch", "transfer"}
        assert all(stage["ms"] > 0 for stage in cell["stages"].values())
    assert 0 < good[0]["training_share"] < 1
    assert good[2]["ms_per_task"] == pytest.approx(good[2]["ms"] / 2, rel=0.01)
    assert all("GPU" in cell["reason"] for cell in cells if cell["features"] == "pinned")
    assert "epoch s (extrapolated)" in capsys.readouterr().out


def test_steps_beyond_an_epoch_are_counted_on(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    command = ["sampled_epoch", "--device", "cpu", "--scale", "0.0005", "--steps", "7", "--warmup", "1", "--batch",
               "64", "--hidden", "4", "--fanout", "2", "--depths", "2", "--tasks", "1", "--places", "device",
               "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    sampled_epoch.main()
    cell = json.loads(out.read_text())["cells"][0]
    assert cell["status"] == "ok", cell
    assert cell["steps_per_epoch"] < 7


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
    assert "| cora  | gcn   |" in capsys.readouterr().out


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


def test_neighbor_loader_times_what_is_here(tmp_path, monkeypatch, capsys):
    """Without a sampler of PyG's, Weft's side alone."""
    out = tmp_path / "n.json"
    command = ["neighbor_loader", "--scale", "0.005", "--steps", "2", "--warmup", "1", "--batch", "16", "--runs", "1",
               "--hidden", "8", "--pyg-workers", "0", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    neighbor_loader.main()
    cells = json.loads(out.read_text())["cells"]
    assert {(c["work"], c["status"]) for c in cells if c["side"] == "weft"} == {("sampling", "ok"), ("training", "ok")}
    assert all(cell["ms"] > 0 and cell["status"] == "ok" for cell in cells)
    assert "PyG/Weft" in capsys.readouterr().out
