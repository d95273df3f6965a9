"""Program: plain data in and out, and the small questions one asks of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.core.program import FAMILIES, Operator, Program, Value, family_of


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


def test_families_of_operators_of_an_older_file_are_found_at_reading():
    data = json.loads(json.dumps(small().to_dict()))
    assert [op.pop("family") for op in data["operators"]] == ["matmul", "pointwise", "pointwise"]
    assert Program.from_dict(data) == small()


def test_whether_a_step_can_be_recorded_is_a_field():
    noted = small()  # has a note, and can be recorded all the same
    assert noted.recordable
    waits = replace(noted, note="", recordable=False)
    assert not Program.from_dict(json.loads(json.dumps(waits.to_dict()))).recordable


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("aten.mm", "matmul"),
        ("aten.addmm", "matmul"),
        ("weft.linear_backward", "matmul"),
        ("weft.spmm_max_backward", "spmm"),
        ("weft.graph_attention_packed", "attention"),
        ("weft.edge_softmax", "attention"),
        ("aten.index", "gather"),
        ("aten.embedding_dense_backward", "gather"),
        ("aten.index_add_", "scatter"),
        ("aten.scatter_add", "scatter"),
        ("aten.native_layer_norm", "reduction"),
        ("aten._log_softmax", "reduction"),
        ("weft.column_sum", "reduction"),
        ("aten.empty_like", "allocation"),
        ("aten.zeros_like", "pointwise"),
        ("triton.relu", "pointwise"),
    ],
)
def test_family_by_name(name, family):
    assert family_of(name) == Operator(name, "forward", (), (), flops=1.0).family == family
    assert family in FAMILIES


def test_family_by_what_an_operator_does():
    assert family_of("aten.linear", computes=False) == "pointwise"  # a view of one
    assert family_of("aten.nll_loss", gathers=True) == "gather"
    assert family_of("weft.cross_entropy_rows", gathers=True) == "spmm"
    given = Operator("weft.mine", "forward", (), (), family="attention")
    assert given.family == replace(given, flops=2.0).family == "attention"


def test_bytes_by_kind_of_all_and_of_some():
    program = small()
    assert program.bytes_by_kind() == {"weight": 400, "input": 400, "activation": 400, "temporary": 400}
    assert program.bytes_by_kind(program.resident) == {"weight": 400, "input": 400}
    assert program.resident_bytes == 800


def test_lifetimes_leave_the_resident_out():
    assert small().lifetimes() == {2: (0, 1), 3: (1, 2)}
