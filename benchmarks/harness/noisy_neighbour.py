"""Epochs of a divided group beside processes that take the cores, with and without dividing anew."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.harness.division_case import Case, train_batches
from weft.core.division import EPOCH, PhaseTimes
from weft.planner.division.adapting import Adapter

CALM, BUSY = 3, 5  # epochs
BATCHES = 96  # of each, at most


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that keep as many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def _as_measured(times: PhaseTimes, measured: Mapping[str, float], expected: Mapping[str, float]) -> PhaseTimes:
    """``times`` with which the simulated phases are the measured ones."""
    return times.scaled(
        **{key: measured[key] / expected[key] for key in expected if measured.get(key) and expected[key]}
    )


def stressed(case: Case, adapting: bool, args: Namespace) -> dict[str, Any]:
    """Epochs before and after other processes take the cores; ``adapting``: divide anew when phases drift.

    Begins with Weft's division, or, if the host has no part in that, with one in which it has: a busy neighbour does
    nothing to a GPU. There the calm epochs only say what its phases take, so that leaving it is no answer to calm.
    """
    chosen = case.side("weft", args.most_workers)
    forced = not chosen.host_batches
    case.source.divide(case.side("share 0.33", args.most_workers) if forced else chosen)
    begun, registry = case.source.division, case.source.hardware.registry()
    batches = min(case.batches, BATCHES)
    adapter = Adapter(case.times, case.source.division, registry, case.limits, batches)
    seconds: list[float] = []
    notes: list[str] = []
    changed: list[int] = []

    def epochs(count: int, calm: bool) -> None:
        for _ in range(count):
            case.source.phases()
            seconds.append(train_batches(case.group, batches))
            measured = {key: one.mean for key, one in case.source.phases().items()}
            measured[EPOCH] = seconds[-1]
            if calm and forced:
                adapter.profiled = _as_measured(case.times, measured, adapter.expected(case.times))
                continue
            change = adapter.observe(measured) if adapting else None
            notes.extend(adapter.told(seconds[-1], change))
            if change is not None:
                case.source.divide(change.division)
                changed.append(len(seconds))

    epochs(CALM, calm=True)
    with busy_processes(2 * (os.cpu_count() or 2)):
        time.sleep(0.5)
        epochs(BUSY, calm=False)
    case.source.close()
    after = seconds[CALM:]
    within_two = [one - CALM for one in changed if one > CALM]
    return {
        "begun": begun.words(),
        "chosen": not forced,
        "before_seconds": round(median(seconds[1:CALM]), 4),
        "first_two_seconds": round(sum(after[:2]) / 2, 4),
        "later_seconds": round(median(after[3:]), 4),
        "adapted_after_epochs": within_two[0] if within_two else None,
        "epochs": [round(one, 4) for one in seconds],
        "notes": notes,
    }
