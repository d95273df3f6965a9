"""Decide whether to compile a step with Inductor: seconds saved per epoch against seconds of compiling.

Inductor fuses torch's own element-wise passes, reductions and gathers, so what lies between them is neither written nor
read again. Weft's operators it leaves as they are: of a built-in model next to nothing is left to fuse. What follows
from the graph alone is computed once before. A step that waited for the host, because it read sizes from its data,
can be captured after that.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.plan import GAIN, WOVEN
from weft.core.program import Operator, Program
from weft.planner.cost.roofline import EpochClock

TORCH = "aten."
# Results that are whole only once everything was read: they are written, whatever reads them.
COLLECTED = ("scatter", "reduction")
# Seconds of compiling: to begin with, in a process that has compiled nothing yet, and for every operator that is fused.
# On an H200's host the first module took 10 to 14 s, later ones of 60 to 290 operators 2 to 5
# (benchmarks/suites/compiled.py).
BEGIN_SECONDS = {"cuda": 10.0, "cpu": 10.0}
OPERATOR_SECONDS = {"cuda": 0.02, "cpu": 0.1}
SHARE = 0.05  # of an epoch, below which a gain is not worth a change of arithmetic


@dataclass(frozen=True)
class Compiling:
    """What Inductor would make of a step: seconds saved an epoch, of how many, and what it takes to compile."""

    saved: float
    epoch: float
    seconds: float

    def pays(self, epochs: int) -> bool:
        """Whether it repays over a training of ``epochs``."""
        return self.saved >= SHARE * self.epoch and self.saved * epochs > GAIN * self.seconds


def compiling(program: Program, clock: EpochClock) -> Compiling:
    """What compiling ``program`` would save and take."""
    varying = {number for number, value in enumerate(program.values) if value.kind in ("weight", "state")}
    for op in program.operators:
        if varying & (set(op.reads) | set(op.writes)):
            varying |= set(op.writes)
    constant = set(range(len(program.values))) - varying  # values that depend on the graph and its features alone
    inside = _inside(program)
    saved, fused = clock.waiting, 0
    for op in program.operators:
        if not _is_torchs(op):
            continue
        fused += 1
        work, fixed = clock.seconds_of(op, op.phase)
        touched = set(op.reads) | set(op.writes)
        if constant >= touched:
            saved += work + fixed
            continue
        total = sum(program.values[value].bytes for value in touched)
        gone = sum(program.values[value].bytes for value in touched & inside)
        saved += work * gone / max(total, 1)
        saved += fixed if set(op.writes) and set(op.writes) <= inside else 0.0
    device = clock.machine.device
    epoch = sum(clock.resources.values())
    return Compiling(saved, epoch, BEGIN_SECONDS[device] + fused * OPERATOR_SECONDS[device])


def whether_to_compile(
    requested: bool | None, estimate: Compiling | None, epochs: int, device: str, join: str
) -> tuple[bool, tuple[str, ...]]:
    """The choice and a sentence for it, none if there is nothing to say.

    ``requested``: the user's choice, if any; ``estimate`` is None if a step had no dry run.
    """
    if join in WOVEN:
        return False, ("not compiled: the merged step has kernels of its own",) if requested else ()
    if requested is not None:
        return requested, ("compiled by Inductor: requested" if requested else "not compiled: as requested",)
    if device == "cpu" or estimate is None:
        return False, ()
    per_epoch = f"{estimate.saved * 1e3:.3g} ms of {estimate.epoch * 1e3:.3g} ms per epoch"
    if estimate.pays(epochs):
        return True, (
            f"compiled by Inductor: about {per_epoch} are passes that it fuses or results that do not change, "
            f"{estimate.saved * epochs:,.3g} s over {epochs:,} epochs; it takes about {estimate.seconds:.0f} s",
        )
    return False, (
        f"not compiled: Inductor would save about {per_epoch}, "
        f"{estimate.saved * epochs:,.2g} s over {epochs:,} epochs, and take about {estimate.seconds:.0f} s",
    )


def _is_torchs(op: Operator) -> bool:
    return op.name.startswith(TORCH) and op.launches > 0 and not op.library and op.phase != "update"


def _inside(program: Program) -> set[int]:
    """Values that lie inside of what would be one kernel: made and read by fused operators of one phase."""
    phases: dict[int, set[str]] = {}
    read: set[int] = set()
    for op in program.operators:
        fused = _is_torchs(op)
        for value in (*op.reads, *op.writes):
            phases.setdefault(value, set()).add(op.phase if fused else "")
        if not fused or op.family in COLLECTED:
            for value in op.writes:
                phases.setdefault(value, set()).add("")
        read |= set(op.reads)
    resident = set(program.resident)
    return {value for value, met in phases.items() if len(met) == 1 and "" not in met and value in read - resident}
