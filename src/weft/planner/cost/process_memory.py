"""Predict what a process on a CPU takes beyond itself: tensors, and what the system's allocator holds for them.

glibc maps blocks above 32 MiB and gives them back when they are freed. Smaller ones come from a heap, which a run keeps
(:func:`weft.engine.base.process_memory.keep_heap`) at its largest, beside what is mapped later, and which grows with
holes, since a freed block does not serve an aligned request of the same size (glibc before 2.38): over 20 trainings
(`benchmarks/suites/on_cpu/memory.py`) a heap took two to four times what was alive in it, and a process some 20 MiB
for threads, buffers and code that is loaded on the way. To map every block would cost as much time again: pages that
the system gives are cleared first.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf

from weft.core.program import Operator, Program

MIB = 1 << 20
# Bytes of a block from which on, and up to which, the process takes so many bytes per byte alive: the heap, and beyond.
KINDS = ((0, 16 * MIB, 2.1), (16 * MIB, 32 * MIB, 3.4), (32 * MIB, inf, 1.0))
HEAP = 2  # of the kinds; the others are mapped
BESIDE = 24 * MIB
ATTENTION = "graph_attention_packed"  # the CPU kernels' own arrays: rows taken apart, a coefficient per edge and head
ROW_COPIES, HEADS = 2, 8


def process_bytes(program: Program, preparation: Program | None = None) -> int:
    """Most bytes that a run of ``program`` adds to the process that runs it."""
    parts = [program] + ([preparation] if preparation is not None else [])
    return BESIDE + max(_most(part) for part in parts)


def _most(program: Program) -> int:
    alive = [[times * part for part in _running(program, least, most)] for least, most, times in KINDS]
    inside = [op.workspace + _inside(op, program) for op in program.operators]
    heap = max(map(sum, zip(*alive[:HEAP], strict=True)), default=0)
    mapped = max(map(sum, zip(inside, *alive[HEAP:], strict=True)), default=0)
    return program.resident_bytes + int(heap + mapped)


def _running(program: Program, least: float, most: float) -> list[int]:
    """Bytes alive at every operator that the step allocates, in blocks of ``least`` to ``most`` bytes."""
    change = [0] * (len(program.operators) + 1)
    for number, (first, last) in program.lifetimes().items():
        size = program.values[number].bytes
        if least <= size < most:
            change[first] += size
            change[last + 1] -= size
    return list(accumulate(change[:-1]))


def _inside(op: Operator, program: Program) -> int:
    if ATTENTION not in op.name:
        return 0
    read = [program.values[number] for number in op.reads]
    rows = max((value.bytes for value in read if value.dtype.startswith("float")), default=0)
    edges = max((value.bytes for value in read if value.dtype == "int32"), default=0)
    return ROW_COPIES * rows + HEADS * edges
