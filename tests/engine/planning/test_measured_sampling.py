"""Plans of sampled training against what was measured: on an H200 as recorded, and on this CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import weft
from weft.batches.sampled import source_for
from weft.core.placement import DataPlacement
from weft.engine.estimator import Estimator
from weft.engine.plan import plan
from weft.graph.generate import citation
from weft.planner.machine_profiles import profile as machine_profile
from weft.planner.transfers import with_batches
from weft.runtime.group import GroupRun

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "sampled_epoch.json"
CELLS = [cell for cell in json.loads(RESULTS.read_text())["cells"] if cell["side"] == "weft"]
NEVER = 2000
CACHE = int(0.4 * 2_449_029 * 400) + 4 * 2_449_029
PLACES = {
    "gpu": DataPlacement(),
    "host, pipelined": DataPlacement("host", overlap=True),
    "host, serial": DataPlacement("host"),
    "host, edges too, pipelined": DataPlacement("host", "host", overlap=True),
    "cached by degree, pipelined": DataPlacement("cached", cache_bytes=CACHE, overlap=True),
}


def recorded(case: str, precision: str = "fp32") -> dict:
    key = {"case": case, "precision": precision, "tasks": 1}
    return next(cell for cell in CELLS if key.items() <= cell.items())


def task(**about) -> weft.Task:
    sampled = {"mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "layers": 3, "hidden": 256, "dropout": 0.5}
    return weft.Task("shape:ogbn-products", model="sage", epochs=NEVER, eval_every=NEVER, **sampled, **about)


@pytest.fixture(scope="module")
def estimator():
    return Estimator(machine_profile("h200"))


def predicted(estimator, one, place):
    """The cost with everything on the GPU, then with things where ``place`` says: one dry run serves all."""
    estimate, stats = estimator.alone(one), estimator.stats(one)
    return with_batches(estimate.trained, one, stats, place, estimator.machine)


@pytest.mark.parametrize("case", PLACES)
def test_epochs_on_an_h200(estimator, case):
    cost = predicted(estimator, task(), PLACES[case])
    assert cost.epoch_seconds == pytest.approx(recorded(case)["epoch_seconds"], rel=0.08)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions(estimator, precision):
    cost = predicted(estimator, task(precision=precision), DataPlacement())
    assert cost.epoch_seconds == pytest.approx(recorded("gpu", precision)["epoch_seconds"], rel=0.15)


def test_memory_on_an_h200(estimator):
    """Nothing was evaluated in those runs: their peak is that of training alone, a quarter of the whole."""
    cost, peak = estimator.alone(task()).cost, 1e9 * recorded("gpu")["peak_gb"]
    assert cost.training_bytes == pytest.approx(peak, rel=0.15)
    assert cost.peak_bytes > 3 * cost.training_bytes


# ---- this CPU ----------------------------------------------------------------------------------------


def most_allocated(work) -> int:
    """The most bytes that ``work`` has allocated at once, in all threads."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("evaluated", [True, False], ids=["with evaluations", "training alone"])
def test_bytes_on_a_cpu(evaluated):
    graph = citation(num_nodes=20000, num_edges=300000, num_features=64, num_classes=8, seed=1)
    often = {"epochs": 3, "eval_every": 1 if evaluated else 3}
    one = weft.Task(graph, model="sage", hidden=64, layers=2, mode="sampled", fanout=[10, 5], batch=256, **often)
    group = plan(one, machine="cpu").groups[0]

    def train():
        run = GroupRun([one], graph, group.plan, torch.device("cpu"), make_source=source_for(one, group.plan))
        run.advance(1)

    arrays = (graph.x, graph.y, graph.adj.indptr, graph.adj.indices, graph.train, graph.val, graph.test)
    resident = sum(array.numel() * array.element_size() for array in arrays)
    taken = resident + most_allocated(train)
    expected = group.cost.peak_bytes if evaluated else group.cost.training_bytes
    assert expected == pytest.approx(taken, rel=0.15)
