"""Epochs of a divided group until its division stays: begun as predicted, then adapted as a run does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness.division_case import Case, batches_of_cell, measure, train_batches
from weft.core.division import EPOCH, Division
from weft.planner.division.adapting import Adapter

MOST_EPOCHS = 6  # until then it has settled, or is as it is


def settled(case: Case, division: Division, seconds: float, workers: int) -> tuple[Division, dict[str, Any]]:
    """The division that is kept, begun with ``division``, and what became of it; of epochs as :func:`measure` has.

    With ``workers`` of the host, not with all that the case was profiled with; one that begins with one side alone may
    be divided by a trial.
    """
    count = batches_of_cell(case, division, seconds)
    case.source.divide(division)
    limits = replace(case.limits, workers=workers)
    about = (case.source.division, case.source.hardware.registry(), limits, count)
    found = case.partitions.get(workers) if count == case.batches else None
    adapter, took, notes, last = Adapter(case.times, *about, found), list[float](), list[str](), 0
    for epoch in range(1, MOST_EPOCHS + 1):
        case.source.phases()
        took.append(train_batches(case.group, count))
        measured = {key: one.mean for key, one in case.source.phases().items()}
        change = adapter.observe({**measured, EPOCH: took[-1]})
        notes += adapter.told(took[-1], change)
        if change is not None:
            case.source.divide(change.division)
            last = epoch
        elif epoch >= last + 2:  # a second epoch may be needed to believe the first
            break
    found_out = {"epochs_until_steady": last, "first_epochs_ms": [round(1e3 * one / count, 4) for one in took]}
    return case.source.division, {**found_out, "began_with": division.to_dict(), "notes": notes}


def measure_steady(case: Case, division: Division, repeats: int, seconds: float, workers: int) -> dict[str, Any]:
    """As :func:`measure`, of the division that is kept in the end."""
    kept, about = settled(case, division, seconds, workers)
    return {**measure(case, kept, repeats, seconds), **about}
