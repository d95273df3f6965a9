"""Every Triton kernel compiles to sm_90 code, as the launchers would launch it, on a machine without a GPU.

The launchers run on CPU tensors with the launch itself replaced by a recorder, so what is compiled are the very
argument types and constants of a real call.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.interpreted.packed import both_csr, numbers, small
from weft.ops.launch.backend import H200, assume_limits

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

KINDS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


def kind_of(value) -> str:
    """The type of an argument in a kernel's signature."""
    if isinstance(value, Tensor):
        return KINDS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(int(value)) < 2**31 else "i64"


@pytest.fixture
def launches(monkeypatch):
    """Distinct launches made during a test: (kernel, signature, constants, options) under a name."""
    from triton.runtime.jit import JITFunction

    made = {}

    def record(self, *args, grid, warmup=False, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constants = {p.name: bound[p.name] for p in self.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else kind_of(bound[name]) for name in self.arg_names}
        made[str((self.__module__, self.__name__, signature, constants))] = (self, signature, constants, options)

    monkeypatch.setattr(JITFunction, "run", record)
    return made


def compile_all(launches, arch: int = 90, shared: int = H200.shared_memory_per_block) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert launches
    for kernel, signature, constants, options in launches.values():
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        assert f".target sm_{arch}" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= shared


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (64, 128)])
def test_linear_backward_of_wide_layers(launches, inputs, outputs, monkeypatch):
    """Through tf32, which is when it is used: what is launched fits into shared memory, and so does the bound."""
    from weft.ops.dense import linear_triton as module

    monkeypatch.setattr(module, "float32_precision", lambda: "tf32")
    monkeypatch.setattr(module, "tall_precision", lambda: "bf16x3")
    x, grad, weight = numbers(300, inputs), numbers(300, outputs), numbers(outputs, inputs)
    module.linear_backward_triton(grad, grad, x, weight, None, "relu", *dropout_of(), 3, False, True)
    compile_all(launches)


@pytest.mark.parametrize(("inputs", "wants_x"), [(64, True), (128, False)])
def test_linear_backward_with_the_accuracy_of_float32(launches, inputs, wants_x):
    """Six products a term, for layers of the widths at which that is used."""
    from weft.ops.dense.linear_triton import linear_backward_triton

    x, grad, weight = numbers(300, inputs), numbers(300, 64), numbers(64, inputs)
    linear_backward_triton(grad, grad, x, weight, None, "relu", *dropout_of(), 3, False, wants_x)
    compile_all(launches)


def test_products_with_narrow_tiles_beside(launches):
    from weft.ops.dense.linear_triton import choose_weight_grad_launch as choose_launch
    from weft.ops.dense.linear_triton import linear_triton, weight_grad_triton

    x, grad, weight = numbers(300, 72), numbers(300, 72), numbers(72, 72)
    linear_triton(x, weight)
    weight_grad_triton(grad, x, choose_launch(72, 72))
    weight_grad_triton(numbers(2, 300, 64), numbers(300, 128), choose_launch(64, 128, tasks=2))
    compile_all(launches)


@pytest.mark.parametrize(("arch", "shared"), [(80, 166912), (89, 101376)], ids=["A100", "RTX 4090"])
@pytest.mark.parametrize(("inputs", "wants_x"), [(64, True), (128, False)])
def test_linear_backward_with_the_accuracy_of_float32_elsewhere(launches, inputs, wants_x, arch, shared):
    from weft.ops.dense.linear_triton import linear_backward_triton

    x, grad, weight = numbers(300, inputs), numbers(300, 64), numbers(64, inputs)
    with assume_limits(replace(H200, shared_memory_per_block=shared)):
        linear_backward_triton(grad, grad, x, weight, None, "relu", *dropout_of(), 3, False, wants_x)
    compile_all(launches, arch, shared)


def test_linear_backward_asks_for_the_shared_memory_there_is():
    from weft.ops.dense.linear_triton import choose_backward_launch as choose_launch
    from weft.ops.dense.linear_triton import shared_bytes

    roomy = choose_launch(128, 128)
    tight = choose_launch(128, 128, limits=replace(H200, shared_memory_per_block=101376))
    assert roomy.block_rows > tight.block_rows
    assert shared_bytes(tight, 128, 4, True) <= 101376
    assert choose_launch(128, 128, limits=replace(H200, shared_memory_per_block=1024)) is None


def dropout_of(*lead: int) -> tuple[Tensor, Tensor]:
    return torch.full(lead, 0.5), torch.zeros(*lead, 2, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spmm(launches, dtype):
    from weft.ops.sparse.spmm import spmm_triton

    adj = small()
    csr, _ = both_csr(adj)
    scales = torch.ones(adj.num_rows), torch.ones(adj.num_cols)
    spmm_triton(numbers(adj.num_cols, 64, dtype=dtype), numbers(adj.num_edges, dtype=dtype), *scales, csr)
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spmm_max(launches, dtype):
    from weft.ops.sparse.spmm_max import spmm_max_backward_triton, spmm_max_triton

    adj = small()
    csr, back = both_csr(adj)
    x, weight = numbers(adj.num_cols, 64, dtype=dtype), numbers(adj.num_edges, dtype=dtype)
    out, winner = spmm_max_triton(x, weight, csr)
    spmm_max_backward_triton(out, winner, weight, back)
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sddmm_and_softmax(launches, dtype):
    from weft.ops.sparse.edge_softmax import edge_softmax_triton
    from weft.ops.sparse.sddmm import sddmm_triton

    adj = small()
    csr, _ = both_csr(adj)
    scores = sddmm_triton(numbers(adj.num_rows, 64, dtype=dtype), numbers(adj.num_cols, 64, dtype=dtype), 4, csr)
    edge_softmax_triton(edge_softmax_triton(scores, csr), csr, scores)
    compile_all(launches)


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(("heads", "width", "shared"), [(3, 5, False), (4, 40, True), (2, 200, False)])
def test_attention_of_any_width(launches, heads, width, shared, arch):
    """Also in 64-bit offsets and without dropout; what is evaluated has no sums of positive arguments."""
    from weft.ops.attention.gat_triton import attention_backward_triton, attention_forward_triton

    csr, back = both_csr(small())
    x, a_src, a_dst = (numbers(n, heads, *d) for n, d in ((9, (width,)), (9, ()), (11, ())))
    for training in (True, False):
        out, *_, log_sum = attention_forward_triton(x, a_src, a_dst, 0.2, None, None, 0, csr, training)
    grad = numbers(11, 1, width).expand_as(out) if shared else out
    attention_backward_triton(grad, x, a_src, torch.stack([log_sum] * 3, -2), 0.2, None, None, 0, back)
    for name, (kernel, signature, constants, options) in list(launches.items()):
        if "WIDE" in constants:
            launches[f"wide {name}"] = kernel, signature, constants | {"WIDE": True}, options
    compile_all(launches, arch, 101376)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(launches, dtype):
    from weft.ops.attention.gat_triton import (
        attention_backward_triton,
        attention_forward_triton,
        attention_row_gradient_triton,
    )
    from weft.ops.attention.mean_heads import mean_heads_triton

    adj = small()
    csr, back = both_csr(adj)
    x, a_src, a_dst = (numbers(n, 4, *d, dtype=dtype) for n, d in ((9, (16,)), (9, ()), (11, ())))
    random = (*dropout_of(), 3)
    out, out_plus, alpha_plus, log_sum = attention_forward_triton(x, a_src, a_dst, 0.2, *random, csr, True)
    stats, _ = attention_row_gradient_triton(out, out, out_plus, alpha_plus, a_dst, log_sum, 0.2)
    attention_backward_triton(out, x, a_src, stats, 0.2, *random, back)
    mean_heads_triton(out, numbers(16, dtype=dtype))
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_v2(launches, dtype):
    from weft.ops.attention.gatv2 import attention_v2_backward_launches, attention_v2_forward_triton

    adj = small()
    csr, back = both_csr(adj)
    x_src, x_dst, att = (numbers(*n, 4, 16, dtype=dtype) for n in ((9,), (11,), ()))
    random = (*dropout_of(), 3)
    out, log_sum = attention_v2_forward_triton(x_src, x_dst, att, 0.2, *random, csr)
    attention_v2_backward_launches(out, x_src, x_dst, att, log_sum, log_sum, 0.2, *random, csr, back)()
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_epilogue(launches, dtype):
    from weft.ops.dense.bias_act_dropout import (
        bias_act_dropout_backward_bias_triton,
        bias_act_dropout_backward_triton,
        bias_act_dropout_triton,
        column_sum_triton,
    )

    x, bias, random = numbers(3, 50, 16, dtype=dtype), numbers(3, 16, dtype=dtype), (*dropout_of(3), 3)
    for act in ("relu", "elu"):
        out = bias_act_dropout_triton(x, bias, act, *random)
        bias_act_dropout_backward_bias_triton(x, out, bias.shape, act, *random)
    bias_act_dropout_backward_triton(x, out, "elu", *random)
    column_sum_triton(x)
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(launches, dtype):
    from weft.ops.dense.linear_triton import linear_backward_triton, linear_triton, weight_grad_triton

    x, weight = numbers(3, 200, 64, dtype=dtype), numbers(3, 64, 64, dtype=dtype)
    out = linear_triton(x, weight, numbers(3, 64, dtype=dtype), x, "relu", *dropout_of(3), 3)
    weight_grad_triton(out, x)
    linear_backward_triton(out, out, x, weight, x, "elu", *dropout_of(3), 3, True, True)
    linear_backward_triton(out, None, x[0], weight, None, "none", None, None, 3, False, False)
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm(launches, dtype):
    from weft.ops.dense.batch_norm import batch_norm_backward_triton, batch_norm_triton

    x, column = numbers(3, 500, 64, dtype=dtype), numbers(3, 64)
    for ending in (("relu", *dropout_of(3), 3, 1), ("elu", *dropout_of(3), 3, 4), ("none", None, None, 0, 1)):
        batch_norm_triton(x, column, column, 1e-5, *ending)
        batch_norm_backward_triton(x, x, column, column, column, column, 1e-5, *ending)
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm(launches, dtype):
    from weft.ops.dense.layer_norm import layer_norm_backward_triton, layer_norm_triton

    for width, ending in (
        (64, ("relu", *dropout_of(3), 3, 1)),
        (60, ("elu", *dropout_of(3), 3, 4)),
        (1024, ("none", None, None, 0, 1)),
    ):
        x, column, row = numbers(3, 500, width, dtype=dtype), numbers(3, width, dtype=dtype), numbers(3, 500)
        b = None if width == 1024 else column
        layer_norm_triton(x, b, column, column, 1e-5, *ending)
        layer_norm_backward_triton(x, x, b, column, column, row, row, *ending)
    compile_all(launches)


def test_loss_and_optimizer(launches):
    from weft.ops.dense.adam import adam_triton
    from weft.ops.dense.cross_entropy import cross_entropy_rows_backward_triton, cross_entropy_rows_triton

    labels, rows = torch.zeros(30, dtype=torch.int64), torch.arange(10)
    for dtype in (torch.float32, torch.bfloat16):
        logits = numbers(2, 30, 7, dtype=dtype)
        loss = cross_entropy_rows_triton(logits, labels, rows)
        cross_entropy_rows_triton(numbers(2, 300, 7, dtype=dtype), labels.repeat(10), torch.arange(300))  # three blocks
        cross_entropy_rows_backward_triton(loss, logits, labels, rows)
    param = numbers(2, 600)
    adam_triton(param, param, param, param, torch.zeros(2, 10), torch.ones(600))
    adam_triton(param, param, param, param, torch.zeros(2, 5, 10), None, torch.tensor([3]))
    compile_all(launches)


@pytest.mark.parametrize(
    ("ps", "width", "dtype"), [(1, 16, torch.float32), (16, 64, torch.bfloat16), (32, 128, torch.float32)]
)
def test_sharded_spmm(launches, ps, width, dtype):
    """Every schedule, at the smallest and the largest pieces; rows of peers are read by address."""
    from weft.dist.shard_csr import shard_csr
    from weft.ops.sharded.sharded_spmm import SCHEDULES, ShardedLaunch, address_table, sharded_spmm_triton

    adj, bounds = small(11, 11), (0, 5, 11)
    x, scale, weight = numbers(6, width, dtype=dtype), torch.ones(6), torch.ones(adj.num_edges)
    first = int(adj.indptr[5])
    csr = shard_csr(adj.indptr[5:] - first, adj.indices[first:], bounds, 1, ps, weight[first:], chunks=2)
    table, counts = address_table([x[:5], x], x.device)
    for schedule in SCHEDULES:
        sharded_spmm_triton(x, table, counts, csr, scale, ShardedLaunch(ps, 2, 4), schedule)
    compile_all(launches)


@pytest.mark.parametrize(("width", "dtype", "whole"), [(16, torch.float32, 2.0), (64, torch.bfloat16, 0.0)])
def test_streamed_spmm(launches, width, dtype, whole):
    """Sums onto what is there, and copies of some rows of a tile."""
    from weft.dist.shard_csr import tiled_csr
    from weft.ops.sharded.streamed_spmm import streamed_spmm_triton

    adj, x = small(11, 11), numbers(6, width, dtype=dtype)
    first = int(adj.indptr[5])
    weight = torch.ones(adj.num_edges - first)
    csr = tiled_csr(adj.indptr[5:] - first, adj.indices[first:], (0, 5, 11), 1, weight, tiles=2, whole=whole)
    streamed_spmm_triton(x, [x[:5], x], csr, torch.ones(6))
    compile_all(launches)
