"""Extrapolate Programs of several tasks from those of few: larger stacks, and stacks in turn.

A stack of T tasks has the operators of a stack of two on tensors with a leading T instead: the same kernels, T / 2
times the bytes and the arithmetic, and the graph, the features and whatever else is shared once. A captured step of T
tasks says the same, and takes longer to get. (A single task does not show it: what two tasks share may have to
be written out for each of them.)
"""

from __future__ import annotations

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
    values = tuple(value if value.kind in SHARED_BY_STACK else _scaled(value, times) for value in program.values)
    operators = tuple(_many(op, program, times) for op in program.operators)
    return replace(program, values=values, operators=operators, tasks=tasks)


def _scaled(value: Value, times: Fraction) -> Value:
    return replace(value, bytes=_size(value.bytes, times))


def _size(size: int, times: Fraction) -> int:
    return -(-size * times.numerator // times.denominator)


def _many(op: Operator, program: Program, times: Fraction) -> Operator:
    """The operator for more tasks; one that touches shared things alone (work done once) stays as it is."""
    touched = (*op.reads, *op.writes)
    if touched and all(program.values[i].kind in SHARED_BY_STACK for i in touched):
        return op
    return replace(
        op,
        flops=op.flops * float(times),
        stream_bytes=op.stream_bytes * float(times),
        gather_bytes=op.gather_bytes * float(times),
        workspace=_size(op.workspace, times),
        pieces=tuple(_size(size, times) for size in op.pieces),
    )


def one_after_another(programs: Sequence[Program]) -> Program:
    """The step of several stacks on one graph: shared things once, the operators of each in turn."""
    if len(programs) == 1:
        return programs[0]
    values: list[Value] = []
    operators: list[Operator] = []
    resident: list[int] = []
    carried: list[int] = []
    left: list[int] = []
    shared: dict[tuple[object, ...], int] = {}
    for program in programs:
        met: dict[tuple[object, ...], int] = {}
        ids: dict[int, int] = {}
        for position, value in enumerate(program.values):
            ids[position] = _place(value, position in program.resident, values, shared, met)
        resident += [ids[i] for i in program.resident if ids[i] not in resident]
        carried += [ids[i] for i in program.carried]
        left += [ids[i] for i in program.left]
        operators += [_renumbered(op, ids) for op in program.operators]
    unknown = tuple(dict.fromkeys(name for program in programs for name in program.unknown))
    note = "; ".join(dict.fromkeys(program.note for program in programs if program.note))
    tasks = sum(program.tasks for program in programs)
    recordable = all(program.recordable for program in programs)
    kept = tuple(resident), unknown, tasks, note, tuple(carried), tuple(left), recordable
    return Program(tuple(values), tuple(operators), *kept)


def _place(
    value: Value,
    stays: bool,
    values: list[Value],
    shared: dict[tuple[object, ...], int],
    met: dict[tuple[object, ...], int],
) -> int:
    """Where ``value`` is among ``values``: the n-th shared thing of a kind and shape is the n-th of every program."""
    if not (stays and value.kind in SHARED):
        values.append(value)
        return len(values) - 1
    look = (value.kind, value.shape, value.dtype, value.bytes)
    met[look] = met.get(look, 0) + 1
    key = (*look, met[look])
    if key not in shared:
        values.append(value)
        shared[key] = len(values) - 1
    return shared[key]


def _renumbered(op: Operator, ids: dict[int, int]) -> Operator:
    reads, writes, frees = (tuple(ids[i] for i in part) for part in (op.reads, op.writes, op.frees))
    return replace(op, reads=reads, writes=writes, frees=frees)
