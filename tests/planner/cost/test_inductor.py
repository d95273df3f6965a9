"""Seconds that compiling would save against seconds that it takes."""

import pytest

from weft.core.program import Operator, Program, Value
from weft.planner.cost.inductor import Compiling, compiling, whether_to_compile
from weft.planner.cost.roofline import RunMode, epoch_clocks
from weft.planner.machine_profiles import PROFILES

MB = 1_000_000


def program_of(operators, kinds):
    values = tuple(Value(100 * MB, kind, (MB, 25)) for kind in kinds)
    resident = tuple(place for place, kind in enumerate(kinds) if kind in ("graph", "input", "weight"))
    return Program(values=values, operators=tuple(operators), resident=resident)


def op(name, reads, writes, phase="forward", **more):
    moved = 100 * MB * (len(reads) + len(writes))
    return Operator(name, phase, tuple(reads), tuple(writes), stream_bytes=moved, launches=1, **more)


def found(operators, kinds, **mode):
    program = program_of(operators, kinds)
    return compiling(program, epoch_clocks(program, PROFILES["h200"], None, None, RunMode(**mode))[1])


def test_what_lies_between_element_wise_passes_is_saved():
    """``w -> a -> b -> c``, read by a product: of six times 100 MB the weights are read and c is written."""
    chain = [op("aten.gelu", [0], [1]), op("aten.tanh", [1], [2]), op("aten.mul", [2], [3])]
    kinds = ["weight", "activation", "activation", "activation", "activation"]
    one = found([*chain, op("aten.mm", [3], [4], library=True)], kinds)
    moved = 100 * MB / PROFILES["h200"].copy_bandwidth
    assert one.saved == pytest.approx(4 * moved + 2 * PROFILES["h200"].replay_seconds)


def test_wefts_operators_and_what_they_read_are_left_alone():
    steps = [op("weft.spmm", [0], [1]), op("aten.gelu", [1], [2]), op("weft.spmm", [2], [3])]
    assert found(steps, ["weight", "activation", "activation", "activation"]).saved == 0


def test_a_sum_is_written_before_others_read_it():
    steps = [op("aten.sum", [0], [1]), op("aten.mul", [1], [2])]
    assert found(steps, ["weight", "activation", "activation"]).saved == 0


def test_what_the_backward_pass_reads_is_written():
    steps = [op("aten.gelu", [0], [1]), op("aten.mul", [1], [2], phase="backward")]
    assert found(steps, ["weight", "activation", "gradient"]).saved == 0


def test_what_follows_from_the_graph_alone_is_saved_whole():
    steps = [op("aten.index", [0], [1]), op("aten.mul", [1, 2], [3])]
    kinds = ["graph", "activation", "weight", "activation"]
    one = found(steps, kinds)
    moved = 200 * MB / PROFILES["h200"].copy_bandwidth
    assert one.saved >= moved
    varying = found(steps, ["weight", *kinds[1:]])
    assert varying.saved < one.saved


def test_waiting_for_the_host_is_over():
    steps = [Operator("aten.mul", "forward", (0,), (1,), stream_bytes=8, launches=1)] * 3
    values = (Value(4, "weight"), Value(4, "activation"))
    small = Program(values=values, operators=tuple(steps), resident=(0,))
    _, clock = epoch_clocks(small, PROFILES["h200"], None, None, RunMode(replay=False))
    assert clock.waiting > 0
    assert compiling(small, clock).saved >= clock.waiting


def test_more_operators_take_longer_to_compile():
    few, many = ([op("aten.mul", [0], [1])] * count for count in (2, 200))
    assert found(many, ["weight", "activation"]).seconds > found(few, ["weight", "activation"]).seconds


@pytest.mark.parametrize(
    ("saved", "epochs", "expected"), [(0.01, 2000, True), (0.01, 1000, False), (0.0001, 10**7, False)]
)
def test_it_pays_when_the_run_is_long_and_the_gain_is_not_a_trifle(saved, epochs, expected):
    assert Compiling(saved, 0.02, 10.0).pays(epochs) is expected


def test_the_sentence_gives_both_sides_of_the_bargain():
    bargain = Compiling(0.01, 0.02, 10.0)
    compiled, why = whether_to_compile(None, bargain, 5000, "cuda", "solo")
    assert compiled
    assert why == (
        "compiled by Inductor: about 10 ms of 20 ms per epoch are passes that it fuses or results that do not change, "
        "50 s over 5,000 epochs; it takes about 10 s",
    )
    compiled, why = whether_to_compile(None, bargain, 100, "cuda", "solo")
    assert not compiled
    assert why[0].startswith("not compiled: Inductor would save about 10 ms of 20 ms per epoch, 1 s over 100 epochs")


def test_what_was_asked_for_is_done_but_a_woven_step_has_kernels_of_its_own():
    assert whether_to_compile(True, None, 1, "cpu", "stacked")[0]
    assert not whether_to_compile(False, Compiling(1.0, 1.0, 1.0), 10**6, "cuda", "solo")[0]
    assert not whether_to_compile(True, None, 1, "cuda", "woven")[0]


def test_a_cpu_is_asked():
    assert whether_to_compile(None, Compiling(1.0, 1.0, 1.0), 10**6, "cpu", "solo") == (False, ())
