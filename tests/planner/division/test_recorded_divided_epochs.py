"""The simulator against epochs of either side alone that were measured on an H200, in two runs (recorded_epochs.json).

Those profiles lacked what profiles have since. Here it is read off the recorded phases, not off the seconds of epochs,
and the same for all models and shapes: how reads inside of captured steps and copies share the bus. Of the host's three
batches alone one was a stall in half of the profiles. The divided epochs were recorded at ratios that only say which
share was the fastest.

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
ALL = [(run, cell) for run, found in RUNS.items() for cell in found["epochs"]]
EPOCHS = [(run, cell) for run, cell in ALL if not Division.from_dict(cell["division"]).divided]
REGISTRY = built_in()
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
        key = (run, cell["shape"], cell["model"], division.workers, cell["side"])
        found[key] = simulated(division, times, cell["batches"]) / cell["seconds"] - 1.0
    return found


def test_most_epochs_come_out_within_ten_per_cent():
    """15 of the 20 did when they were measured."""
    found = errors(complete)
    assert len(found) == 20
    assert sum(abs(one) <= 0.1 for one in found.values()) >= 18
    assert max(map(abs, found.values())) < 0.19
    assert max(abs(one) for key, one in found.items() if key[-1] == "device") < 0.04


def test_as_they_were_profiled_and_counted_fewer_do():
    old = [
        simulate(Division.from_dict(cell["division"]), profiled(run, cell["shape"], cell["model"]), cell["batches"],
                 REGISTRY).seconds / cell["seconds"] - 1.0
        for run, cell in EPOCHS
    ]  # fmt: skip
    assert old == pytest.approx([cell["error"] for _, cell in EPOCHS], abs=0.005)
    assert sum(abs(one) <= 0.1 for one in old) == 15


@pytest.mark.parametrize(("run", "model"), [("1", "sage"), ("2", "sage"), ("2", "gcn"), ("2", "gat")])
def test_what_is_chosen_is_near_the_fastest_ratio_that_was_measured(run, model):
    """Inside of steps, as the fastest ones: SAGE took 5.97 ms per batch so and 6.54 prepared concurrently."""
    chosen = partition(complete(run, "products", model), REGISTRY, BATCHES, Limits(18, 4, WORKERS)).division
    same = [cell for one, cell in ALL if (one, cell["model"], cell["shape"]) == (run, model, "products")]
    whole = [cell for cell in same if cell["batches"] == BATCHES and cell["division"]["workers"] == WORKERS]
    fastest = min(whole, key=lambda cell: cell["seconds"])["division"]
    assert chosen.elastic
    assert fastest["in_step"]
    assert chosen.device_share == pytest.approx(Division.from_dict(fastest).device_share, abs=0.15)
