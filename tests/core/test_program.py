"""Program: plain data in and out, and the small questions one asks of it."""

from __future__ import annotations

import json

from weft.core.program import Operator, Program, Value


def small() -> Program:
    """``c = a @ b; d = relu(c); a += d`` with a and b resident."""
    values = (
        Value(400, "weight", (10, 10)),
        Value(400, "input", (10, 10)),
        Value(400, "activation", (10, 10)),
        Value(400, "temporary", (10, 10)),
    )
    operators = (
        Operator("aten.mm", "forward", (0, 1), (2,), flops=2000.0, stream_bytes=1200.0, launches=1, workspace=64),
        Operator("aten.relu", "forward", (2,), (3,), flops=100.0, stream_bytes=800.0, launches=1),
        Operator("aten.add_", "update", (0, 3), (0,), flops=100.0, stream_bytes=1200.0, launches=1),
    )
    return Program(values, operators, (0, 1), unknown=("my.op",), tasks=2, note="by hand")


def test_it_survives_json():
    program = small()
    assert Program.from_dict(json.loads(json.dumps(program.to_dict()))) == program


def test_bytes_by_kind_of_all_and_of_some():
    program = small()
    assert program.bytes_by_kind() == {"weight": 400, "input": 400, "activation": 400, "temporary": 400}
    assert program.bytes_by_kind(program.resident) == {"weight": 400, "input": 400}
    assert program.resident_bytes == 800


def test_totals_and_phases():
    program = small()
    assert program.flops == 2200.0
    assert program.launches == 3
    assert [op.name for op in program.phase("update")] == ["aten.add_"]


def test_lifetimes_leave_the_resident_out():
    assert small().lifetimes() == {2: (0, 1), 3: (1, 2)}
