"""Seconds of an epoch: each rate counts where it should, and skew, threads and evaluations do what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.programs import ARXIV, gcn_step
from weft.core.graph_stats import GraphStats
from weft.core.program import Operator, Program, Value
from weft.planner.cost.calibration import Calibration
from weft.planner.cost.roofline import (
    RunMode,
    cached_share,
    edges_of_busiest,
    family,
    gather_seconds,
    seconds,
    table_of,
)
from weft.planner.machine_profiles import profile

H200, CPU = profile("h200"), profile("cpu")
# Nothing but the rates: what a kernel costs to launch is added by its own test.
FREE = H200.with_device(replay_seconds=0.0, launch_seconds=0.0)


def one(op: Operator, *values: Value) -> Program:
    return Program(values or (Value(400, "activation", (10, 10)),), (op,), ())


def training(program, machine, **mode):
    cost = seconds(program, machine, mode=RunMode(**mode))
    return sum(value for phase, value in cost.phases.items() if phase != "evaluation")


def test_traffic_counts_at_the_rate_of_a_copy():
    op = Operator("aten.relu", "backward", (0,), (0,), stream_bytes=1e-3 * FREE.copy_bandwidth)
    assert training(one(op), FREE) == pytest.approx(1e-3)


def test_arithmetic_counts_where_it_is_slower_than_the_traffic():
    op = Operator("aten.mm", "backward", (0,), (0,), flops=1e-3 * FREE.matmul_rate("fp32"), stream_bytes=8)
    assert training(one(op), FREE) == pytest.approx(1e-3)
    assert training(one(op), FREE, precision="tf32") < training(one(op), FREE) / 4


def test_bf16_products_have_the_rate_of_bf16():
    op = Operator("aten.mm", "backward", (0,), (0,), flops=1e12)
    half = one(op, Value(200, "activation", (10, 10), "bfloat16"))
    assert training(half, FREE) == pytest.approx(1e12 / FREE.matmul_rate("bf16"))


def test_every_kernel_costs_its_launch():
    op = Operator("aten.relu", "backward", (0,), (0,), launches=3)
    machine = FREE.with_device(replay_seconds=2e-6)
    assert training(one(op), machine) == pytest.approx(6e-6)
    cost = seconds(one(op), machine, mode=RunMode(steps=2))
    assert cost.launches == 6
    assert cost.turn_seconds == pytest.approx(2e-6)


def test_an_eager_step_waits_for_the_host_where_that_is_slower():
    op = Operator("aten.relu", "backward", (0,), (0,), stream_bytes=1e-3 * FREE.copy_bandwidth, launches=1)
    hidden = seconds(one(op), FREE.with_device(op_seconds=1e-4), mode=RunMode(replay=False))
    waiting = seconds(one(op), FREE.with_device(op_seconds=3e-3), mode=RunMode(replay=False))
    assert hidden.seconds == pytest.approx({"gpu": 1e-3})
    assert waiting.seconds == pytest.approx({"gpu": 1e-3, "cpu": 2e-3})
    assert sum(waiting.families.values()) == pytest.approx(waiting.epoch_seconds)


def test_a_cpu_pays_for_every_call_and_weft_calls_cost_more():
    torch_op, ours = (Operator(name, "backward", (0,), (0,), launches=1) for name in ("aten.relu", "weft.spmm"))
    assert training(one(torch_op), CPU) == pytest.approx(CPU.op_seconds)
    assert training(one(ours), CPU) == pytest.approx(CPU.custom_op_seconds)


def test_one_thread_is_slower_than_all():
    op = Operator("aten.relu", "backward", (0,), (0,), stream_bytes=1e9)
    assert training(one(op), CPU, threads=1) == pytest.approx(training(one(op), CPU) / CPU.host.one_thread)


def test_evaluations_count_for_their_share_of_the_epochs():
    train = Operator("aten.relu", "backward", (0,), (0,), stream_bytes=1e9)
    program = Program((Value(4, "activation", (1,)),), (train, replace(train, phase="evaluation")), ())
    often, rarely = (seconds(program, FREE, mode=RunMode(eval_every=k)).epoch_seconds for k in (1, 10))
    assert often == pytest.approx(2e9 / FREE.copy_bandwidth)
    assert rarely == pytest.approx(1.1e9 / FREE.copy_bandwidth)


def test_a_program_without_evaluation_is_evaluated_by_another_forward_pass():
    cost = seconds(gcn_step(), FREE)
    assert cost.phases["evaluation"] == pytest.approx(cost.phases["forward"])


def test_the_parts_add_up():
    for machine in (H200, CPU):
        cost = seconds(gcn_step(), machine, stats=ARXIV)
        assert sum(cost.families.values()) == pytest.approx(cost.epoch_seconds)
        assert sum(cost.phases.values()) == pytest.approx(cost.epoch_seconds)


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("weft.spmm", {"gather_bytes": 1.0}, "spmm"),
        ("weft.spmm_max", {}, "spmm"),
        ("weft.graph_attention_backward", {"gather_bytes": 1.0}, "attention"),
        ("aten.mm", {"flops": 1.0}, "matmul"),
        ("aten.addmm", {"flops": 1.0}, "matmul"),
        ("weft.weight_grad", {"flops": 1.0}, "matmul"),
        ("aten.index_select", {"gather_bytes": 1.0}, "scatter"),
        ("aten.scatter_add", {}, "scatter"),
        ("aten.relu", {"flops": 1.0}, "pointwise"),
        ("weft.adam_", {}, "pointwise"),
    ],
)
def test_families(name, numbers, expected):
    assert family(Operator(name, "forward", (), (), **numbers)) == expected


def test_the_table_of_a_gather_is_the_largest_thing_that_is_not_the_graph():
    program = gcn_step(hidden=32)
    assert table_of(program.operators[1], program, ARXIV) == (169_343, 128.0)
    stacked = Program((Value(0, "activation", (8, 169_343, 4, 16), "bfloat16"),), (), ())
    op = Operator("weft.attention", "forward", (0,), (), gather_bytes=1.0)
    assert table_of(op, stacked, ARXIV) == (169_343, 128.0)


def test_measured_spmm_rates_come_out():
    """benchmarks/MEASURED.md: arxiv F=64 takes 0.0997 ms, most of its rows staying in the L2."""
    edges, rows = 2_332_486 + 169_343, 169_343 * 256
    values = (Value(rows, "activation", (169_343, 64)), Value(rows, "activation", (169_343, 64)))
    op = Operator("weft.spmm", "backward", (0,), (1,), stream_bytes=rows + 4 * edges, gather_bytes=edges * 256)
    found = seconds(Program(values, (op,), ()), FREE, stats=ARXIV).families["spmm"]
    assert found == pytest.approx(0.0997e-3, rel=0.15)


def test_rows_come_from_memory_once_before_they_come_from_the_cache():
    """It tells where a node has few neighbours: the gather is short then, and the rows are as many."""
    rows = 50_000 * 256
    values = (Value(rows, "activation", (50_000, 64)), Value(rows, "activation", (50_000, 64)))
    sparse = Operator("weft.spmm", "backward", (0,), (1,), stream_bytes=rows, gather_bytes=4.0 * rows)
    found = training(Program(values, (sparse,), ()), FREE)
    assert found == pytest.approx(4 * rows / FREE.gather_rate(256, cached=True) + 2 * rows / FREE.copy_bandwidth)


def test_weights_that_sparse_features_pick_among_are_nearer_than_the_l2():
    sparse = replace(ARXIV, num_features=500, feature_nnz=1_000_000)
    program = Program((Value(4 * 40_000, "weight", (1, 40_000)),), (), ())
    op = Operator("weft.spmm", "forward", (0,), (), gather_bytes=256e6)
    assert table_of(op, program, sparse) == (500, 256.0)
    assert gather_seconds(256e6, 256, 500, H200) < gather_seconds(256e6, 256, 5000, H200) / 2


def test_a_layer_norm_takes_its_time_for_every_row():
    def norm(rows: int, width: int) -> float:
        value = Value(4 * rows * width, "activation", (rows, width))
        op = Operator("aten.native_layer_norm_backward", "backward", (0,), (0,), stream_bytes=12.0 * rows * width)
        return training(one(op, value), FREE)

    assert norm(100_000, 16) == norm(100_000, 32) == pytest.approx(norm(200_000, 16) / 2)
    assert norm(1000, 1 << 20) == pytest.approx(12.0 * 1000 * 2**20 / FREE.copy_bandwidth)


def test_attention_is_arithmetic_beside_its_fetches():
    """Half precision halves the fetches alone; a head of 39 takes lanes for 64 and loads number by number."""

    def attention(width: int, dtype: str = "float32") -> float:
        size = 2 if dtype == "bfloat16" else 4
        shape = (ARXIV.num_nodes, 4, width)
        value = Value(0, "activation", shape, dtype)
        op = Operator("weft.graph_attention", "backward", (0,), (0,), gather_bytes=1e6 * width * size)
        cost = seconds(one(op, value), FREE.with_device(l2_bytes=1 << 40), stats=ARXIV)
        return cost.families["attention"] / (width * size)

    assert attention(16, "bfloat16") > 1.3 * attention(16)
    assert attention(39) > 1.5 * attention(64)
    assert attention(40) == pytest.approx((1 + 64 / 40) / 2 * attention(64), rel=0.05)


def test_a_cache_holds_what_fits_and_the_busiest_of_the_rest():
    small, large = H200.with_device(l2_bytes=1 << 20), H200.with_device(l2_bytes=1 << 40)
    assert cached_share(256, 1000, large) == 1.0
    even = cached_share(256, ARXIV.num_nodes, small)
    skewed = cached_share(256, ARXIV.num_nodes, small, ARXIV)
    assert even == pytest.approx(0.5 * (1 << 20) / 256 / ARXIV.num_nodes)
    assert 3 * even < skewed < 1.0
    assert cached_share(256, ARXIV.num_nodes, small, replace(ARXIV, symmetric=False)) == even


def test_the_busiest_nodes_have_the_edges_that_the_histogram_gives_them():
    stats = GraphStats("g", 11, 130, symmetric=True, max_degree=100, degree_histogram=(0, 0, 10, 0, 0, 0, 0, 1))
    assert edges_of_busiest(stats, 11) == pytest.approx(130)
    assert edges_of_busiest(stats, 1) > 80
    assert edges_of_busiest(stats, 0) == 0


def test_a_hub_is_a_floor_on_a_cpu_and_not_on_a_gpu():
    star = replace(ARXIV, max_degree=ARXIV.num_edges // 2 * 2)
    flat = replace(ARXIV, max_degree=1)
    program = gcn_step()
    assert seconds(program, CPU, stats=star).families["spmm"] > 1.2 * seconds(program, CPU, stats=flat).families["spmm"]
    roomy = H200.with_device(l2_bytes=1 << 40)  # whose cache does not depend on who is busy
    assert seconds(program, roomy, stats=star).families == seconds(program, roomy, stats=flat).families


def test_calibration_multiplies_its_family_alone():
    plain = seconds(gcn_step(), H200, stats=ARXIV)
    slower = seconds(gcn_step(), H200, Calibration({"spmm": 2.0}), stats=ARXIV)
    assert slower.families["spmm"] == pytest.approx(2 * plain.families["spmm"])
    assert slower.families["matmul"] == plain.families["matmul"]
