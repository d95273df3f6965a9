"""Predict the peak memory of a Program on a machine, what it consists of, when it is reached, and what would lower it.

The operators are replayed in the order in which they run. Every Value is allocated by the operator that makes it and
freed where the step lets go of it. On a GPU that goes through a model of the allocator (``allocator.py``), with the
pools that the phases of a run use (``pools.py``), so that rounding, splitting and segments count as they do there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.core.machine import Machine
from weft.core.program import Program
from weft.core.units import show_bytes
from weft.planner.cost.allocator_replay import PeakBytes, replay_allocations

SHOWN = 8  # of the largest Values at the peak
MIN_SAVING = 0.05  # advice that saves less than this share of the peak is not given
SAFETY_FACTOR = 1.05  # an estimate times this is an upper bound, which a run can be trusted to


def upper_bound(estimate: int) -> int:
    """Bytes that a run stays below, of which ``estimate`` is the likely figure."""
    return int(estimate * SAFETY_FACTOR)


@dataclass(frozen=True)
class LiveValue:
    """A Value at the peak: its bytes, its kind, and the operator that made it (``""``: there before the step)."""

    bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    maker: str = ""

    def __str__(self) -> str:
        shape = " x ".join(f"{size:,}" for size in self.shape) or "one number"
        origin = f" of {self.maker}" if self.maker else ""
        return f"{show_bytes(self.bytes)} {self.kind}{origin} ({shape} {self.dtype})"


@dataclass(frozen=True)
class Memory:
    """Bytes of one group of tasks.

    ``peak``: the most that tensors and library workspaces take at once, as the allocator counts them; ``reserved``:
    the most it holds at any time of the run, where nothing is short; ``needed``: what it cannot do without;
    ``context``: what CUDA itself takes. ``kinds``: the step's peak by kind of Value, with ``"workspace"`` for what
    operators and libraries need inside, ``"rounding"`` for what the allocator adds, and ``"setup"`` for what the set-up
    takes beyond the step. ``position``: the operator of the step's peak. ``training``: the most that tensors take in a
    step without its evaluation.
    ``timeline``: live bytes at every operator by kind; ``phases`` says which phase each belongs to.
    """

    peak: int
    reserved: int
    needed: int = 0
    context: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    position: int = 0
    operator: str = ""
    timeline: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    alive: tuple[LiveValue, ...] = ()
    advice: tuple[str, ...] = ()
    training: int = 0

    @property
    def total(self) -> int:
        """What the device must have free: the bytes that are needed, and the context."""
        return self.needed + self.context

    @property
    def safe(self) -> int:
        """The total with the margin that makes it an upper bound."""
        return upper_bound(self.needed) + self.context

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "total": self.total, "safe": self.safe}


def memory(
    program: Program,
    machine: Machine,
    replay: bool = True,
    preparation: Program | None = None,
    recorded: bool = True,
    stepped: bool = False,
    tried: int = 0,
    alone: bool = False,
) -> Memory:
    """The memory that a run of ``program`` takes on ``machine``.

    ``replay``: whether the step is to be captured as a CUDA graph; ``recorded``: whether that will work, else it runs
    as it is after the attempt; ``stepped``: an epoch has several steps, and evaluations are not captured; ``tried``:
    steps of users' modules before the first epoch; ``alone``: each is called by itself as well.
    ``preparation``: what is done once before, if known.
    """
    timeline = timeline_of(program)
    alive = [sum(sizes) for sizes in zip(*timeline.values(), strict=True)]
    position = max(range(len(alive)), key=alive.__getitem__, default=0)
    kinds = {kind: sizes[position] for kind, sizes in timeline.items() if alive and sizes[position]}
    if machine.device == "cuda":
        about = (recorded, stepped, tried, alone)
        held = replay_allocations(program, preparation, replay, machine.workspace_bytes, *about)
    else:
        held = _plain(preparation, max(alive, default=program.resident_bytes))
    kinds = _completed(kinds, held.allocated, held.library, _setup(preparation, alive))
    return Memory(
        peak=held.allocated,
        reserved=held.reserved,
        needed=held.needed,
        context=machine.context_bytes,
        kinds={kind: size for kind, size in kinds.items() if size},
        position=position,
        operator=program.operators[position].name if program.operators else "",
        timeline=timeline,
        phases=tuple(op.phase for op in program.operators),
        alive=largest(program, position),
        advice=advice(program, kinds, held.allocated, machine.has_bf16),
        training=_training(program, alive) + held.library,
    )


def timeline_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Bytes alive while each operator runs, by kind of Value; ``"workspace"`` is what operators need inside."""
    kinds = sorted({value.kind for value in program.values})
    change = {kind: [0] * (len(program.operators) + 1) for kind in kinds}
    for number in program.resident:
        change[program.values[number].kind][0] += program.values[number].bytes
    for number, (first, last) in program.lifetimes().items():
        value = program.values[number]
        change[value.kind][first] += value.bytes
        change[value.kind][last + 1] -= value.bytes
    timeline = {kind: _running(changes[:-1]) for kind, changes in change.items()}
    return timeline | {"workspace": tuple(op.workspace for op in program.operators)}


def _running(changes: list[int]) -> tuple[int, ...]:
    total, sums = 0, []
    for change in changes:
        total += change
        sums.append(total)
    return tuple(sums)


def live_bytes(program: Program) -> list[int]:
    """Bytes alive while each operator runs, its workspace included: sums without an allocator."""
    return [sum(sizes) for sizes in zip(*timeline_of(program).values(), strict=True)]


def largest(program: Program, position: int) -> tuple[LiveValue, ...]:
    """The largest Values that are alive at an operator, each with its maker."""
    lives, values = program.lifetimes(), program.values
    there = [number for number, (first, last) in lives.items() if first <= position <= last]
    there = sorted((*program.resident, *there), key=lambda number: -values[number].bytes)[:SHOWN]
    makers = {number: program.operators[lives[number][0]].name if number in lives else "" for number in there}
    return tuple(
        LiveValue(values[number].bytes, values[number].kind, values[number].shape, values[number].dtype, makers[number])
        for number in there
        if values[number].bytes
    )


def _plain(preparation: Program | None, most: int) -> PeakBytes:
    """What is held if memory is allocated exactly as requested: on a CPU."""
    before = max(live_bytes(preparation), default=0) if preparation is not None else 0
    return PeakBytes(*[max(most, before)] * 3)


def _setup(preparation: Program | None, alive: list[int]) -> int:
    """By how much the set-up takes more than the step."""
    before = max(live_bytes(preparation), default=0) if preparation is not None else 0
    return max(before - max(alive, default=0), 0)


def _training(program: Program, alive: list[int]) -> int:
    """The most that is alive outside of evaluations."""
    pairs = zip(program.operators, alive, strict=True)
    return max((size for op, size in pairs if op.phase != "evaluation"), default=program.resident_bytes)


def _completed(kinds: dict[str, int], peak: int, library: int, setup: int) -> dict[str, int]:
    """The kinds with what they lack to make up the peak."""
    lacking = peak - sum(kinds.values())
    setup = min(setup, lacking)
    library = min(library, lacking - setup)
    workspace = kinds.get("workspace", 0) + library
    return {**kinds, "workspace": workspace, "setup": setup, "rounding": lacking - setup - library}


def advice(program: Program, kinds: Mapping[str, int], peak: int, bf16: bool = True) -> tuple[str, ...]:
    """What would lower the peak, the largest saving first; only what is worth doing.

    ``bf16``: whether the machine has units for it; emulated, it would cost more time than the memory is worth.
    """
    step = sum(kinds.get(kind, 0) for kind in ("activation", "gradient", "temporary"))
    options = [
        (_halved(program, kinds) if bf16 else 0, 'precision="bf16" halves what layers pass on'),
        (kinds.get("activation", 0), "narrower layers save up to"),
        (kinds.get("input", 0) // 2 if bf16 else 0, "features in half precision save"),
    ]
    if program.tasks > 1:
        options.append((step // 2, f"{program.tasks // 2} instead of {program.tasks} tasks in a group save"))
    options.sort(key=lambda option: -option[0])
    return tuple(f"{words}: {show_bytes(saved)}" for saved, words in options if saved >= MIN_SAVING * max(peak, 1))


def _halved(program: Program, kinds: Mapping[str, int]) -> int:
    """What bf16 saves of the peak: half of what the step passes on in float32."""
    moved = [value for value in program.values if value.kind in ("activation", "gradient")]
    single = sum(value.bytes for value in moved if value.dtype == "float32")
    share = single / max(sum(value.bytes for value in moved), 1)
    return int(share * (kinds.get("activation", 0) + kinds.get("gradient", 0)) / 2)
