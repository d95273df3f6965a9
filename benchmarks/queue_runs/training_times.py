"""How well models of sharing explain what trainings took beside others, over all recorded runs of the queues.

    python -m benchmarks.queue_runs.training_times benchmarks/results/queues.json       a second, on any machine

Every training begins when it did, beside those that trained then. Its predicted seconds are compared with the measured
ones: the mean of the absolute log ratios, over all trainings and weighted by what each takes alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.recorder import print_table
from benchmarks.queue_runs.queue_simulations import ONE, PAIRS, fit_of, measured_alone
from weft.sched.interference import DeviceLoad, Interference
from weft.sched.policies import POLICIES
from weft.sched.queue_state import QueuedTask

Cell = dict[str, Any]
Windows = Mapping[str, tuple[float, float]]
Miss = tuple[float, float]  # the log ratio of predicted to measured seconds, and seconds alone
Model = tuple[Callable[[QueuedTask], DeviceLoad], Interference]
EVEN, BY_SECONDS, BY_TURNS, FITTED = "shared evenly", "by seconds alone", "by turns", "by turns, contention fitted"


def windows(cell: Cell) -> Windows:
    """From when to when every task of a run trained: until it ended."""
    return {name: (end - cell["took"][name]["trained_seconds"], end) for name, (_, end) in cell["tasks"].items()}


def predicted_seconds(
    name: str, alone: float, around: Windows, loads: Mapping[str, DeviceLoad], model: Interference
) -> float:
    """What training ``name`` takes if those around it train when they did."""
    begin, left = around[name][0], alone
    marks = sorted({time for other, both in around.items() if other != name for time in both if time > begin})
    now = begin
    for until in (*marks, math.inf):
        beside = [loads[other] for other, (first, last) in around.items() if other != name and first <= now < last]
        slowdown = model.slowdown(loads[name], beside)
        if now + left * slowdown <= until:
            return now + left * slowdown - begin
        left, now = left - (until - now) / slowdown, until
    raise AssertionError("time goes on")


def models(found: Mapping[str, Cell], base: Cell) -> dict[str, Model]:
    """The models of sharing by their names."""
    plain, fitted = Interference(contention=0.0), fit_of(found, base)
    return {
        EVEN: (lambda task: DeviceLoad(1.0), plain),
        BY_SECONDS: (lambda task: DeviceLoad(1.0, task.work), plain),
        BY_TURNS: (lambda task: DeviceLoad(1.0, task.turn_seconds), plain),
        FITTED: (lambda task: DeviceLoad(fitted.share, task.turn_seconds), fitted.interference),
    }


def misses(cells: Sequence[Cell]) -> Iterator[tuple[str, str, Miss]]:
    """The queue, the model and by how much it is off, of every training that was not one at a time."""
    for queue in dict.fromkeys(cell["queue"] for cell in cells):
        found = {cell["mode"]: cell for cell in cells if cell["queue"] == queue and cell["status"] == "ok"}
        if ONE not in found:
            continue
        alone = {task.id: task for task in measured_alone(found[ONE])}
        for name, (load_of, model) in models(found, found[ONE]).items():
            loads = {task.id: load_of(task) for task in alone.values()}
            for mode in (mode for mode in found if mode in POLICIES and mode not in (ONE, PAIRS)):
                around = windows(found[mode])
                for task, (begin, end) in around.items():
                    seconds = predicted_seconds(task, alone[task].work, around, loads, model)
                    yield queue, name, (math.log(seconds / (end - begin)), alone[task].work)


def mean_miss(found: Sequence[Miss]) -> tuple[float, float]:
    """The mean of the absolute log ratios, and the same weighted by seconds alone."""
    whole = sum(alone for _, alone in found)
    return sum(abs(log) for log, _ in found) / len(found), sum(abs(log) * alone for log, alone in found) / whole


def main() -> None:
    """Print a table: a row per model, over all queues and for each."""
    cells = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]
    rows = list(misses(cells))
    queues = list(dict.fromkeys(queue for queue, *_ in rows))
    table: list[list[Any]] = []
    for model in (EVEN, BY_SECONDS, BY_TURNS, FITTED):
        every = [miss for _, name, miss in rows if name == model]
        per = [mean_miss([m for queue, name, m in rows if (queue, name) == (one, model)])[0] for one in queues]
        table.append([model, len(every), *mean_miss(every), *per])
    print_table(["model", "trainings", "mean log ratio", "by seconds", *queues], table)


if __name__ == "__main__":
    main()
