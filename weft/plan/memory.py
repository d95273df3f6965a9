"""Memory of a Program on a machine: its peak, what it is made of, when it is reached, and what would lower it.

The operators are walked in the order in which they run. Every Value is allocated by the operator that makes it and
freed where the step lets go of it, through a model of the allocator (``allocator.py``), so that rounding, splitting and
segments count as they do on a GPU.

A recorded run takes the same memory three times in different places, never at once: warm-up runs fill a pool of a
side stream, which is given back before the recording; the recording fills a pool of its own, which stays. So the bytes
held are those of what is resident plus one step's pool. What is not given back is the workspace of cuBLAS, one for
each stream it was called on: the side stream's and the recording's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.core.amounts import show_bytes
from weft.core.machine import Machine
from weft.core.program import Program, Value
from weft.plan.allocator import Allocator, Block

SHOWN = 8  # of the largest Values at the peak
WORTH = 0.05  # advice that saves less than this share of the peak is not given
MARGIN = 1.03  # what an estimate is multiplied by where falling short would end a run


@dataclass(frozen=True)
class Alive:
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
    what it holds for that; ``context``: what CUDA itself takes. ``kinds``: the peak by kind of Value, with
    ``"workspace"`` for what operators and libraries need inside and ``"rounding"`` for what the allocator adds.
    ``position``: the operator of the peak.
    ``timeline``: live bytes at every operator by kind; ``phases`` says which phase each belongs to.
    """

    peak: int
    reserved: int
    context: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    position: int = 0
    operator: str = ""
    timeline: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    alive: tuple[Alive, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """What the device must have free: held bytes and the context."""
        return self.reserved + self.context

    @property
    def safe(self) -> int:
        """The total with the margin that makes it an upper bound."""
        return int(self.reserved * MARGIN) + self.context

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "total": self.total, "safe": self.safe}


def memory(program: Program, machine: Machine, replay: bool = True) -> Memory:
    """The memory that ``program`` takes on ``machine``; ``replay``: whether the step is recorded as a CUDA graph."""
    walk = _Walk(program)
    walk.run()
    library = any(op.library for op in program.operators) and machine.device == "cuda"
    workspace = machine.workspace_bytes * (2 if replay else 1) if library else 0
    exact = machine.device == "cpu"
    kinds = {kind: sizes[walk.position] for kind, sizes in walk.timeline.items() if sizes[walk.position]}
    kinds["workspace"] = kinds.get("workspace", 0) + workspace
    peak = sum(kinds.values()) if exact else walk.peak + workspace
    kinds["rounding"] = peak - sum(kinds.values())
    return Memory(
        peak=peak,
        reserved=peak if exact else walk.reserved + workspace,
        context=machine.context_bytes,
        kinds={kind: size for kind, size in kinds.items() if size},
        position=walk.position,
        operator=program.operators[walk.position].name if program.operators else "",
        timeline={kind: tuple(sizes) for kind, sizes in walk.timeline.items()},
        phases=tuple(op.phase for op in program.operators),
        alive=walk.largest,
        advice=advice(program, kinds, peak),
    )


def live_bytes(program: Program) -> list[int]:
    """Bytes alive while each operator runs, its workspace included: sums without an allocator."""
    lives = program.lifetimes()
    change = [0] * (len(program.operators) + 1)
    for value, (first, last) in lives.items():
        change[first] += program.values[value].bytes
        change[last + 1] -= program.values[value].bytes
    now, alive = program.resident_bytes, []
    for step, op in zip(change, program.operators, strict=False):
        now += step
        alive.append(now + op.workspace)
    return alive


class _Walk:
    """The step through two pools: what is resident in one, what comes and goes in the other."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._ends = _by_end(program)
        self._makers: dict[int, str] = {}
        self._held: dict[int, Block | None] = {}
        self._kept, self._step = Allocator(), Allocator()
        kinds = sorted({value.kind for value in program.values} | {"workspace"})
        self.timeline: dict[str, list[int]] = {kind: [] for kind in kinds}
        self._now = dict.fromkeys(kinds, 0)
        self.position, self._most = 0, -1
        self.largest: tuple[Alive, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes that the allocator counts as allocated, at most."""
        return self._kept.allocated + self._step.peak

    @property
    def reserved(self) -> int:
        """Bytes that it holds."""
        return self._kept.reserved + self._step.most

    def run(self) -> None:
        """Walk every operator."""
        for value in self._program.resident:
            self._take(value, self._kept, "")
        for position in range(len(self._program.operators)):
            self._operator(position)
        if not self._program.operators:
            self._sample(0, 0)

    def _operator(self, position: int) -> None:
        op = self._program.operators[position]
        for value in (*op.writes, *op.reads):
            if value not in self._held:
                self._take(value, self._step, op.name)
        inside = [self._step.take(size) for size in op.pieces or (op.workspace,)]
        self._sample(position, op.workspace)
        for block in inside:
            self._step.give(block)
        for value in self._ends.get(position, ()):
            self._step.give(self._held.pop(value))
            self._now[self._program.values[value].kind] -= self._program.values[value].bytes
            self._held.setdefault(value, None)

    def _take(self, value: int, pool: Allocator, maker: str) -> None:
        self._held[value] = pool.take(self._program.values[value].bytes)
        self._makers[value] = maker
        self._now[self._program.values[value].kind] += self._program.values[value].bytes

    def _sample(self, position: int, workspace: int) -> None:
        for kind, size in self._now.items():
            self.timeline[kind].append(size + (workspace if kind == "workspace" else 0))
        if self._step.allocated > self._most:
            self._most, self.position = self._step.allocated, position
            self.largest = self._largest()

    def _largest(self) -> tuple[Alive, ...]:
        values = self._program.values
        held = [value for value, block in self._held.items() if block is not None]
        held.sort(key=lambda value: -values[value].bytes)
        return tuple(_alive(values[value], self._makers[value]) for value in held[:SHOWN])


def _alive(value: Value, maker: str) -> Alive:
    return Alive(value.bytes, value.kind, value.shape, value.dtype, maker)


def _by_end(program: Program) -> dict[int, list[int]]:
    """The Values that go after each operator."""
    ends: dict[int, list[int]] = {}
    for value, (_, last) in program.lifetimes().items():
        ends.setdefault(last, []).append(value)
    return ends


def advice(program: Program, kinds: Mapping[str, int], peak: int) -> tuple[str, ...]:
    """What would lower the peak, the largest saving first; only what is worth doing."""
    step = sum(kinds.get(kind, 0) for kind in ("activation", "gradient", "temporary"))
    options = [
        (_halved(program, kinds), 'precision="bf16" halves what layers pass on'),
        (kinds.get("activation", 0), "narrower layers save up to"),
        (kinds.get("input", 0) // 2, "features in half precision save"),
    ]
    if program.tasks > 1:
        options.append((step // 2, f"{program.tasks // 2} instead of {program.tasks} tasks in a group save"))
    options.sort(key=lambda option: -option[0])
    return tuple(f"{words}: {show_bytes(saved)}" for saved, words in options if saved >= WORTH * max(peak, 1))


def _halved(program: Program, kinds: Mapping[str, int]) -> int:
    """What bf16 saves of the peak: half of what the step passes on in float32."""
    moved = [value for value in program.values if value.kind in ("activation", "gradient")]
    single = sum(value.bytes for value in moved if value.dtype == "float32")
    share = single / max(sum(value.bytes for value in moved), 1)
    return int(share * (kinds.get("activation", 0) + kinds.get("gradient", 0)) / 2)
