"""One cell in a process of its own, which a fault on the device may end: its last line is its outcome as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.suites.persistent.inside import first_fault, microseconds_of_a_wait, microseconds_of_phases
from benchmarks.suites.persistent.steps import checked, launched, persistent, stack_of

Variants = list[tuple[int, int]]


def check(shape: str, model: str, variants: Variants) -> Any:
    """Compile and compare: afterwards the kernels are on disk."""
    stack = stack_of(shape, model)
    found = [{"programs": p, "warps": w, **checked(stack, p, w)[1]} for p, w in variants]
    for programs, warps in variants:
        microseconds_of_a_wait(programs, warps)
    return found


def phases(shape: str, model: str, variants: Variants) -> Any:
    """The phases of the first variant, timed inside of the kernel."""
    return microseconds_of_phases(stack_of(shape, model), *variants[0])


def measure(shape: str, model: str, variants: Variants) -> Any:
    """All sides; one that fails is recorded, and those after it as well if the device is lost."""
    stack = stack_of(shape, model)
    rows: list[dict[str, Any]] = [{"side": "launch by launch", **launched(stack)}]
    for programs, warps in variants:
        row: dict[str, Any] = {"side": f"{programs} x {warps} warps"}
        try:
            row |= persistent(stack, programs, warps) | {"empty_phase_us": microseconds_of_a_wait(programs, warps)}
        except Exception as error:  # too many programs for the device, or a fault
            row["error"] = str(error).split("\n")[0][:120]
        rows.append(row)
    return rows


def fault(shape: str, model: str, variants: Variants) -> Any:
    """Which phase fails."""
    return first_fault(stack_of(shape, model), *variants[0])


CELLS = {"check": check, "phases": phases, "measure": measure, "fault": fault}

if __name__ == "__main__":
    cell, shape, model, variants = sys.argv[1:]
    print(json.dumps(CELLS[cell](shape, model, json.loads(variants))))
