"""Predict what a process on a CPU takes beyond itself: tensors, and what the system's allocator holds for them.

glibc maps blocks above 32 MiB and gives them back when they are freed. Smaller ones come from a heap that grows with
holes: over 14 trainings (gcn, sage, gin, gat, gatv2; 1 to 8 tasks; cora, pubmed, facebook and arxiv) a heap took about
twice what was alive in it, and a process some 30 MiB for threads, buffers and code that is loaded on the way.
"""

from __future__ import annotations

from weft.core.program import Operator, Program

MAPPED = 32 << 20  # bytes from which on a block is mapped by itself: the most that glibc's threshold grows to
HEAP = 2.1  # bytes of the heap per byte alive in it
BESIDE = 32 << 20
ATTENTION = "graph_attention_packed"  # the CPU kernels' own arrays: rows taken apart, a coefficient per edge and head
ROW_COPIES, HEADS = 2, 8


def process_bytes(program: Program, preparation: Program | None = None) -> int:
    """Most bytes that a run of ``program`` adds to the process that runs it."""
    parts = [program] + ([preparation] if preparation is not None else [])
    return BESIDE + max(_most(part) for part in parts)


def _most(program: Program) -> int:
    heap, mapped = (_running(program, large) for large in (False, True))
    resident = program.resident_bytes
    inside = [op.workspace + _inside(op, program) for op in program.operators]
    found = [resident + m + int(HEAP * h) + i for h, m, i in zip(heap, mapped, inside, strict=True)]
    return max(found, default=resident)


def _running(program: Program, large: bool) -> list[int]:
    """Bytes alive at every operator that the step allocates, in blocks of one kind."""
    change = [0] * (len(program.operators) + 1)
    for number, (first, last) in program.lifetimes().items():
        size = program.values[number].bytes
        if (size >= MAPPED) == large:
            change[first] += size
            change[last + 1] -= size
    total, found = 0, []
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _inside(op: Operator, program: Program) -> int:
    if ATTENTION not in op.name:
        return 0
    read = [program.values[number] for number in op.reads]
    rows = max((value.bytes for value in read if value.dtype.startswith("float")), default=0)
    edges = max((value.bytes for value in read if value.dtype == "int32"), default=0)
    return ROW_COPIES * rows + HEADS * edges
