"""The default policy against CoGNN's on the paper's five queues, with bytes and seconds as recorded on an H200.

``recorded_queues.json`` has of every task its predicted bytes and the seconds that its 20 epochs took there;
``recorded_run.json`` is a later run, with what every start and training took. What a start takes on the host is varied,
as is how much of a prediction is right.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from benchmarks.queue_runs.simulations import calibrated, conditions, fit_of, measured_alone, predicted, starts_beside
from tests.sched.queues import GIB, device
from weft.sched.interference import Interference
from weft.sched.policies import BMC, LMCF, Backfill
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask
from weft.sched.simulator import Conditions, simulate

RECORDED = json.loads((Path(__file__).parent / "recorded_queues.json").read_text(encoding="utf-8"))
CELLS = json.loads((Path(__file__).parent / "recorded_run.json").read_text(encoding="utf-8"))["cells"]
STARTS = (0.05, 0.1, 0.15, 0.2, 0.3)
DEVICES = ((1.0, 0.1), (1.0, 0.4), (0.8, 0.4))  # the share of it that a training fills, and contention
AS_FITTED = (1.0, 0.0)  # to pairs of trainings that were measured side by side later
MEAN_START = 0.17


def training(name, size, start, seconds, share=1.0, turn=0.0):
    """A task that is built for ``start`` seconds and then trains for ``seconds``."""
    whole = start + seconds
    return QueuedTask(name, size, whole, utilisation=share * seconds / whole, start_seconds=start, turn_seconds=turn)


def ratios(queue, workers, share, contention, start_of, noise, draw):
    """Mean completion time of the default to LMCF's, and its makespan to BMC's."""
    told, actual = [], []
    for name, size, seconds in RECORDED[queue]:
        start = start_of()
        known = start if noise == 0.0 else MEAN_START
        told.append(training(name, size, known, seconds * draw.uniform(1 - noise, 1 + noise)))
        actual.append(training(name, size, start, seconds, share))
    about = Conditions(Interference(contention=contention, paging=1.0))
    ours, lmcf, bmc = (
        simulate(policy, told, [device(26 * GIB, workers)], about, actual=actual).metrics()
        for policy in (Backfill(), LMCF(), BMC())
    )
    return ours.mean_jct / lmcf.mean_jct, ours.makespan / bmc.makespan


@pytest.mark.parametrize("queue", RECORDED)
def test_completion_before_lmcf_and_makespan_before_bmc(queue):
    for start in STARTS:
        for share, contention in (AS_FITTED, *DEVICES):
            found = ratios(queue, 3, share, contention, lambda start=start: start, 0.0, random.Random(0))
            assert max(found) < 1.0, (start, share, contention)


@pytest.mark.parametrize("workers", [3, 6])
@pytest.mark.parametrize("queue", RECORDED)
def test_the_same_with_predictions_that_are_off_and_starts_that_vary(queue, workers):
    found = []
    for seed in range(12):
        draw = random.Random(seed)
        share, contention = DEVICES[seed % len(DEVICES)]
        start_of = partial(draw.uniform, 0.05, 0.3)
        found.append(ratios(queue, workers, share, contention, start_of, 0.3, draw))
    completion, makespan = zip(*found, strict=True)
    assert median(completion) < 0.97
    assert median(makespan) < 1.0
    assert sum(one < 1.0 for one in completion) >= 8
    assert sum(one < 1.0 for one in makespan) >= 7
    assert max(*completion, *makespan) < 1.08, "where it loses, it does so by a little"


def test_a_start_is_hidden_behind_the_training_before_it():
    tasks = [training(name, GIB, 1.0, 9.0) for name in "abc"]
    run = simulate(Backfill(), tasks, [device(workers=2)], actual=tasks)
    starts = {one.id: one.start for one in run.tasks}
    assert starts["b"] == pytest.approx(9.0, abs=0.6)
    assert run.makespan < 28.5, "the first start, and 27 s of training"


def first_starts(tasks):
    machine = MachineState((device(26 * GIB, workers=3),))
    return Backfill().schedule(tasks, [], machine).started


def test_a_chain_of_large_tasks_lets_those_go_first_that_would_lose_most_beside_it():
    large = [training(f"large-{place}", 18 * GIB, 0.2, 0.4, turn=4e-3) for place in range(4)]
    for seconds, turn, first in ((0.02, 2e-4, "small"), (0.15, 1.5e-3, "large"), (0.02, 4e-3, "large")):
        small = [training(f"small-{place}", GIB, 0.2, seconds, turn=turn) for place in range(5)]
        found = first_starts([*small, *large])
        assert any(name.startswith("large") for name in found) == (first == "large"), (seconds, turn)
    unknown = [replace(task, turn_seconds=0.0) for task in (*small, *large)]
    assert any(name.startswith("large") for name in first_starts(unknown))


@pytest.mark.parametrize("queue", RECORDED)
def test_the_same_by_turns_with_seconds_and_starts_that_vary(queue):
    """By the queues as they were last measured, with kernels that take turns."""
    found = {cell["mode"]: cell for cell in CELLS if cell["queue"] == queue and cell["status"] == "ok"}
    base, starts = found["pipeswitch"], starts_beside("backfill", found)
    fitted, six = fit_of(found, base), DeviceState.from_dict(base["device"])
    told = [replace(task, fusable=False) for task in predicted(base)]
    for seed in range(12):
        draw, actual = random.Random(seed), []
        for task in calibrated(measured_alone(base, starts), fitted):
            start, work = task.start_seconds * draw.uniform(0.85, 1.15), task.seconds - task.start_seconds
            factor = draw.uniform(0.85, 1.15)
            whole, turn = start + work * factor, task.turn_seconds * factor
            share = task.work * factor / whole
            actual.append(replace(task, seconds=whole, start_seconds=start, utilisation=share, turn_seconds=turn))
        about = conditions(fitted.contention)
        ours, lmcf, bmc = (
            simulate(policy, told, [six], about, actual=actual).metrics() for policy in (Backfill(), LMCF(), BMC())
        )
        assert ours.mean_jct < lmcf.mean_jct, seed
        assert ours.makespan < bmc.makespan, seed
