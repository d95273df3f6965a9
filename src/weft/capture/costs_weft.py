"""Costs of Weft's own operators. Launches and workspaces come from running the launchers on meta tensors.

Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from weft.capture.costs import Work, bytes_in, bytes_out, elements, tensors
from weft.capture.observer import Call, Seen
from weft.capture.schemas import argument

INDEX = 4  # bytes of an edge's column
HASH = 20  # operations to draw one random number


def _given(call: Call, name: str) -> Any:
    """The argument of that name in the operator's schema; None if it is None or the operator has none."""
    return argument(call.name, call.args, name)


def _edges(call: Call) -> int:
    """E, from the packed CSR among the arguments: row offsets, then columns."""
    return _given(call, "csr")[1].numel


def _rows(call: Call) -> int:
    return _given(call, "csr")[0].numel - 1


def _plain_in(call: Call) -> int:
    """Bytes of the arguments that are tensors, not packed CSRs."""
    return sum(arg.bytes for arg in call.args if isinstance(arg, Seen))


def _tiles(width_bytes: int) -> int:
    """How often the edges are read: once for every 128 floats of a row."""
    return max(1, -(-width_bytes // 512))


def _spmm(call: Call) -> Work:
    x, weight = _given(call, "x"), _given(call, "weight")
    edges, tasks = _edges(call), prod(x.shape[:-2])
    row = x.shape[-1] * x.itemsize
    index = edges * (INDEX + (weight.itemsize if weight else 0)) * tasks * _tiles(row)
    flops = edges * x.shape[-1] * tasks * (2 + (weight is not None) + (_given(call, "col_scale") is not None))
    return Work(flops=flops, stream=index + bytes_out(call), gather=edges * row * tasks)


def _spmm_max_backward(call: Call) -> Work:
    grad, edges = _given(call, "grad"), _edges(call)
    row, tasks = grad.shape[-1], prod(grad.shape[:-2])
    return Work(
        flops=2 * edges * row * tasks,
        stream=edges * 2 * INDEX * tasks + bytes_out(call),
        gather=edges * row * tasks * (grad.itemsize + INDEX),
    )


def _sddmm(call: Call) -> Work:
    a, edges = _given(call, "a"), _edges(call)
    row, tasks = a.shape[-1] * a.itemsize, prod(a.shape[:-2])
    return Work(
        flops=2 * edges * a.shape[-1] * tasks,
        stream=edges * 2 * INDEX * tasks + bytes_out(call) + a.bytes,
        gather=edges * row * tasks,
    )


def _edge_softmax(call: Call) -> Work:
    return Work(flops=20 * elements(call.outs), stream=2 * _plain_in(call) + bytes_out(call))


def _attention(call: Call, packed: bool = False) -> Work:
    """One pass: scores and coefficients once per edge and head, rows gathered once per edge."""
    x, edges, rows = _given(call, "packed" if packed else "x"), _edges(call), _rows(call)
    heads = _given(call, "heads") if packed else x.shape[-2]
    width = x.shape[-1] - 2 * heads if packed else heads * x.shape[-1]
    tasks = next(tensors(call.outs)).numel // max(rows * width, 1)  # a block of a batch reads more rows than it has
    coefficients = edges * heads * tasks
    return Work(
        flops=coefficients * 40 + 4 * edges * width * tasks,
        stream=edges * INDEX * tasks + bytes_out(call),
        gather=edges * tasks * x.itemsize * (width + heads),
    )


def _attention_packed(call: Call) -> Work:
    return _attention(call, packed=True)


def _attention_backward(call: Call) -> Work:
    """One pass over the transpose: the gradient's rows and the statistics of every edge's destination."""
    grad, edges = _given(call, "grad"), _edges(call)
    heads, width = grad.shape[-2], grad.shape[-2] * grad.shape[-1]
    tasks = prod(grad.shape[:-3])
    coefficients = edges * heads * tasks
    return Work(
        flops=coefficients * 60 + 4 * edges * width * tasks,
        stream=2 * edges * INDEX * tasks + _plain_in(call) + bytes_out(call),
        gather=edges * tasks * (width * grad.itemsize + 3 * heads * 4),
    )


def _row_gradient(call: Call) -> Work:
    return Work(
        flops=4 * elements((_given(call, "grad"), _given(call, "out"))), stream=bytes_in(call) + bytes_out(call)
    )


def _attention_v2(call: Call) -> Work:
    x, edges = _given(call, "x_src"), _edges(call)
    width, tasks = prod(x.shape[-2:]), prod(x.shape[:-3])
    return Work(
        flops=edges * width * tasks * 8,
        stream=edges * INDEX * tasks + _plain_in(call) + bytes_out(call),
        gather=edges * width * tasks * x.itemsize,
    )


def _attention_v2_backward(call: Call) -> Work:
    """Two passes: one over the graph, one over the transpose."""
    x, edges = _given(call, "x_src"), _edges(call)
    width, tasks = prod(x.shape[-2:]), prod(x.shape[:-3])
    return Work(
        flops=edges * width * tasks * 24,
        stream=2 * edges * INDEX * tasks + 2 * _plain_in(call) + bytes_out(call),
        gather=3 * edges * width * tasks * x.itemsize,
    )


def _product(call: Call) -> Work:
    """``x [..., N, I]`` times ``weight [..., O, I]``, with the layer's epilogue."""
    weight, out = _given(call, "weight"), next(tensors(call.outs))
    drops = HASH * out.numel if _given(call, "rate") else 0
    return Work(flops=2 * out.numel * weight.shape[-1] + drops, stream=_plain_in(call) + bytes_out(call))


def _linear_backward(call: Call) -> Work:
    """The weight's gradient and, if needed, the input's: two products over the same rows."""
    grad, x = _given(call, "grad"), _given(call, "x")
    products = 1 + bool(_given(call, "wants_x"))
    drops = HASH * grad.numel if _given(call, "rate") else 0
    return Work(flops=2 * products * grad.numel * x.shape[-1] + drops, stream=bytes_in(call) + bytes_out(call))


def _weight_grad(call: Call) -> Work:
    grad, x = _given(call, "grad"), _given(call, "x")
    return Work(flops=2 * grad.numel * x.shape[-1], stream=bytes_in(call) + bytes_out(call))


def _pass(call: Call) -> Work:
    """One pass over everything, with one random number per element under dropout."""
    return Work(flops=(4 + HASH * _drops(call)) * elements(call.outs), stream=bytes_in(call) + bytes_out(call))


def _drops(call: Call) -> bool:
    """Whether the call drops: whether it has a clock."""
    return any(isinstance(arg, Seen) and arg.dtype == "int64" and arg.shape[-1:] == (2,) for arg in call.args)


def _batch_norm(call: Call) -> Work:
    """Statistics in one pass over the inputs, the result in another; backward a mask is drawn in both."""
    drops = _drops(call) * (2 if call.name.endswith("backward") else 1)
    return Work(flops=(8 + HASH * drops) * elements(call.outs), stream=2 * bytes_in(call) + bytes_out(call))


def _cross_entropy(call: Call) -> Work:
    logits, rows = _given(call, "logits"), _given(call, "rows")
    listed = rows.numel * logits.shape[-1] * prod(logits.shape[:-2])
    return Work(flops=12 * listed, stream=rows.bytes * 2 + bytes_out(call), gather=listed * logits.itemsize)


def _adam(call: Call) -> Work:
    """Weight, gradient and two moments read, three of them written; of the table of rates a row per task."""
    param = _given(call, "param")
    return Work(flops=12 * param.numel, stream=bytes_in(call) - _given(call, "hyper").bytes + 3 * param.bytes)


WEFT: dict[str, Callable[[Call], Work]] = {
    "weft.spmm": _spmm,
    "weft.spmm_max": _spmm,
    "weft.spmm_max_backward": _spmm_max_backward,
    "weft.sddmm": _sddmm,
    "weft.edge_softmax": _edge_softmax,
    "weft.edge_softmax_backward": _edge_softmax,
    "weft.graph_attention": _attention,
    "weft.graph_attention_packed": _attention_packed,
    "weft.graph_attention_packed_backward": _attention_backward,
    "weft.graph_attention_backward": _attention_backward,
    "weft.graph_attention_row_gradient": _row_gradient,
    "weft.graph_attention_v2": _attention_v2,
    "weft.graph_attention_v2_backward": _attention_v2_backward,
    "weft.linear": _product,
    "weft.linear_backward": _linear_backward,
    "weft.product": _product,
    "weft.weight_grad": _weight_grad,
    "weft.column_sum": _pass,
    "weft.split_rows": _pass,
    "weft.mean_heads": _pass,
    "weft.batch_norm_act_dropout": _batch_norm,
    "weft.batch_norm_act_dropout_backward": _batch_norm,
    "weft.normalise_act_dropout": _pass,
    "weft.layer_norm_act_dropout": _pass,
    "weft.layer_norm_act_dropout_backward": _pass,
    "weft.bias_act_dropout": _pass,
    "weft.bias_act_dropout_backward": _pass,
    "weft.bias_act_dropout_backward_bias": _pass,
    "weft.cross_entropy_rows": _cross_entropy,
    "weft.cross_entropy_rows_backward": _cross_entropy,
    "weft.adam_": _adam,
}


def register_costs(costs: dict[str, Callable[[Call], Work]]) -> None:
    """Add the costs of operators that a package above this one registers."""
    WEFT.update(costs)
