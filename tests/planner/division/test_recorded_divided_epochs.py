"""The simulator against divided epochs that were measured on an H200, in two runs (recorded_epochs.json).

Those profiles lacked what profiles have since. Here it is read off the recorded phases, not off the seconds of epochs,
and the same for all models and shapes: how reads inside of captured steps and copies share the bus, and how long
sampling beside training waits for copies. Of the host's three batches alone one was a stall in half of the profiles.

Epochs of fewer batches than 193 were the beginning of longer ones, and ended when the workers' last batches did.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.core.division import INSIDE, INTERFERENCE, Division, PhaseTime, PhaseTimes, built_in
from weft.planner.division.partitioner import Limits, partition
from weft.planner.division.simulator import MOST_SIMULATED, simulate

RUNS = json.loads((Path(__file__).parent / "recorded_epochs.json").read_text())
EPOCHS = [(run, cell) for run, found in RUNS.items() for cell in found["epochs"]]
REGISTRY = built_in(True)
WORKERS, BATCHES, COUNTED = 14, 193, 3  # COUNTED: batches of the host alone in a profile
STALLED_MS = 10.0  # standard deviation of those from which on one was a stall


def profiled(run: str, shape: str, model: str) -> PhaseTimes:
    """As it was measured then."""
    (cell,) = (one for one in RUNS[run]["profiles"] if (one["shape"], one["model"]) == (shape, model))
    phases, captured = ({k: PhaseTime(ms / 1e3) for k, ms in cell[name].items()} for name in ("ms", "captured_ms"))
    return PhaseTimes(phases, cell["beside"], cell["crowding"], 0, captured, WORKERS)


def complete(run: str, shape: str, model: str) -> PhaseTimes:
    """With what profiles measure since."""
    (cell,) = (one for one in RUNS[run]["profiles"] if (one["shape"], one["model"]) == (shape, model))
    old, std = profiled(run, shape, model), cell["std_ms"]["batching_cpu"]
    alone = old.of("batching_cpu").mean - (std / COUNTED**0.5 / 1e3 if std > STALLED_MS else 0.0)
    crowding = (old.of("batching_cpu", WORKERS).mean / alone - 1.0) / (WORKERS - 1)
    beside = {key: dict(others) for key, others in old.interference.items()}
    beside["batching_gpu"]["transfer_pcie"] = INTERFERENCE["batching_gpu"]["transfer_pcie"]
    phases = {**old.phases, "batching_cpu": PhaseTime(alone)}
    return PhaseTimes(phases, beside, crowding, 0, old.captured, WORKERS, INSIDE)


def simulated(division: Division, times: PhaseTimes, batches: int) -> float:
    """Seconds of the first ``batches`` of an epoch, and of what the host's threads had begun by then."""
    if batches == BATCHES or not division.host_batches:
        return simulate(division, times, batches, REGISTRY).seconds
    whole = simulate(division, times, BATCHES, REGISTRY, most=max(MOST_SIMULATED, BATCHES)).activities
    last = max(one.end for one in whole if one.batch == batches - 1)
    return max([last] + [one.end for one in whole if one.key == "batching_cpu" and one.begin < last])


def errors(times_of) -> dict[tuple, float]:
    found = {}
    for run, cell in EPOCHS:
        division, times = Division.from_dict(cell["division"]), times_of(run, cell["shape"], cell["model"])
        key = (run, cell["shape"], cell["model"], division.workers, cell["side"], division.beside)
        found[key] = simulated(division, times, cell["batches"]) / cell["seconds"] - 1.0
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple, float]:
    return errors(complete)


def test_most_epochs_come_out_within_ten_per_cent(found):
    """34 of the 50 did when they were measured. Those in the ways that are chosen do, but two of the host alone."""
    assert len(found) == 50
    assert sum(abs(one) <= 0.1 for one in found.values()) >= 44
    assert max(map(abs, found.values())) < 0.19
    chosen = {key: one for key, one in found.items() if not key[-1] or key[4] in ("device", "host")}
    assert sum(abs(one) > 0.1 for one in chosen.values()) == 2


def test_as_they_were_profiled_and_counted_fewer_do():
    old = [
        simulate(Division.from_dict(cell["division"]), profiled(run, cell["shape"], cell["model"]), cell["batches"],
                 REGISTRY).seconds / cell["seconds"] - 1.0
        for run, cell in EPOCHS
    ]  # fmt: skip
    told = [cell["error"] for _, cell in EPOCHS]
    launched = [not cell["division"].get("in_step") for _, cell in EPOCHS]  # of others the simulation has changed
    same = [(now, then) for now, then, one in zip(old, told, launched, strict=True) if one]
    assert [now for now, _ in same] == pytest.approx([then for _, then in same], abs=0.005)
    assert len(same) >= 20
    assert sum(abs(one) <= 0.1 for one in old) == sum(abs(one) <= 0.1 for one in told) == 34


def test_dividing_beside_training_is_simulated_too_fast(found):
    """So it has to be predicted to be faster by that."""
    beside = [one for key, one in found.items() if key[-1] and key[4] not in ("device", "host")]
    assert len(beside) == 9
    assert max(beside) < -0.04


@pytest.mark.parametrize(("run", "model"), [("1", "sage"), ("2", "sage"), ("2", "gcn"), ("2", "gat")])
def test_what_is_chosen_is_near_the_fastest_ratio_that_was_measured(run, model):
    """Inside of steps, as the fastest ones: SAGE took 5.97 ms per batch so and 6.54 beside training."""
    chosen = partition(complete(run, "products", model), REGISTRY, BATCHES, Limits(18, 4, WORKERS)).division
    same = [cell for one, cell in EPOCHS if (one, cell["model"], cell["shape"]) == (run, model, "products")]
    whole = [cell for cell in same if cell["batches"] == BATCHES and cell["division"]["workers"] == WORKERS]
    fastest = Division.from_dict(min(whole, key=lambda cell: cell["seconds"])["division"])
    assert chosen.in_step
    assert fastest.in_step
    assert chosen.device_share == pytest.approx(fastest.device_share, abs=0.15)
