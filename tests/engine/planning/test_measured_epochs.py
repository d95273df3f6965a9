"""The `h200` profile against the epochs that were measured on one (benchmarks/results/epoch.json)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

import weft
from weft.engine.estimator import Estimator
from weft.planner.cost.roofline import RunMode, seconds
from weft.planner.machine_profiles import profile

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "epoch.json"
SHAPES = {"cora": ("cora", 2), "pubmed": ("pubmed", 4), "arxiv": ("ogbn-arxiv", 3), "products": ("ogbn-products", 3)}


@pytest.fixture(scope="module")
def pairs():
    """``(predicted, measured)`` seconds of a training epoch without evaluation, for every cell of Weft's."""
    estimator = Estimator(profile("h200"))
    found = []
    for cell in json.loads(RESULTS.read_text())["cells"]:
        if cell["side"] == "weft" and cell.get("status") == "ok" and cell["shape"] in SHAPES:
            shape, layers = SHAPES[cell["shape"]]
            task = weft.Task(graph=f"shape:{shape}", model=cell["model"], layers=layers, hidden=64, heads=4)
            never = RunMode(eval_every=10**9)
            step = estimator.steps(task).step
            cost = seconds(step, estimator.machine, stats=estimator.stats(task), mode=never)
            found.append((cost.epoch_seconds, cell["ms"] / 1e3))
    return found


def test_predictions_are_near_without_any_calibration(pairs):
    assert len(pairs) >= 12
    assert median(abs(predicted / measured - 1.0) for predicted, measured in pairs) < 0.25


def test_slower_trainings_are_predicted_to_be_slower(pairs):
    count = len(pairs)
    by_prediction, by_measurement = (sorted(range(count), key=lambda i, side=side: pairs[i][side]) for side in (0, 1))
    apart = sum((by_prediction.index(i) - by_measurement.index(i)) ** 2 for i in range(count))
    assert 1.0 - 6.0 * apart / (count * (count**2 - 1)) > 0.85  # Spearman's correlation of ranks
