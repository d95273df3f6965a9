"""Replay a run through a model of torch's caching allocator: set-up, warm-up, capture, each in the pool it uses.

A block belongs to the stream it was allocated on, until the cache is emptied:

* the set-up (``preparation``) fills the pool of the default stream, where what is resident stays;
* users' modules take a step there before they are trained (``tried``), and so does cuBLAS's workspace of that stream;
* a captured run then empties the cache: segments with nothing in them go back to the device;
* it warms up on the stream that it is captured on, :data:`WARMUPS` times; what the first time builds for good stays in
  that stream's pool;
* the cache is emptied again;
* the capture fills a private pool, which is kept for the replays.

A run that is not captured does everything in one pool. One that turns out to be impossible to capture has warmed
up like the others, and then goes on in the pool of the default stream, with the other's segments still held.

Where an epoch has several steps (``stepped``), those alone are captured: evaluations take memory of the default
stream's pool, beside what the capture keeps.

A woven step runs on several streams, each with a share of the pool to itself.

cuBLAS keeps a workspace for each thread that calls it and each stream it is called on; autograd's thread has one beside
the main thread's. The warm-up leaves them in its stream's pool, and the capture, on the same stream, finds them
there: none is in the private pool. The default stream has its own where the set-up multiplies. cuBLASLt has one more
wherever it is called. They stay for as long as the process lives, and streams are the same for every run of a process:
a later run shares what an earlier one left, so that these estimates, which are for a process of its own, are an upper
bound for it, unless the earlier one was on streams that the later one does not use (those of a woven step).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.core.program import MARKER_KEPT, Operator, Program
from weft.planner.cost.caching_allocator import Allocator, Block

WARMUPS = 2  # one to compile and build, one that makes sure that nothing waits for the device
SETUP = "preparation"  # the phase of operators that run before the first step
EVALUATION = "evaluation"
EAGER = 2  # steps after which the allocator has all that it will request
DEFAULT, SIDE = -1, -2  # the streams of a run; those beside it, of a woven step, are counted from 1
GENERATOR = 2  # numbers on the device, seed and offset, that a captured graph reads torch's generator from
LT_WORKSPACE = 1 << 20  # of cuBLASLt, as torch 2.11 sets it; later versions share cuBLAS's


@dataclass(frozen=True)
class PeakBytes:
    """Most bytes at any time of a run: that were allocated, and that the allocator held.

    ``needed``: what the device must have at least, since the allocator gives back idle segments before it gives up,
    except those of a capture.
    ``library``: bytes of the workspaces that libraries keep, all in all.
    """

    allocated: int
    reserved: int
    needed: int
    library: int = 0


def replay_allocations(
    program: Program,
    preparation: Program | None,
    replay: bool,
    workspace: int,
    recorded: bool = True,
    stepped: bool = False,
    tried: int = 0,
    alone: bool = False,
) -> PeakBytes:
    """Run it all through the allocator; ``workspace``: bytes that cuBLAS keeps for a thread and stream.

    ``replay``: the run is to be captured; ``recorded``: that will work; ``stepped``: without its evaluations;
    ``tried``: steps taken on the default stream before; ``alone``: members by themselves take some on both streams.
    """
    run = _Run(workspace)
    default = run.pool(DEFAULT)
    run.evaluating = default if stepped else None
    side = run.pool(SIDE) if replay else default

    def before() -> None:
        for pool in (default, side) if alone else ():  # they may multiply with cuBLAS where a stack does not
            run.keep_workspaces(pool)
        for _ in range(tried):
            run.play(program, default, default)
        run.let_go()
        run.trim()

    if preparation is None:
        run.keep(program, default)
        if replay:
            before()
    else:
        run.play(preparation, default, side, between=before if replay else None)
    for _ in range((WARMUPS if replay else 1 + EAGER) - (preparation is not None)):
        run.play(program, side, side)
    if replay and recorded:
        run.trim()
        for _ in range(GENERATOR):
            run.allocate(default, 8)
        private = run.pool(SIDE, private=True)
        run.play(program, private, private)
    elif replay:
        for _ in range(EAGER):
            run.play(program, default, default)
    return PeakBytes(run.allocated, run.reserved, run.needed, run.library)


class _Run:
    """The pools of one run, and the most of them together."""

    def __init__(self, workspace: int) -> None:
        self._workspace = workspace
        self._pools: list[Allocator] = []
        self._streams: list[int] = []  # of the pools
        self._private: list[bool] = []
        self._shares: dict[tuple[int, int], Allocator] = {}
        self._called: set[tuple[int, bool, int]] = set()  # streams, threads, workspaces
        self._left: list[tuple[Allocator, Block | None]] = []  # by the last step, for the next to let go
        self.allocated = self.reserved = self.needed = self.library = 0
        self.evaluating: Allocator | None = None  # the pool of evaluations; None: that of the step

    def pool(self, stream: int, private: bool = False) -> Allocator:
        """A new one, for allocations on ``stream``; a capture's own pool keeps what it has."""
        self._pools.append(Allocator())
        self._streams.append(stream)
        self._private.append(private)
        return self._pools[-1]

    def trim(self) -> None:
        """Empty the cache."""
        for pool in self._pools:
            pool.trim()

    def keep(self, program: Program, pool: Allocator) -> None:
        """Allocate what is resident."""
        for value in program.resident:
            self.allocate(pool, program.values[value].bytes)

    def play(
        self, program: Program, setup: Allocator, steps: Allocator, between: Callable[[], None] | None = None
    ) -> None:
        """Run the operators, those of the set-up in one pool and the others in another; ``between`` the two."""
        held = self._carried(program, steps)
        resident, ends, left = set(program.resident), program.ends(), set(program.left)
        for position, op in enumerate(program.operators):
            if op.name == MARKER_KEPT:
                continue
            if between is not None and op.phase != SETUP:
                between()
                between = None
            pool = self._share(setup if op.phase == SETUP else self._of(op, steps), op.stream)
            for value in (*op.writes, *op.reads):
                if value not in held and value not in resident:
                    held[value] = pool, self.allocate(pool, program.values[value].bytes)
            self._call(pool, op)  # the library is asked once there is room for the result
            inside = [self.allocate(pool, size) for size in op.pieces or (op.workspace,)]
            for block in inside:
                pool.free(block)
            for value in ends.get(position, ()):
                if value not in left:
                    owner, gone = held.get(value, (pool, None))
                    owner.free(gone)
        self._left = [held[value] for value in program.left if value in held]

    def let_go(self) -> None:
        """What the last step left for the next is not needed: there is none."""
        for owner, block in self._left:
            owner.free(block)
        self._left = []

    def _of(self, op: Operator, steps: Allocator) -> Allocator:
        return self.evaluating if self.evaluating is not None and op.phase == EVALUATION else steps

    def _carried(self, program: Program, pool: Allocator) -> dict[int, tuple[Allocator, Block | None]]:
        """What the step finds and lets go: as the one before left it, or else in ``pool``."""
        if len(self._left) == len(program.carried):
            return dict(zip(program.carried, self._left, strict=True))
        return {value: (pool, self.allocate(pool, program.values[value].bytes)) for value in program.carried}

    def _share(self, pool: Allocator, stream: int) -> Allocator:
        """The part of ``pool`` that a stream has to itself; the caller's stream, 0, has the pool as such."""
        if stream == 0:
            return pool
        key = (self._pools.index(pool), stream)
        if key not in self._shares:
            self._shares[key] = self.pool(stream, self._private[key[0]])
        return self._shares[key]

    def _call(self, pool: Allocator, op: Operator) -> None:
        where = self._streams[self._pools.index(pool)]
        sizes = ([self._workspace] if op.library else []) + ([LT_WORKSPACE] if op.lt else [])
        for size in sizes if self._workspace else ():
            self._keep(pool, (where, op.engine, size))

    def keep_workspaces(self, pool: Allocator) -> None:
        """Those of cuBLAS, for the main thread and autograd's."""
        where = self._streams[self._pools.index(pool)]
        for engine in (False, True) if self._workspace else ():
            self._keep(pool, (where, engine, self._workspace))

    def _keep(self, pool: Allocator, key: tuple[int, bool, int]) -> None:
        if key not in self._called:
            self._called.add(key)
            self.allocate(pool, key[-1])
            self.library += key[-1]

    def allocate(self, pool: Allocator, size: int) -> Block | None:
        """Ask for a block, and note the most that there has been."""
        block = pool.allocate(size)
        self.allocated = max(self.allocated, sum(one.allocated for one in self._pools))
        self.reserved = max(self.reserved, sum(one.reserved for one in self._pools))
        idle = sum(one.idle for one, private in zip(self._pools, self._private, strict=True) if not private)
        self.needed = max(self.needed, sum(one.reserved for one in self._pools) - idle)
        return block
