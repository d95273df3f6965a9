"""Costs of operators: every operator of Weft has one, and they are what one counts by hand."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import weft.ops
import weft.weave
from tests.graphs_for_tests import random_graph
from weft import ops
from weft.batches.block import PaddedAdjacency
from weft.capture.costs import ATEN, FAMILIES, WEFT, work_of
from weft.capture.meta_graph import meta_graph
from weft.capture.meta_shapes import GpuRules
from weft.capture.observer import ObservedCall, Observer
from weft.ops.launch.backend import meta_means_gpu
from weft.weave.launchers import register


def one(function) -> ObservedCall:
    """The last call that ``function`` makes, on tensors without data."""
    observer = Observer("meta", look_inside=True)
    with meta_means_gpu(), observer:
        function()
    return observer.calls[-1]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_every_operator_of_weft_has_a_cost():
    for package in (weft.ops, weft.weave):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    register()
    registered = {name.replace("::", ".") for name in torch._library.custom_ops.OPDEFS if name.startswith("weft::")}
    assert registered == set(WEFT)


def test_no_operator_of_torch_is_in_two_families():
    names = [name for listed in FAMILIES.values() for name in listed.split()]
    assert len(names) == len(ATEN), sorted({name for name in names if names.count(name) > 1})


def test_a_product():
    work = work_of(one(lambda: empty(7, 30) @ empty(30, 4)))
    assert work.flops == 2 * 7 * 30 * 4
    assert work.stream == 4 * (7 * 30 + 30 * 4 + 7 * 4)


def test_a_batched_product_with_something_added():
    work = work_of(one(lambda: torch.baddbmm(empty(5, 7, 4), empty(5, 7, 30), empty(5, 30, 4))))
    assert work.flops == 5 * 2 * 7 * 30 * 4


def test_pointwise_reads_and_writes_everything_once():
    work = work_of(one(lambda: empty(100, 8) * empty(8)))
    assert (work.flops, work.stream, work.launches) == (800, 4 * (800 + 8 + 800), 1)


def test_rows_by_index_are_gathered():
    work = work_of(one(lambda: empty(100, 8).index_select(0, empty(30, dtype=torch.int64))))
    assert (work.gather, work.stream) == (4 * 30 * 8, 4 * 30 * 8 + 8 * 30)


def test_a_mask_becomes_positions():
    call = one(lambda: empty(100, 8)[empty(100, dtype=torch.bool).fill_(True).nonzero_static(size=60).squeeze(1)])
    assert sum(work_of(call).pieces) == 0
    observer = Observer("cpu")
    source, mask = torch.rand(100, 8), torch.arange(100) < 60
    with observer:
        source[mask]
    assert sum(work_of(observer.calls[-1]).pieces) == 8 * 60


def test_allocating_launches_nothing():
    assert work_of(one(lambda: empty(3))).launches == 0


@pytest.mark.parametrize("tasks", [1, 5])
def test_an_aggregation(tasks):
    graph = meta_graph(random_graph().stats())
    call = one(lambda: ops.spmm(graph.adj, empty(tasks, graph.num_nodes, 16)))
    work = work_of(call)
    assert work.flops == 2 * tasks * graph.num_edges * 16
    assert work.gather == 4 * tasks * graph.num_edges * 16
    assert call.inside.launches == 1  # no hubs


@pytest.mark.parametrize("tasks", [1, 3])
def test_attention_over_a_block_that_reads_more_rows_than_it_has(tasks):
    """A batch's block, and a chunk of an evaluation, have many times as many columns as rows."""
    rows, columns, edges, heads, width = 10, 400, 390, 2, 8
    full = empty(columns), empty(rows)
    offsets, sources = empty(rows + 1, dtype=torch.int32), empty(edges, dtype=torch.int32)
    block = PaddedAdjacency(offsets, sources, columns, full=lambda: full)
    x, a_src, a_dst = empty(tasks, columns, heads, width), empty(tasks, columns, heads), empty(tasks, rows, heads)
    work = work_of(one(lambda: ops.graph_attention(block, x, a_src, a_dst)))
    assert work.gather == 4 * tasks * edges * heads * (width + 1)


def test_a_hub_costs_a_second_launch_and_a_place_for_partial_sums():
    src, dst = torch.arange(1, 2000), torch.zeros(1999, dtype=torch.int64)
    graph = meta_graph(weft.Graph.from_edges(src, dst, 2000, torch.rand(2000, 3), torch.arange(2000) % 2))
    call = one(lambda: ops.spmm(graph.adj, empty(2000, 16)))
    assert call.inside.launches == 2
    assert call.inside.pieces == (8 * 16 * 4,)  # 1999 edges in chunks of 256


def test_a_copy_that_the_launcher_needs_is_its_workspace():
    graph = meta_graph(random_graph().stats())
    call = one(lambda: ops.spmm(graph.adj, empty(16, graph.num_nodes).t()))
    assert 4 * 16 * graph.num_nodes in call.inside.pieces


def test_a_product_of_the_library_is_told_from_a_kernel():
    few, many = (one(lambda rows=rows: ops.linear(empty(rows, 64), empty(32, 64))) for rows in (100, 20_000))
    assert (few.inside.library, many.inside.library) == (True, False)
    assert work_of(many).flops == 2 * 20_000 * 64 * 32


def test_operators_in_one_launch_cost_the_sum():
    from tests.weave.merged_calls import merged_call
    from weft.ops.csr.packed import pack_csr
    from weft.weave.merged_launch import OpCall as One

    register()
    graph = meta_graph(random_graph().stats())

    def both() -> None:
        csr = pack_csr(graph.adj)
        calls = [One("spmm", (empty(graph.num_nodes, f), None, None, None, csr, [], None)) for f in (8, 16)]
        merged_call(calls)

    assert work_of(one(both)).flops == 2 * graph.num_edges * 24


def test_what_nobody_knows_is_charged_for_its_tensors():
    call = ObservedCall("other.op", (), {}, (), (), (), (), one(lambda: empty(3)).inside)
    call.args = one(lambda: empty(10) + 1).args
    assert work_of(call).stream == 40


def test_a_sum_of_another_type_is_a_copy_first():
    def spaces(tensor):
        with Observer("meta") as observer:
            tensor.sum(0)
        return [sum(work_of(call).pieces) for call in observer.calls]

    mask = torch.empty(3, 100, dtype=torch.bool, device="meta")
    assert spaces(mask) == [3 * 100 * 8]
    assert spaces(mask.long()) == [0]
    assert spaces(mask.bfloat16()) == [0]


def test_a_long_sort_holds_positions_and_a_second_copy_of_everything():
    assert work_of(one(lambda: torch.sort(empty(5000, dtype=torch.int32), stable=True))).pieces == (40000, 60000)
    assert work_of(one(lambda: torch.sort(empty(100, dtype=torch.int32), stable=True))).pieces == ()


def test_positions_of_32_bits_are_widened_on_a_gpu():
    observer = Observer("meta")
    values, places = empty(50, 4), empty(20, dtype=torch.int32)
    with GpuRules(), observer:
        values[places]
    assert [(call.name, call.outs[0].bytes) for call in observer.calls] == [("aten._to_copy", 160), ("aten.index", 320)]
