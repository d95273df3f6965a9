"""Memory of a Program: liveness against brute force, the breakdown, the peak, and the advice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.machine import Device, Host, Machine
from weft.core.program import MARKER_KEPT, Operator, Program, Value
from weft.planner.cost.memory import Execution, live_bytes, upper_bound
from weft.planner.cost.memory import memory as memory_of

MIB = 2**20
NUMBERS = 2 * 512  # blocks that a recording reads torch's generator from
RATES = {"fp32": 1e12, "tf32": 1e12, "bf16": 2e12}


def memory(program, machine, preparation=None, **how):
    """The estimate for one way of running a program."""
    return memory_of(program, machine, preparation, Execution(**how))


def machine(device: str = "cuda", **values) -> Machine:
    given = {"memory_bytes": 2**34, "copy_bandwidth": 1e12, "gather": ((64, 1e11),), "l2_gather": ((64, 1e11),)}
    given |= {"op_seconds": 1e-6, "custom_op_seconds": 1e-6, "flops": RATES}
    if device == "cpu":
        return Machine("here", Host(**(given | values)))
    given |= {"launch_seconds": 1e-6, "replay_seconds": 1e-6}
    return Machine("here", Host(), (Device(**(given | values)),))


@st.composite
def programs(draw) -> Program:
    """Operators that read what is there and make something new, with or without saying when it goes."""
    sizes = draw(st.lists(st.integers(0, 3 * MIB), min_size=2, max_size=12))
    resident = draw(st.integers(1, len(sizes) - 1))
    values = tuple(Value(size, "weight" if i < resident else "activation") for i, size in enumerate(sizes))
    operators = []
    for made in range(resident, len(sizes)):
        reads = draw(st.lists(st.integers(0, made - 1), max_size=3, unique=True))
        operators.append(Operator("op", "forward", tuple(reads), (made,), workspace=draw(st.integers(0, MIB))))
    for _ in range(draw(st.integers(0, 3))):
        operators.append(Operator("end", "backward", tuple(draw(st.sets(st.integers(0, len(sizes) - 1)))), ()))
    return Program(values, tuple(operators), tuple(range(resident)))


def by_hand(program: Program) -> list[int]:
    """For every operator: all that is resident, or was made before and is touched at or after it."""
    alive = []
    for now, op in enumerate(program.operators):
        total = sum(program.values[i].bytes for i in program.resident) + op.workspace
        for i, value in enumerate(program.values):
            touches = [k for k, o in enumerate(program.operators) if i in (*o.reads, *o.writes, *o.frees)]
            if i not in program.resident and touches and touches[0] <= now <= touches[-1]:
                total += value.bytes
        alive.append(total)
    return alive


@given(programs())
def test_liveness_is_what_brute_force_says(program):
    assert live_bytes(program) == by_hand(program)


@given(programs())
def test_the_peak_is_that_of_the_live_bytes_and_a_little_rounding(program):
    found = memory(program, machine())
    most = max(live_bytes(program))
    assert most <= found.peak <= most + (MIB + 512) * (len(program.values) + 1)
    assert found.peak <= found.reserved
    assert sum(found.kinds.values()) == found.peak


@given(programs())
def test_the_timeline_adds_up_to_the_live_bytes(program):
    found = memory(program, machine())
    assert [sum(column) for column in zip(*found.timeline.values(), strict=True)] == live_bytes(program)


def chain(frees: bool) -> Program:
    """``a -> b -> c``; b is last used by the second operator, and let go after the third where ``frees``."""
    values = (Value(10 * MIB, "weight"), Value(20 * MIB, "activation", (5, 2)), Value(30 * MIB, "gradient"))
    values += (Value(40 * MIB, "temporary"),)
    operators = (
        Operator("one", "forward", (0,), (1,), library=True),
        Operator("two", "backward", (1,), (2,)),
        Operator("three", "update", (2,), (3,), frees=(1, 2, 3) if frees else ()),
    )
    return Program(values, operators, (0,), tasks=4)


def test_a_value_goes_after_its_last_use_unless_the_program_says_when():
    assert live_bytes(chain(frees=False)) == [30 * MIB, 60 * MIB, 80 * MIB]
    assert live_bytes(chain(frees=True)) == [30 * MIB, 60 * MIB, 100 * MIB]


def test_the_peak_says_where_and_what():
    found = memory(chain(frees=True), machine(context_bytes=7))
    alive = [sum(sizes) for sizes in zip(*found.timeline.values(), strict=True)]
    assert alive.index(max(alive)) == 2
    assert [words.split()[2] for words in found.alive] == ["temporary", "gradient", "activation", "weight"]
    assert found.alive[2] == "20.0 MiB activation of one (5 x 2 float32)"
    assert found.phases == ("forward", "backward", "update")


@pytest.mark.parametrize("replay", [True, False])
def test_a_recording_finds_the_workspace_of_its_warm_up(replay):
    with_library = memory(chain(frees=True), machine(workspace_bytes=32 * MIB), replay=replay)
    assert with_library.peak == 100 * MIB + 32 * MIB + (NUMBERS if replay else 0)
    assert with_library.kinds["workspace"] == 32 * MIB


def test_the_default_stream_has_a_workspace_where_the_set_up_multiplies():
    first = preparation(MIB)
    first = replace(first, operators=(replace(first.operators[0], library=True), *first.operators[1:]))
    found = memory(chain(frees=True), machine(workspace_bytes=32 * MIB), preparation=first)
    assert found.kinds["workspace"] == 2 * 32 * MIB
    assert (
        memory(chain(frees=True), machine(workspace_bytes=32 * MIB), replay=False, preparation=first).kinds["workspace"]
        == 32 * MIB
    )


@pytest.mark.parametrize("tried", [1, 2])
def test_a_step_tried_before_leaves_a_workspace_and_nothing_else(tried):
    plain = memory(chain(frees=True), machine(workspace_bytes=32 * MIB))
    found = memory(chain(frees=True), machine(workspace_bytes=32 * MIB), tried=tried)
    assert found.kinds["workspace"] == plain.kinds["workspace"] + 32 * MIB
    assert found.peak - found.kinds["workspace"] == plain.peak - plain.kinds["workspace"]
    values = (Value(4, "state"), Value(64 * MIB, "activation"))
    takes = Operator("op", "forward", (0,), (1,))
    untried, twice = (memory(Program(values, (takes,), (0,)), machine(), tried=times) for times in (0, tried))
    assert twice.reserved == untried.reserved  # what it took is given back before the warm-up


def test_members_alone_multiply_where_a_stack_does_not():
    values = (Value(4, "state"), Value(64 * MIB, "activation"))
    program = Program(values, (Operator("op", "forward", (0,), (1,)),), (0,))
    by_thread_and_stream = 4 * 32 * MIB
    found = memory(program, machine(workspace_bytes=32 * MIB), tried=1, alone=True)
    assert found.kinds["workspace"] == by_thread_and_stream
    assert memory(program, machine(workspace_bytes=32 * MIB), tried=1).kinds.get("workspace", 0) == 0


def test_a_library_is_asked_once_there_is_room_for_the_result():
    # The result of 32 MiB takes the free block of that size; the workspace then needs a segment.
    values = (Value(MIB, "weight"), Value(32 * MIB, "temporary"), Value(32 * MIB, "activation"))
    one = Operator("fill", "forward", (0,), (1,), frees=(1,))
    two = Operator("mm", "forward", (0,), (2,), frees=(2,), library=True)
    found = memory(Program(values, (one, two), (0,)), machine(workspace_bytes=20 * MIB), replay=False)
    assert found.reserved == (2 + 32 + 20) * MIB


def test_what_a_recording_has_is_kept_also_where_it_is_idle():
    values = (Value(MIB, "weight"), Value(20 * MIB, "temporary"), Value(30 * MIB, "temporary"))
    calls = (Operator("a", "forward", (0,), (1,), frees=(1,)), Operator("b", "forward", (0,), (2,), frees=(2,)))
    program = Program(values, calls, (0,))
    assert memory(program, machine(), replay=False).needed == (2 + 30) * MIB
    assert memory(program, machine()).needed == (2 + 20 + 30) * MIB


def test_evaluations_that_are_not_captured_take_memory_beside_the_recording():
    values = (Value(MIB, "weight"), Value(20 * MIB, "temporary"), Value(30 * MIB, "temporary"))
    train, evaluate = (
        Operator("a", "forward", (0,), (1,), frees=(1,)),
        Operator("b", "evaluation", (0,), (2,), frees=(2,)),
    )
    program = Program(values, (train, evaluate), (0,))
    apart, alone = memory(program, machine(), stepped=True), memory(replace(program, operators=(train,)), machine())
    assert alone.needed == (2 + 20) * MIB
    assert apart.needed == (2 + 20 + 30) * MIB
    assert memory(program, machine(), replay=False, stepped=True).needed == (2 + 30) * MIB


def test_the_upper_bound_is_five_percent_more():
    assert upper_bound(100 * MIB) == 105 * MIB
    found = memory(chain(frees=True), machine())
    assert found.safe == upper_bound(found.needed) + found.context


def test_what_could_not_be_recorded_has_warmed_up_and_goes_on_beside_that():
    recorded, eager = (memory(chain(frees=True), machine(workspace_bytes=32 * MIB), recorded=yes) for yes in (1, 0))
    assert eager.kinds["workspace"] == 2 * 32 * MIB
    assert eager.reserved == recorded.reserved + 32 * MIB + (20 + 30 + 40) * MIB - 2 * MIB
    assert eager.needed == 100 * MIB + 2 * 32 * MIB


def test_autograd_has_a_thread_and_its_own_workspace():
    values = (Value(MIB, "weight"), Value(MIB, "activation"))
    calls = tuple(Operator("mm", "forward", (0,), (1,), library=True, engine=engine) for engine in (False, True, True))
    found = memory(Program(values, calls, (0,)), machine(workspace_bytes=32 * MIB))
    assert found.peak == 2 * MIB + 2 * 32 * MIB + NUMBERS
    assert found.kinds["workspace"] == 2 * 32 * MIB


def test_a_first_step_knows_its_threads():
    # What multiplies in the backward pass alone has no workspace in the main thread, not even in the first step.
    values = (Value(MIB, "weight"), Value(MIB, "activation"))
    call = Operator("mm", "backward", (0,), (1,), library=True, engine=True)
    first = Program(
        values, (replace(call, phase="warm-up", writes=(0, 1)), Operator(MARKER_KEPT, "warm-up", (0,), ())), ()
    )
    found = memory(Program(values, (call,), (0,)), machine(workspace_bytes=32 * MIB), preparation=first)
    assert found.peak == 2 * MIB + 32 * MIB + NUMBERS


def test_biases_are_added_by_a_library_with_a_workspace_of_its_own():
    values = (Value(MIB, "weight"), Value(MIB, "activation"))
    calls = tuple(Operator("addmm", "forward", (0,), (1,), library=True, lt=True) for _ in range(2))
    found = memory(Program(values, calls, (0,)), machine(workspace_bytes=32 * MIB))
    assert found.peak == 2 * MIB + 33 * MIB + NUMBERS


def handed_on() -> Program:
    """Every step leaves 20 MiB behind, which the next one lets go once it has 20 MiB of its own."""
    values = (Value(10 * MIB, "weight"), *(Value(20 * MIB, "temporary"),) * 2, Value(30 * MIB, "activation"))
    operators = (
        Operator("copy", "forward", (0,), (2,), frees=(1,)),
        Operator("use", "forward", (2,), (3,), frees=(3,)),
        Operator("note", "update", (0,), ()),
    )
    return Program(values, operators, (0,), carried=(1,), left=(2,))


def test_what_a_step_leaves_is_there_until_the_next_one_lets_it_go():
    assert live_bytes(handed_on()) == [50 * MIB, 60 * MIB, 30 * MIB]
    assert memory(handed_on(), machine(), replay=False).peak == 60 * MIB
    # The recording lets go of a block of the side stream's pool, where the last of the warm-ups left it.
    assert memory(handed_on(), machine()).reserved == (10 + 20 + 20 + 30 + 2) * MIB


def test_streams_do_not_share_what_they_have_freed():
    values = (Value(MIB, "weight"), Value(20 * MIB, "activation"), Value(20 * MIB, "activation"))
    one, two = Operator("a", "forward", (0,), (1,), frees=(1,)), Operator("b", "forward", (0,), (2,), frees=(2,))
    alone = memory(Program(values, (one, two), (0,)), machine())
    beside = memory(Program(values, (one, replace(two, stream=1)), (0,)), machine())
    assert (alone.peak, beside.peak) == (21 * MIB + NUMBERS, 21 * MIB + NUMBERS)
    assert beside.reserved == alone.reserved + 20 * MIB


def preparation(temporary: int) -> Program:
    """Makes the 10 MiB weight of :func:`chain` with a temporary beside it; a first step then uses 15 MiB."""
    values = (Value(10 * MIB, "weight"), Value(temporary, "temporary"), Value(15 * MIB, "temporary"))
    operators = (
        Operator("make", "preparation", (), (0, 1), frees=(1,)),
        Operator("try", "warm-up", (0,), (2,), frees=(2,)),
        Operator(MARKER_KEPT, "warm-up", (0,), ()),
    )
    return Program(values, operators, ())


def test_what_the_set_up_asked_for_is_given_back_before_the_warm_up():
    # Warm-up: 10 of the set-up are held, not its 50, and the side stream's own 20 + 30 + 40 beside the first step's 16.
    found = memory(chain(frees=True), machine(), preparation=preparation(50 * MIB))
    assert found.peak == 100 * MIB + NUMBERS
    assert found.reserved == 10 * MIB + (16 + 20 + 30 + 40) * MIB
    assert found.needed == 102 * MIB  # nothing of the set-up's 50, nor of the first step's 16, has to be kept
    eager = memory(chain(frees=True), machine(), replay=False, preparation=preparation(50 * MIB))
    # The first step cuts 20 and 30 from the 50 that are free and asks for 40 more. The second takes its 20 from those
    # 40, the best fit, and its 30 from the 50; then nothing is left that holds 40.
    assert eager.reserved == (10 + 50 + 40 + 40) * MIB


def test_a_set_up_that_takes_more_than_the_step_is_the_peak():
    found = memory(chain(frees=True), machine(), preparation=preparation(200 * MIB))
    assert (found.peak, found.kinds["setup"]) == (210 * MIB, 110 * MIB)
    assert sum(found.kinds.values()) == found.peak
    on_cpu = memory(chain(frees=True), machine("cpu"), preparation=preparation(200 * MIB))
    assert on_cpu.peak == 210 * MIB


def test_a_cpu_rounds_nothing():
    values = (Value(3, "weight"), Value(5, "activation"))
    program = Program(values, (Operator("one", "forward", (0,), (1,), library=True),), (0,))
    found = memory(program, machine("cpu"))
    assert (found.peak, found.reserved) == (8, 8)


def test_advice_names_what_is_worth_it_largest_first():
    advice = memory(chain(frees=True), machine()).advice
    assert advice[0].startswith("2 instead of 4 tasks in a group save: 45.0 MiB")
    assert any("bf16" in line for line in advice)
    assert not any("features" in line for line in advice)


def test_a_program_without_operators_takes_what_is_resident():
    assert memory(Program((Value(512, "weight"),), (), (0,)), machine(), replay=False).peak == 512
