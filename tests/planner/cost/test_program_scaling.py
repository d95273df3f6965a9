"""Larger stacks from small ones: what is shared stays once, what is not grows with the tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.programs import ARXIV, gcn_step
from weft.core.program import Operator, Program, Value
from weft.planner.cost.memory import memory
from weft.planner.cost.program_scaling import SHARED, one_after_another, stacked
from weft.planner.cost.roofline import seconds
from weft.planner.machine_profiles import profile

H200 = profile("h200")


def test_shared_values_stay_and_the_others_grow():
    one, eight = gcn_step(), stacked(gcn_step(), 8)
    assert eight.tasks == 8
    for before, after in zip(one.values, eight.values, strict=True):
        assert after.bytes == before.bytes * (1 if before.kind in SHARED else 8)


@pytest.mark.parametrize("kind", ["graph", "input", "constant"])
def test_what_all_members_read_is_there_once(kind):
    """A table of constants, and an operator that works on it alone, do not grow with the stack."""
    one = gcn_step()
    values = (replace(one.values[0], kind=kind, bytes=1000), replace(one.values[0], kind=kind, bytes=24))
    alone = replace(one.operators[0], reads=(0,), writes=(1,), flops=7.0, stream_bytes=5.0)
    program = replace(one, values=values, operators=(alone,), resident=(0,), carried=(), left=())
    eight = stacked(program, 8)
    assert [value.bytes for value in eight.values] == [1000, 24]
    assert eight.operators == program.operators


def test_work_grows_and_launches_do_not():
    one, eight = gcn_step().operators, stacked(gcn_step(), 8).operators
    assert sum(op.flops for op in eight) == pytest.approx(8 * sum(op.flops for op in one))
    assert sum(op.launches for op in eight) == sum(op.launches for op in one)


def test_stacks_of_stacks_and_back():
    assert stacked(stacked(gcn_step(), 4), 1) == gcn_step()
    assert stacked(stacked(gcn_step(), 2), 7).values == stacked(gcn_step(), 7).values


def test_a_stack_takes_less_than_its_members_apart():
    one, eight = (seconds(stacked(gcn_step(), T), H200, stats=ARXIV).epoch_seconds for T in (1, 8))
    assert eight < 8 * one
    assert memory(stacked(gcn_step(), 8), H200).peak < 8 * memory(gcn_step(), H200).peak


def test_stacks_one_after_another_share_the_graph_and_reuse_the_rest():
    small, large = gcn_step(hidden=16), gcn_step(hidden=128)
    both = one_after_another([small, large])
    graph = [value for value in both.values if value.kind in SHARED]
    assert [value.bytes for value in graph] == [value.bytes for value in large.values if value.kind in SHARED]
    assert len(both.operators) == len(small.operators) + len(large.operators)
    assert both.tasks == 2
    flops = [sum(op.flops for op in program.operators) for program in (both, small, large)]
    assert flops[0] == flops[1] + flops[2]
    alone = memory(large, H200).peak
    assert alone < memory(both, H200).peak < alone + memory(small, H200).peak - graph[1].bytes


def test_one_alone_is_itself():
    assert one_after_another([gcn_step()]) == gcn_step()


def test_members_of_a_stack_share_their_batches():
    values = tuple(Value(100, kind) for kind in ("batch", "queue", "sampling", "activation"))
    op = Operator("weft.spmm", "forward", (0,), (3,), gather_bytes=10.0)
    eight = stacked(Program(values, (op,), (0, 1, 2)), 8)
    assert [value.bytes for value in eight.values] == [100, 100, 100, 800]
