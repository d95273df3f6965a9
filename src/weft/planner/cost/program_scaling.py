"""Extrapolate Programs of several tasks from those of few: larger stacks, and stacks in turn.

A stack of T tasks has the operators of a stack of two on tensors with a leading T instead: the same kernels, T / 2
times the bytes and the arithmetic, and the graph, the features and whatever else is shared once. A captured step of T
tasks says the same, and takes longer to get. (A single task does not show it: what two tasks share may have to
be written out for each of them.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from weft.core.program import Operator, Program, Value

SHARED = ("graph", "input", "constant")
SHARED_BY_STACK = (*SHARED, "batch", "queue", "sampling")  # members of a stack train on the same batches


def stacked(program: Program, tasks: int) -> Program:
    """The step of ``tasks`` tasks like those of ``program``, which may itself be a stack of some."""
    if tasks == program.tasks:
        return program
    times = Fraction(tasks, program.tasks)

    def scaled(size: int) -> int:
        return -(-size * times.numerator // times.denominator)

    values = tuple(
        value if value.kind in SHARED_BY_STACK else replace(value, bytes=scaled(value.bytes))
        for value in program.values
    )
    operators = []
    for op in program.operators:
        touched = (*op.reads, *op.writes)
        if not touched or any(program.values[i].kind not in SHARED_BY_STACK for i in touched):
            op = replace(
                op,
                flops=op.flops * float(times),
                stream_bytes=op.stream_bytes * float(times),
                gather_bytes=op.gather_bytes * float(times),
                workspace=scaled(op.workspace),
                pieces=tuple(scaled(size) for size in op.pieces),
            )
        operators.append(op)  # one that touches shared values alone, work done once, stays as it is
    return replace(program, values=values, operators=tuple(operators), tasks=tasks)


def one_after_another(programs: Sequence[Program]) -> Program:
    """The step of several stacks on one graph: shared things once, the operators of each in turn."""
    if len(programs) == 1:
        return programs[0]
    values: list[Value] = []
    operators: list[Operator] = []
    resident: list[int] = []
    carried: list[int] = []
    left_over: list[int] = []
    shared: dict[tuple[object, ...], int] = {}
    for program in programs:
        # The n-th shared value of a kind and shape is the n-th of every program.
        counts: Counter[tuple[object, ...]] = Counter()
        ids: dict[int, int] = {}
        for number, value in enumerate(program.values):
            key: tuple[object, ...] | None = None
            if number in program.resident and value.kind in SHARED:
                look = (value.kind, value.shape, value.dtype, value.bytes)
                counts[look] += 1
                key = (*look, counts[look])
            if key is not None and key in shared:
                ids[number] = shared[key]
                continue
            ids[number] = len(values)
            values.append(value)
            if key is not None:
                shared[key] = ids[number]
        resident += [ids[i] for i in program.resident if ids[i] not in resident]
        carried += [ids[i] for i in program.carried]
        left_over += [ids[i] for i in program.left]
        for op in program.operators:
            reads, writes, frees = (tuple(ids[i] for i in part) for part in (op.reads, op.writes, op.frees))
            operators.append(replace(op, reads=reads, writes=writes, frees=frees))
    return Program(
        values=tuple(values),
        operators=tuple(operators),
        resident=tuple(resident),
        unknown=tuple(dict.fromkeys(name for program in programs for name in program.unknown)),
        tasks=sum(program.tasks for program in programs),
        note="; ".join(dict.fromkeys(program.note for program in programs if program.note)),
        carried=tuple(carried),
        left=tuple(left_over),
        recordable=all(program.recordable for program in programs),
    )
