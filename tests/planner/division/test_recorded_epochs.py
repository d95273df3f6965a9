"""The simulator against epochs of the host alone, measured on an H200 on 2026-11-16 (recorded_undivided_epochs.json).

That profile lacked two things which profiles have since: host batching beside copies, here read off the busy shares of
the host's own epochs with 8 and 14 workers, and sampling in a captured step, here the difference that
benchmarks/results/sampling.json has between kernels launched one by one and captured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from weft.core.division import Division, PhaseTime, PhaseTimes, built_in
from weft.planner.division.simulator import simulate

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
CELLS = json.loads((Path(__file__).parent / "recorded_undivided_epochs.json").read_text())["cells"]
SAMPLING = json.loads((RESULTS / "sampling.json").read_text())["cells"]
EPOCHS = [cell for cell in CELLS if "epoch_seconds" in cell and cell["side"] == "host"]


def profiled(model: str) -> PhaseTimes:
    """As it was measured then."""
    (cell,) = (one for one in CELLS if one["side"] == "profile" and one["model"] == model)
    phases = {key: PhaseTime(ms / 1e3, cell["std_ms"][key] / 1e3) for key, ms in cell["ms"].items()}
    return PhaseTimes(phases, cell["beside"], cell["crowding"])


def beside_copies(model: str, times: PhaseTimes) -> dict[str, float]:
    """How many times as long host batching and copies take beside each other."""
    crowded = [one for one in EPOCHS if one["model"] == model and one["side"] == "host" and one["workers"] >= 8]
    prepared, copied = [], []
    for cell in crowded:
        busy, workers, each = cell["busy"], cell["workers"], cell["epoch_seconds"] / cell["batches"]
        longer = busy["cpu"] * each * workers / times.of("batching_cpu", workers).mean
        prepared.append(1.0 + max(longer - 1.0, 0.0) / busy["pcie"])
        copied.append(busy["pcie"] * each / times.of("transfer_pcie").mean)
    return {"batching_cpu": mean(prepared), "transfer_pcie": max(mean(copied), 1.0)}


def complete(model: str) -> PhaseTimes:
    """With what profiles measure since."""
    times, found = profiled(model), {key: dict(others) for key, others in profiled(model).interference.items()}
    slower = beside_copies(model, times)
    found.setdefault("batching_cpu", {})["transfer_pcie"] = slower["batching_cpu"]
    found.setdefault("transfer_pcie", {})["batching_cpu"] = slower["transfer_pcie"]
    (hops,) = (one for one in SAMPLING if one["work"] == "three hops" and one["seeds"] == 1024 and "launched_ms" in one)
    saved = (hops["launched_ms"] - hops["ms"]) / 1e3
    captured = {"batching_gpu": PhaseTime(times.of("batching_gpu").mean - saved)}
    return replace(times, interference=found, captured=captured)


def errors(times_of) -> list[float]:
    times = {model: times_of(model) for model in ("sage", "gcn")}
    found = []
    for cell in EPOCHS:
        division = Division.from_dict(cell["division"])
        simulated = simulate(division, times[cell["model"]], cell["batches"], built_in())
        found.append(simulated.seconds / cell["epoch_seconds"] - 1.0)
    return found


def test_most_epochs_come_out_within_ten_per_cent():
    found = errors(complete)
    assert len(found) == 7
    assert sum(abs(one) <= 0.1 for one in found) >= 6
    assert max(map(abs, found)) < 0.11


def test_without_the_two_terms_fewer_do():
    found = errors(profiled)
    assert sum(abs(one) <= 0.1 for one in found) == 5
    assert found == pytest.approx([cell["error"] for cell in EPOCHS], abs=0.005)


def test_copies_slow_the_host_down_and_it_them():
    factors = beside_copies("sage", profiled("sage"))
    assert 1.2 < factors["batching_cpu"] < 1.5
    assert 1.0 < factors["transfer_pcie"] < 1.3
