"""Results of sweeps made by a formula instead of by training, for whatever shows them."""

from __future__ import annotations

import math

from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.engine.result import Result
from weft.engine.sweep_result import SweepResult

GRAPH = {"name": "made", "nodes": 100, "edges": 400, "train": 20, "val": 30, "test": 50}


def made(sweep: Sweep, score, epochs: int = 12, broken=()) -> SweepResult:
    """A result in which member ``task`` reaches ``score(task)``; members named in ``broken`` diverged at once."""
    tasks = sweep.tasks()
    results = [_diverged(task) if task.name in broken else _finished(task, score(task), epochs) for task in tasks]
    groups = [[task.label for task in tasks if sweep.graph_of(task) == graph] for graph in sweep.graphs]
    plans = tuple(Plan(tuple(some), "stacked" if len(some) > 1 else "solo", why=("equal steps",)) for some in groups)
    return SweepResult(sweep, results, plans, {"weft": "0", "device": "CPU"}, 1.5, dict.fromkeys(sweep.graphs, GRAPH))


def _finished(task, score, epochs):
    rises = [score * (1 - math.exp(-(epoch + 1) / 2)) for epoch in range(epochs)]
    history = {"epoch": list(range(1, epochs + 1)), "loss": [1 / (epoch + 1) for epoch in range(epochs)]}
    history |= {"val_accuracy": rises, "test_accuracy": [value - 0.01 for value in rises]}
    metrics = {"metric": "accuracy", "val_accuracy": score, "val_loss": 1 - score, "test_accuracy": score - 0.01}
    metrics |= {"best_epoch": epochs, "epochs_run": epochs, "seconds": 0.1, "seconds_per_epoch": 0.1 / epochs}
    return Result(task, Plan((task.label,)), metrics, history, None, {})


def _diverged(task):
    metrics = {"metric": "accuracy", "best_epoch": 0, "epochs_run": 1, "seconds": 0.1, "seconds_per_epoch": 0.1}
    history = {"epoch": [1], "loss": [math.nan], "val_accuracy": [math.nan]}
    message = f"task {task.label!r}: loss became nan at epoch 1"
    return Result(task, Plan((task.label,)), metrics, history, None, {}, "diverged", message)
