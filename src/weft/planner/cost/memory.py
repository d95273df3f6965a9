"""Predict the peak memory of a Program on a machine, what it consists of, when it is reached, and what would lower it.

The operators are replayed in the order in which they run. Every Value is allocated by the operator that makes it and
freed where the step releases it. On a GPU that goes through a model of torch's caching allocator (:class:`Allocator`)
with the pools that the phases of a run use, so that rounding, splitting and segments count as they do there. On a CPU
:func:`process_bytes` adds what the system's allocator holds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from weft.core.machine import Machine
from weft.core.program import MARKER_KEPT, Program
from weft.core.units import show_bytes

# ---- A model of torch's caching allocator on a GPU: bytes allocated and bytes reserved
#
# Requests are rounded to 512 bytes. Those of up to 1 MiB are served from segments of 2 MiB, those of up to 10 MiB from
# segments of 20 MiB, larger ones from a segment of their own, rounded to 2 MiB. A request takes the smallest free block
# that is large enough; the rest of it becomes a free block again, unless it is too small to be worth it. Freed
# neighbours in one segment are joined. Only :meth:`Allocator.trim` returns memory to the device.

UNIT = 512
SMALL = 1 << 20  # largest request of the small pool
SMALL_SEGMENT = 2 << 20
MEDIUM = 10 << 20  # requests from here on have a segment of their own
LARGE_SEGMENT = 20 << 20
SEGMENT_UNIT = 2 << 20


def rounded(size: int) -> int:
    """A request in whole units."""
    return max(UNIT, -(-size // UNIT) * UNIT)


def segment_size(size: int) -> int:
    """Bytes requested from the device for a rounded request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < MEDIUM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_UNIT) * SEGMENT_UNIT


class AllocatorBlock:
    """A piece of a segment, with its neighbours there."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small = address, size, small
        self.free = True
        self.before: AllocatorBlock | None = None
        self.after: AllocatorBlock | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None


class Allocator:
    """One pool of blocks, for allocations on ``stream``; the ``private`` pool of a capture keeps what it has.

    ``idle``: bytes of segments with nothing in them, which are returned to the device when it runs short.
    """

    def __init__(self, stream: int = 0, private: bool = False) -> None:
        self.stream, self.private = stream, private
        self.allocated = self.reserved = self.idle = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), ascending
        self._blocks: dict[int, AllocatorBlock] = {}
        self._end = 0

    def allocate(self, size: int) -> AllocatorBlock | None:
        """A block for ``size`` bytes; None for none, which takes nothing."""
        if size <= 0:
            return None
        size = rounded(size)
        small = size <= SMALL
        free = self._free[small]
        best = bisect_left(free, (size, -1))
        if best < len(free):
            block = self._blocks[free.pop(best)[1]]
            self.idle -= block.size if block.is_segment else 0
        else:
            block = AllocatorBlock(self._end, segment_size(size), small)
            self._blocks[block.address] = block
            self._end += block.size + 1  # segments never touch
            self.reserved += block.size
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def _split(self, block: AllocatorBlock, size: int) -> None:
        """Make what ``block`` has beyond ``size`` a free block, unless it is too small."""
        extra = block.size - size
        if extra < UNIT if block.small else extra <= SMALL:
            return
        rest = AllocatorBlock(block.address + size, extra, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def free(self, block: AllocatorBlock | None) -> None:
        """Free a block, and join it with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        free = self._free[block.small]
        for other in (block.before, block.after):
            if other is not None and other.free:
                del free[bisect_left(free, (other.size, other.address))]
                first, second = (block, other) if block.address < other.address else (other, block)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._blocks[second.address]
                block = first
        insort(free, (block.size, block.address))
        self.idle += block.size if block.is_segment else 0

    def trim(self) -> None:
        """Return segments that are free as a whole to the device: what ``torch.cuda.empty_cache`` does."""
        for free in self._free.values():
            for size, address in [entry for entry in free if self._blocks[entry[1]].is_segment]:
                self.reserved -= size
                self.idle -= size
                free.remove((size, address))
                del self._blocks[address]


# ---- A run in the pools of that allocator: set-up, warm-up, capture
#
# A block belongs to the stream it was allocated on, until the cache is emptied:
#
# * the set-up (``preparation``) fills the pool of the default stream, where what is resident stays;
# * users' modules take a step there before they are trained (``tried``), and so does cuBLAS's workspace of that stream;
# * a captured run then empties the cache: segments with nothing in them are returned to the device;
# * it warms up on the stream that it is captured on, :data:`WARMUPS` times; what the first time builds for good stays
#   in that stream's pool;
# * the cache is emptied again;
# * the capture fills a private pool, which is kept for the replays.
#
# A run that is not captured does everything in one pool. One that cannot be captured has warmed up all the same, and
# then continues in the pool of the default stream, with the other's segments still held.
#
# If an epoch has several steps (``stepped``), those alone are captured: evaluations take memory of the default stream's
# pool, in addition to what the capture keeps. A woven step runs on several streams, each with its own share of a pool.
#
# cuBLAS keeps a workspace for each thread that calls it and each stream it is called on; autograd's thread has one, the
# main thread another. The warm-up leaves them in its stream's pool, and the capture, on the same stream, finds them
# there: none is in the private pool. The default stream has its own if the set-up multiplies. cuBLASLt has one more
# wherever it is called. They stay for as long as the process lives, and streams are the same for every run of a
# process: a later run shares what an earlier one left, so that these estimates, which are for a process of its own, are
# an upper bound for it, unless the earlier one was on streams that the later one does not use (those of a woven step).

WARMUPS = 2  # one to compile and build, one that makes sure that nothing waits for the device
SETUP = "preparation"  # the phase of operators that run before the first step
EVALUATION = "evaluation"
EAGER = 2  # steps after which the allocator has all that it will request
DEFAULT, SIDE = -1, -2  # the streams of a run; the side streams of a woven step are counted from 1
GENERATOR = 2  # numbers on the device, seed and offset, that a captured graph reads torch's generator from
LT_WORKSPACE = 1 << 20  # of cuBLASLt, as torch 2.11 sets it; later versions share cuBLAS's


@dataclass(frozen=True)
class Execution:
    """How a program is run, as far as its memory depends on it.

    ``replay``: the step is to be captured as a CUDA graph; ``recorded``: that will work, else it runs eagerly after the
    attempt; ``stepped``: an epoch has several steps, and evaluations are not captured; ``tried``: steps of users'
    modules before the first epoch; ``alone``: each is called by itself as well, on both streams.
    """

    replay: bool = True
    recorded: bool = True
    stepped: bool = False
    tried: int = 0
    alone: bool = False


def replay_allocations(
    program: Program, preparation: Program | None, workspace: int, execution: Execution
) -> PoolsOfRun:
    """Run it all through the allocator; ``workspace``: bytes that cuBLAS keeps for a thread and stream."""
    run, replay = PoolsOfRun(workspace), execution.replay
    default = run.pool(DEFAULT)
    run.evaluating = default if execution.stepped else None
    side = run.pool(SIDE) if replay else default

    def before() -> None:
        for pool in (default, side) if execution.alone else ():  # they may multiply with cuBLAS where a stack does not
            for engine in (False, True):
                run.keep_workspace(pool, engine, workspace)
        for _ in range(execution.tried):
            run.play(program, default, default)
        for owner, block in run.left:  # by the last step for the next: there is none
            owner.free(block)
        run.left = []
        run.trim()

    if preparation is None:
        for value in program.resident:
            run.allocate(default, program.values[value].bytes)
        if replay:
            before()
    else:
        run.play(preparation, default, side, between=before if replay else None)
    for _ in range((WARMUPS if replay else 1 + EAGER) - (preparation is not None)):
        run.play(program, side, side)
    if replay and execution.recorded:
        run.trim()
        for _ in range(GENERATOR):
            run.allocate(default, 8)
        private = run.pool(SIDE, private=True)
        run.play(program, private, private)
    elif replay:
        for _ in range(EAGER):
            run.play(program, default, default)
    return run


class PoolsOfRun:
    """The pools of one run, and the most bytes of them together: that were allocated, and that the allocator held.

    ``needed``: what the device must have at least, since the allocator returns idle segments before it fails, except
    those of a capture. ``library``: bytes of the workspaces that libraries keep, in all.
    """

    def __init__(self, workspace: int = 0) -> None:
        self._workspace = workspace
        self._pools: list[Allocator] = []
        self._shares: dict[tuple[Allocator, int], Allocator] = {}
        self._called: set[tuple[int, bool, int]] = set()  # streams, threads, workspaces
        self.left: list[tuple[Allocator, AllocatorBlock | None]] = []  # by the last step, for the next to release
        self.allocated = self.reserved = self.needed = self.library = 0
        self.evaluating: Allocator | None = None  # the pool of evaluations; None: that of the step

    def pool(self, stream: int, private: bool = False) -> Allocator:
        """A new one."""
        self._pools.append(Allocator(stream, private))
        return self._pools[-1]

    def trim(self) -> None:
        """Empty the cache."""
        for pool in self._pools:
            pool.trim()

    def play(
        self, program: Program, setup: Allocator, steps: Allocator, between: Callable[[], None] | None = None
    ) -> None:
        """Run the operators, those of the set-up in one pool and the others in another; ``between`` the two."""
        if len(self.left) == len(program.carried):  # what the step before left for this one to release
            held = dict(zip(program.carried, self.left, strict=True))
        else:
            held = {value: (steps, self.allocate(steps, program.values[value].bytes)) for value in program.carried}
        resident, ends, carried_on = set(program.resident), program.ends(), set(program.left)
        for position, op in enumerate(program.operators):
            if op.name == MARKER_KEPT:
                continue
            if between is not None and op.phase != SETUP:
                between()
                between = None
            pool = setup if op.phase == SETUP else steps
            if op.phase == EVALUATION and self.evaluating is not None:
                pool = self.evaluating
            if op.stream != 0:  # a side stream has a part of the pool; the caller's stream has the pool as such
                if (pool, op.stream) not in self._shares:
                    self._shares[pool, op.stream] = self.pool(op.stream, pool.private)
                pool = self._shares[pool, op.stream]
            for value in (*op.writes, *op.reads):
                if value not in held and value not in resident:
                    held[value] = pool, self.allocate(pool, program.values[value].bytes)
            if op.library:  # called once there is room for the result
                self.keep_workspace(pool, op.engine, self._workspace)
            if op.lt:
                self.keep_workspace(pool, op.engine, LT_WORKSPACE)
            inside = [self.allocate(pool, size) for size in op.pieces or (op.workspace,)]
            for block in inside:
                pool.free(block)
            for value in ends.get(position, ()):
                if value not in carried_on:
                    owner, dead = held.get(value, (pool, None))
                    owner.free(dead)
        self.left = [held[value] for value in program.left if value in held]

    def keep_workspace(self, pool: Allocator, engine: bool, size: int) -> None:
        """Allocate the workspace of a library for good, once per stream and thread (autograd's is ``engine``)."""
        key = (pool.stream, engine, size)
        if self._workspace and key not in self._called:
            self._called.add(key)
            self.allocate(pool, size)
            self.library += size

    def allocate(self, pool: Allocator, size: int) -> AllocatorBlock | None:
        """Allocate a block, and update the most that there has been."""
        block = pool.allocate(size)
        if block is None:
            return None
        allocated = reserved = needed = 0
        for each in self._pools:
            allocated += each.allocated
            reserved += each.reserved
            needed += each.reserved - (0 if each.private else each.idle)
        self.allocated, self.reserved = max(self.allocated, allocated), max(self.reserved, reserved)
        self.needed = max(self.needed, needed)
        return block


# ---- The estimate

SHOWN = 4  # of the largest Values at the peak
MIN_SAVING = 0.05  # advice that saves less than this share of the peak is not given
SAFETY_FACTOR = 1.05  # an estimate times this is an upper bound


def upper_bound(estimate: int) -> int:
    """Bytes that a run stays below, of which ``estimate`` is the likely figure."""
    return int(estimate * SAFETY_FACTOR)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one group of tasks.

    ``peak``: the most that tensors and library workspaces take at once, as the allocator counts them; ``reserved``:
    the most it holds at any time of the run, if memory is not short; ``needed``: what it cannot do without;
    ``context``: what CUDA itself takes. ``kinds``: the step's peak by kind of Value, with ``"workspace"`` for what
    operators and libraries need inside, ``"rounding"`` for what the allocator adds, and ``"setup"`` for what the set-up
    takes beyond the step. ``training``: the most that tensors take in a step without its evaluation.
    ``timeline``: live bytes at every operator by kind; ``phases`` says which phase each belongs to.
    """

    peak: int
    reserved: int
    needed: int = 0
    context: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    timeline: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    training: int = 0

    @property
    def safe(self) -> int:
        """What the device must have free: the bytes that are needed, with a margin, and the context."""
        return upper_bound(self.needed) + self.context


def memory(
    program: Program, machine: Machine, preparation: Program | None = None, execution: Execution | None = None
) -> MemoryEstimate:
    """The memory that a run of ``program`` takes on ``machine``; ``preparation``: what runs once before, if known."""
    timeline = timeline_of(program)
    alive = [sum(sizes) for sizes in zip(*timeline.values(), strict=True)]
    position = max(range(len(alive)), key=alive.__getitem__, default=0)
    kinds = {kind: sizes[position] for kind, sizes in timeline.items() if alive and sizes[position]}
    before = max(live_bytes(preparation), default=0) if preparation is not None else 0
    if machine.device == "cuda":
        held = replay_allocations(program, preparation, machine.workspace_bytes, execution or Execution())
    else:  # allocated exactly as requested
        held, most = PoolsOfRun(), max(*alive, before) if alive else max(program.resident_bytes, before)
        held.allocated = held.reserved = held.needed = most
    # What the kinds lack to make up the peak: the set-up, as far as it takes more than the step, libraries, rounding.
    lacking = held.allocated - sum(kinds.values())
    setup = min(max(before - max(alive, default=0), 0), lacking)
    library = min(held.library, lacking - setup)
    kinds["workspace"] = kinds.get("workspace", 0) + library
    kinds |= {"setup": setup, "rounding": lacking - setup - library}
    training = [size for op, size in zip(program.operators, alive, strict=True) if op.phase != EVALUATION]
    return MemoryEstimate(
        peak=held.allocated,
        reserved=held.reserved,
        needed=held.needed,
        context=machine.context_bytes,
        kinds={kind: size for kind, size in kinds.items() if size},
        timeline=timeline,
        phases=tuple(op.phase for op in program.operators),
        alive=largest(program, position),
        advice=advice(program, kinds, held.allocated, machine.has_bf16),
        training=max(training, default=program.resident_bytes) + held.library,
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
    timeline = {kind: tuple(accumulate(changes[:-1])) for kind, changes in change.items()}
    return timeline | {"workspace": tuple(op.workspace for op in program.operators)}


def live_bytes(program: Program) -> list[int]:
    """Bytes alive while each operator runs, its workspace included: sums without an allocator."""
    return [sum(sizes) for sizes in zip(*timeline_of(program).values(), strict=True)]


def largest(program: Program, position: int) -> tuple[str, ...]:
    """The largest Values that are alive at an operator in words, each with the operator that made it in the step."""
    lives, words = program.lifetimes(), []
    alive = [number for number, (first, last) in lives.items() if first <= position <= last]
    for number in sorted((*program.resident, *alive), key=lambda number: -program.values[number].bytes)[:SHOWN]:
        value = program.values[number]
        shape = " x ".join(f"{size:,}" for size in value.shape) or "one number"
        origin = f" of {program.operators[lives[number][0]].name}" if number in lives else ""
        if value.bytes:
            words.append(f"{show_bytes(value.bytes)} {value.kind}{origin} ({shape} {value.dtype})")
    return tuple(words)


def advice(program: Program, kinds: Mapping[str, int], peak: int, bf16: bool = True) -> tuple[str, ...]:
    """What would lower the peak, the largest saving first; only what is worth doing.

    ``bf16``: whether the machine has units for it; emulated, it would cost more time than the memory is worth.
    """
    step = sum(kinds.get(kind, 0) for kind in ("activation", "gradient", "temporary"))
    passed_on = [value for value in program.values if value.kind in ("activation", "gradient")]
    single = sum(value.bytes for value in passed_on if value.dtype == "float32")
    share = single / max(sum(value.bytes for value in passed_on), 1)
    halved = int(share * (kinds.get("activation", 0) + kinds.get("gradient", 0)) / 2)
    options = [
        (halved if bf16 else 0, 'precision="bf16" halves what layers pass on'),
        (kinds.get("activation", 0), "narrower layers save up to"),
        (kinds.get("input", 0) // 2 if bf16 else 0, "features in half precision save"),
    ]
    if program.tasks > 1:
        options.append((step // 2, f"{program.tasks // 2} instead of {program.tasks} tasks in a group save"))
    options.sort(key=lambda option: -option[0])
    return tuple(f"{words}: {show_bytes(saved)}" for saved, words in options if saved >= MIN_SAVING * max(peak, 1))


# ---- What a process on a CPU takes: tensors, and what the system's allocator holds for them
#
# glibc maps blocks above 32 MiB and unmaps them when they are freed. Smaller ones come from a heap, which a run keeps
# (:func:`weft.engine.memory.keep_heap`) at its largest, in addition to what is mapped later, and which grows with
# holes, since a freed block does not serve an aligned request of the same size (glibc before 2.38): over 20 trainings
# (`benchmarks/suites/on_cpu/memory.py`) a heap took two to four times what was alive in it, and a process some 20 MiB
# for threads, buffers and code that is loaded on the way. To map every block would cost as much time again: pages that
# the system provides are cleared first.

MIB = 1 << 20
# Bytes of a block from which on, and up to which, the process takes so many bytes per byte alive: the heap, and beyond.
KINDS = ((0, 16 * MIB, 2.1), (16 * MIB, 32 * MIB, 3.4), (32 * MIB, inf, 1.0))
HEAP = 2  # of the kinds; the rest is mapped
PROCESS_BYTES = 24 * MIB  # of threads, buffers and code
ATTENTION = "graph_attention_packed"  # the CPU kernels' own arrays: rows taken apart, a coefficient per edge and head
ROW_COPIES, HEADS = 2, 8


def process_bytes(program: Program, preparation: Program | None = None) -> int:
    """Most bytes that a run of ``program`` adds to the process that runs it."""
    return PROCESS_BYTES + max(_most_in_process(part) for part in (program, preparation) if part is not None)


def _most_in_process(program: Program) -> int:
    alive = []  # bytes at every operator that the step allocates, by size of the blocks
    for least, most, times in KINDS:
        change = [0] * (len(program.operators) + 1)
        for number, (first, last) in program.lifetimes().items():
            size = program.values[number].bytes
            if least <= size < most:
                change[first] += size
                change[last + 1] -= size
        alive.append([times * size for size in accumulate(change[:-1])])
    inside = []
    for op in program.operators:
        arrays = 0
        if ATTENTION in op.name:
            read = [program.values[number] for number in op.reads]
            rows = max((value.bytes for value in read if value.dtype.startswith("float")), default=0)
            edges = max((value.bytes for value in read if value.dtype == "int32"), default=0)
            arrays = ROW_COPIES * rows + HEADS * edges
        inside.append(op.workspace + arrays)
    heap = max(map(sum, zip(*alive[:HEAP], strict=True)), default=0)
    mapped = max(map(sum, zip(inside, *alive[HEAP:], strict=True)), default=0)
    return program.resident_bytes + int(heap + mapped)
