"""Costs of the operators that weaving adds: merged launches, two-phase operators, copies, pushes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weft.capture.costs import Work, bytes_out
from weft.capture.costs_weft import INDEX, WEFT, _edges, _given, register_costs
from weft.capture.observer import Call
from weft.weave.together import FlatCalls, results, unflatten


def _spmm_push(call: Call) -> Work:
    """Rows pushed along the edges: read sequentially, added at their destinations."""
    x, edges = _given(call, "x"), _edges(call)
    row, tasks = x.shape[-1] * x.itemsize, prod(x.shape[:-2])
    return Work(
        flops=2 * edges * x.shape[-1] * tasks,
        stream=edges * INDEX * tasks + x.bytes + bytes_out(call),
        gather=2 * edges * row * tasks,
    )


def _together(call: Call) -> Work:
    """Several operators in one launch: the sum of what each costs."""
    parts, outs = unflatten(FlatCalls(*call.args)), iter(call.outs or ())
    total = Work()
    for part in parts:
        name, mine = f"weft.{part.name}", [next(outs) for _ in range(results(part.name))]
        work = WEFT[name](replace(call, name=name, args=part.arguments, outs=mine))
        total = Work(total.flops + work.flops, total.stream + work.stream, total.gather + work.gather)
    return total


def register() -> None:
    """Register the costs of these operators; each costs what the operator it belongs to costs."""
    whole = {
        "weight_grad_parts": "weight_grad",
        "linear_backward_parts": "linear_backward",
        "column_sum_parts": "column_sum",
        "bias_act_dropout_backward_bias_parts": "bias_act_dropout_backward_bias",
        "cross_entropy_rows_parts": "cross_entropy_rows",
        "add_parts": "column_sum",
        "copied": "column_sum",
        "side_by_side": "column_sum",
    }
    register_costs({f"weft.{part}": WEFT[f"weft.{operator}"] for part, operator in whole.items()})
    register_costs({"weft.spmm_push": _spmm_push, "weft.together": _together, "weft.together_": _together})
