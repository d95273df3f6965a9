"""One cell in a process of its own, which a fault on the device may end: its last line is its outcome as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.suites.persistent.inside import first_fault, microseconds_of_a_wait, microseconds_of_phases
from benchmarks.suites.persistent.steps import checked, launched, persistent, stack_of
from weft.weave.persistent.kernel import PhasesLaunch

Variants = list[PhasesLaunch]


def check(shape: str, model: str, variants: Variants) -> Any:
    """Compile and compare: afterwards the kernels are on disk."""
    stack = stack_of(shape, model)
    found = [checked(stack, launch)[1] for launch in variants]
    for launch in variants:
        microseconds_of_a_wait(launch)
    return found


def phases(shape: str, model: str, variants: Variants) -> Any:
    """The phases of the first variant, timed inside of the kernel."""
    return microseconds_of_phases(stack_of(shape, model), variants[0])


def measure(shape: str, model: str, variants: Variants) -> Any:
    """All sides; one that fails is recorded, and those after it as well if the device is lost."""
    stack = stack_of(shape, model)
    rows: list[dict[str, Any]] = [{"side": "launch by launch", **launched(stack)}]
    for launch in variants:
        row: dict[str, Any] = {"side": name_of(launch)}
        try:
            row |= persistent(stack, launch) | {"empty_phase_us": microseconds_of_a_wait(launch)}
        except Exception as error:  # too many programs for the device, or a fault
            row["error"] = str(error).split("\n")[0][:120]
        rows.append(row)
    return rows


def name_of(launch: PhasesLaunch) -> str:
    """``"512 x 2 warps, 1 stages, 128 registers"``."""
    limits = {"stages": launch.stages, "registers": launch.registers}
    own = [f"{value} {name}" for name, value in limits.items() if value is not None]
    return ", ".join([f"{launch.programs} x {launch.warps} warps", *own])


def fault(shape: str, model: str, variants: Variants) -> Any:
    """Which phase fails."""
    return first_fault(stack_of(shape, model), variants[0])


CELLS = {"check": check, "phases": phases, "measure": measure, "fault": fault}

if __name__ == "__main__":
    cell, shape, model, variants = sys.argv[1:]
    print(json.dumps(CELLS[cell](shape, model, [PhasesLaunch(*one) for one in json.loads(variants)])))
