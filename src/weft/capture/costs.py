"""Turn an Observer's record into a Program, with the cost of every call: operations, bytes, kernel launches.

A cost is computed from the shapes of one :class:`~weft.capture.observer.ObservedCall`: :data:`ATEN` has the rules of
torch's operators, :data:`WEFT` those of Weft's; an unknown one is reported and counted as one pass over its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from weft.capture.observer import LIBRARY, ObservedCall, Observer, Seen, is_lt, tensors_in
from weft.core.program import ALLOCATIONS, MARKER_KEPT, Operator, Program, Value

KERNELS = "triton."  # launched outside of any operator


@dataclass(frozen=True)
class Work:
    """The cost of a call. ``launches``: kernels, if the launcher itself was not run to count them.

    ``pieces``: workspace blocks that are held during the call.
    """

    flops: float = 0.0
    stream: float = 0.0
    gather: float = 0.0
    launches: int = 1
    pieces: tuple[int, ...] = ()


def tensors(tree: Any) -> list[Seen]:
    """Every tensor in the arguments or results of a call."""
    return tensors_in(tree, Seen)


def bytes_in(call: ObservedCall) -> int:
    """Bytes of all tensor arguments of the call."""
    return sum(t.bytes for t in tensors((call.args, call.kwargs)))


def bytes_out(call: ObservedCall) -> int:
    """Bytes of all results."""
    return sum(t.bytes for t in tensors(call.outs))


def elements(tree: Any) -> int:
    """Elements of all tensors in a tree."""
    return sum(t.numel for t in tensors(tree))


# ---- Torch's operators, by families that move data in the same way


def _reduce(call: ObservedCall) -> Work:
    return Work(flops=elements(call.args), stream=bytes_in(call) + bytes_out(call))


def _sum(call: ObservedCall) -> Work:
    """Inputs of another type than the result's are copied to it first, except halves, which are summed in place."""
    work, source, out = _reduce(call), tensors(call.args)[0], tensors(call.outs)[0]
    if source.dtype == out.dtype or source.dtype in ("float16", "bfloat16"):
        return work
    copy = source.numel * out.itemsize
    return replace(work, stream=work.stream + 2 * copy, launches=2, pieces=(copy,))


def _gather(call: ObservedCall) -> Work:
    """Rows gathered by index: the result is gathered and written sequentially."""
    source, *rest = tensors((call.args, call.kwargs))
    index = sum(t.bytes for t in rest)
    masks = [t for t in rest if t.dtype == "bool"]
    # A mask becomes a list of positions, eight bytes each, before anything is gathered.
    positions = sum(8 * elements(call.outs) * mask.numel // max(source.numel, 1) for mask in masks)
    return Work(stream=bytes_out(call) + index + 2 * positions, gather=bytes_out(call), pieces=(positions,))


def _scatter(call: ObservedCall) -> Work:
    """Values added to or written over existing ones by index."""
    target, *rest = tensors((call.args, call.kwargs))
    values = sum(t.bytes for t in rest)
    source = max((t.bytes for t in rest), default=0)
    copied = 0 if call.name.endswith("_") else 2 * target.bytes
    return Work(flops=elements(call.args) - target.numel, stream=values + copied, gather=2 * source)


def _sorted_scatter(call: ObservedCall) -> Work:
    """Rows added by an index that is sorted first: positions, their order, both sorted, and the sort's own copies."""
    work = _scatter(call)
    indices = sum(t.numel for t in tensors((call.args, call.kwargs)) if t.dtype == "int64")
    pieces = (8 * indices,) * 4 + (16 * indices,)
    return replace(work, stream=work.stream + 16 * 8 * indices, launches=10, pieces=pieces)


def _put(call: ObservedCall) -> Work:
    """``index_put``: sorted if values are accumulated, direct if they are written."""
    adds = call.kwargs.get("accumulate", call.args[3] if len(call.args) > 3 else False)
    return _sorted_scatter(call) if adds else _scatter(call)


def _matmul(call: ObservedCall) -> Work:
    """``[..., M, K] x [..., K, N]``, also with something added."""
    left, right = tensors(call.args)[-2:]
    flops = 2 * prod(left.shape) * (right.shape[-1] if len(right.shape) > 1 else 1)
    return Work(flops=flops, stream=bytes_in(call) + bytes_out(call))


SHORT = 4096  # elements that are sorted in place


def _sort(call: ObservedCall) -> Work:
    """A radix sort: eight passes over keys and positions, the positions as they were, and a second copy of both."""
    out, keys = bytes_out(call), tensors(call.args)[0]
    pieces = (8 * keys.numel, (keys.itemsize + 8) * keys.numel) if max(keys.shape, default=0) > SHORT else ()
    return Work(flops=elements(call.args), stream=8 * (bytes_in(call) + out), launches=8, pieces=pieces)


FAMILIES: dict[Callable[[ObservedCall], Work], str] = {
    lambda call: Work(launches=0): "resize_ set_ lift_fresh " + " ".join(ALLOCATIONS),
    lambda call: Work(stream=bytes_out(call)): (
        "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill_ fill zero_ arange "
        "scalar_tensor eye rand rand_like randn randn_like randint randint_like bernoulli_ uniform_ normal_ "
        "exponential_ random_ linspace"
    ),
    lambda call: Work(flops=elements(call.outs), stream=bytes_in(call) + bytes_out(call)): (
        "add add_ sub sub_ rsub mul mul_ div div_ neg neg_ abs abs_ reciprocal reciprocal_ relu relu_ "
        "threshold_backward leaky_relu leaky_relu_ leaky_relu_backward clamp clamp_ clamp_min clamp_max clamp_min_ "
        "clamp_max_ where maximum minimum eq ne lt le gt ge logical_not logical_and logical_or logical_xor "
        "bitwise_not bitwise_and bitwise_or bitwise_xor __and__ __or__ bitwise_left_shift bitwise_right_shift "
        "__lshift__ __rshift__ floor_divide remainder fmod floor ceil round trunc sign isnan isinf isfinite "
        "nan_to_num masked_fill masked_fill_ addcmul addcmul_ addcdiv addcdiv_ lerp lerp_ square hardtanh "
        "hardtanh_backward hardtanh_ tril triu addr _prelu_kernel _prelu_kernel_backward native_dropout_backward "
        "hardswish hardsigmoid threshold nll_loss_forward nll_loss_backward nll_loss2d_forward mse_loss "
        "mse_loss_backward l1_loss smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward"
    ),
    # Exponentials and the like: ten operations per element.
    lambda call: Work(flops=10 * elements(call.outs), stream=bytes_in(call) + bytes_out(call)): (
        "exp exp_ exp2 expm1 log log_ log2 log1p sqrt sqrt_ rsqrt rsqrt_ sin cos tan tanh tanh_ tanh_backward "
        "sigmoid sigmoid_ sigmoid_backward elu elu_ elu_backward gelu gelu_ gelu_backward silu silu_ silu_backward "
        "mish mish_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward pow pow_ erf "
        "native_dropout binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits atan atan2 "
        "special_expit celu selu _fused_adam_ _fused_adamw_ _fused_sgd_ glu glu_backward bernoulli"
    ),
    lambda call: Work(stream=bytes_in(call) + bytes_out(call)): (
        "clone copy_ copy _to_copy cat stack constant_pad_nd roll flip repeat contiguous index_fill index_fill_ "
        "slice_backward select_backward slice_scatter select_scatter as_strided_scatter diagonal_backward "
        "repeat_interleave split_with_sizes_copy unfold_backward narrow_copy _foreach_copy_ expand_copy view_copy"
    ),
    _reduce: (
        "amax amin max min any all argmax argmin norm linalg_vector_norm var var_mean std std_mean logsumexp "
        "count_nonzero bincount _local_scalar_dense aminmax segment_reduce _segment_reduce_backward vdot cummax histc "
        "logcumsumexp"
    ),
    _sum: "sum mean prod cumsum cumprod nansum",
    # Softmax and norms: a few passes over a row that stays in a cache.
    lambda call: Work(flops=8 * elements(call.args), stream=bytes_in(call) + bytes_out(call)): (
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
        "native_layer_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training native_group_norm native_group_norm_backward cudnn_batch_norm "
        "cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward _fused_rms_norm "
        "_fused_rms_norm_backward _batch_norm_no_update"
    ),
    _gather: "index_select index gather embedding take _unsafe_index masked_select nonzero take_along_dim searchsorted",
    _scatter: (
        "index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ scatter_reduce "
        "scatter_reduce_ index_reduce index_reduce_ masked_scatter masked_scatter_ put_ index_select_backward"
    ),
    _sorted_scatter: "embedding_dense_backward",
    _put: "index_put index_put_ _index_put_impl_ _unsafe_index_put",
    _matmul: "mm bmm addmm baddbmm addbmm mv addmv dot",
    _sort: "sort topk argsort msort kthvalue unique_consecutive _unique2 unique_dim",
}

ATEN: dict[str, Callable[[ObservedCall], Work]] = {
    f"aten.{name}": family for family, names in FAMILIES.items() for name in names.split()
}


# ---- Weft's operators; launches and workspaces come from running the launchers on meta tensors
#
# Shapes: T tasks, N rows, M columns, E edges, F features, H heads, D features of a head.

INDEX = 4  # bytes of an edge's column
HASH = 20  # operations to draw one random number


def _edges(call: ObservedCall) -> int:
    """E, from the packed CSR among the arguments: row offsets, then columns."""
    return call.argument("csr")[1].numel


def _plain_in(call: ObservedCall) -> int:
    """Bytes of the arguments that are tensors, not packed CSRs."""
    return sum(arg.bytes for arg in call.args if isinstance(arg, Seen))


def _spmm(call: ObservedCall) -> Work:
    x, weight = call.argument("x"), call.argument("weight")
    edges, tasks = _edges(call), prod(x.shape[:-2])
    row = x.shape[-1] * x.itemsize
    tiles = max(1, -(-row // 512))  # the edges are read once for every 128 floats of a row
    index = edges * (INDEX + (weight.itemsize if weight else 0)) * tasks * tiles
    flops = edges * x.shape[-1] * tasks * (2 + (weight is not None) + (call.argument("col_scale") is not None))
    return Work(flops=flops, stream=index + bytes_out(call), gather=edges * row * tasks)


def _spmm_max_backward(call: ObservedCall) -> Work:
    grad, edges = call.argument("grad"), _edges(call)
    row, tasks = grad.shape[-1], prod(grad.shape[:-2])
    return Work(
        flops=2 * edges * row * tasks,
        stream=edges * 2 * INDEX * tasks + bytes_out(call),
        gather=edges * row * tasks * (grad.itemsize + INDEX),
    )


def _sddmm(call: ObservedCall) -> Work:
    a, edges = call.argument("a"), _edges(call)
    row, tasks = a.shape[-1] * a.itemsize, prod(a.shape[:-2])
    return Work(
        flops=2 * edges * a.shape[-1] * tasks,
        stream=edges * 2 * INDEX * tasks + bytes_out(call) + a.bytes,
        gather=edges * row * tasks,
    )


def _attention(call: ObservedCall, packed: bool = False) -> Work:
    """One pass: scores and coefficients once per edge and head, rows gathered once per edge."""
    x, edges, rows = call.argument("packed" if packed else "x"), _edges(call), call.argument("csr")[0].numel - 1
    heads = call.argument("heads") if packed else x.shape[-2]
    width = x.shape[-1] - 2 * heads if packed else heads * x.shape[-1]
    tasks = tensors(call.outs)[0].numel // max(rows * width, 1)  # a block of a batch reads more rows than it has
    coefficients = edges * heads * tasks
    return Work(
        flops=coefficients * 40 + 4 * edges * width * tasks,
        stream=edges * INDEX * tasks + bytes_out(call),
        gather=edges * tasks * x.itemsize * (width + heads),
    )


def _attention_backward(call: ObservedCall) -> Work:
    """One pass over the transpose: the gradient's rows and the statistics of every edge's destination."""
    grad, edges = call.argument("grad"), _edges(call)
    heads, width = grad.shape[-2], grad.shape[-2] * grad.shape[-1]
    tasks = prod(grad.shape[:-3])
    coefficients = edges * heads * tasks
    return Work(
        flops=coefficients * 60 + 4 * edges * width * tasks,
        stream=2 * edges * INDEX * tasks + _plain_in(call) + bytes_out(call),
        gather=edges * tasks * (width * grad.itemsize + 3 * heads * 4),
    )


def _attention_v2(call: ObservedCall, flops: int = 8, passes: int = 1, gathers: int = 1) -> Work:
    """Forward one pass; backward two, one over the graph and one over the transpose."""
    x, edges = call.argument("x_src"), _edges(call)
    width, tasks = prod(x.shape[-2:]), prod(x.shape[:-3])
    return Work(
        flops=edges * width * tasks * flops,
        stream=passes * (edges * INDEX * tasks + _plain_in(call)) + bytes_out(call),
        gather=gathers * edges * width * tasks * x.itemsize,
    )


def _product(call: ObservedCall) -> Work:
    """``x [..., N, I]`` times ``weight [..., O, I]``, with the layer's epilogue."""
    weight, out = call.argument("weight"), tensors(call.outs)[0]
    drops = HASH * out.numel if call.argument("rate") else 0
    return Work(flops=2 * out.numel * weight.shape[-1] + drops, stream=_plain_in(call) + bytes_out(call))


def _linear_backward(call: ObservedCall) -> Work:
    """The weight's gradient and, if needed, the input's: two products over the same rows."""
    grad, x = call.argument("grad"), call.argument("x")
    products = 1 + bool(call.argument("wants_x"))
    drops = HASH * grad.numel if call.argument("rate") else 0
    return Work(flops=2 * products * grad.numel * x.shape[-1] + drops, stream=bytes_in(call) + bytes_out(call))


def _pass(call: ObservedCall) -> Work:
    """One pass over everything, with one random number per element under dropout."""
    return Work(flops=(4 + HASH * _drops(call)) * elements(call.outs), stream=bytes_in(call) + bytes_out(call))


def _drops(call: ObservedCall) -> bool:
    """Whether the call drops: whether it has a clock."""
    return any(isinstance(arg, Seen) and arg.dtype == "int64" and arg.shape[-1:] == (2,) for arg in call.args)


def _batch_norm(call: ObservedCall) -> Work:
    """Statistics in one pass over the inputs, the result in another; backward a mask is drawn in both."""
    drops = _drops(call) * (2 if call.name.endswith("backward") else 1)
    return Work(flops=(8 + HASH * drops) * elements(call.outs), stream=2 * bytes_in(call) + bytes_out(call))


def _cross_entropy(call: ObservedCall) -> Work:
    logits, rows = call.argument("logits"), call.argument("rows")
    listed = rows.numel * logits.shape[-1] * prod(logits.shape[:-2])
    return Work(flops=12 * listed, stream=rows.bytes * 2 + bytes_out(call), gather=listed * logits.itemsize)


def _adam(call: ObservedCall) -> Work:
    """Weight, gradient and two moments read, three of them written; of the table of rates a row per task."""
    param = call.argument("param")
    return Work(flops=12 * param.numel, stream=bytes_in(call) - call.argument("hyper").bytes + 3 * param.bytes)


WEFT: dict[str, Callable[[ObservedCall], Work]] = {
    "weft.spmm": _spmm,
    "weft.spmm_max": _spmm,
    "weft.spmm_max_backward": _spmm_max_backward,
    "weft.sddmm": _sddmm,
    **dict.fromkeys(
        ("weft.edge_softmax", "weft.edge_softmax_backward"),
        lambda call: Work(flops=20 * elements(call.outs), stream=2 * _plain_in(call) + bytes_out(call)),
    ),
    "weft.graph_attention": _attention,
    "weft.graph_attention_packed": lambda call: _attention(call, packed=True),
    "weft.graph_attention_packed_backward": _attention_backward,
    "weft.graph_attention_backward": _attention_backward,
    "weft.graph_attention_v2": _attention_v2,
    "weft.graph_attention_v2_backward": lambda call: _attention_v2(call, flops=24, passes=2, gathers=3),
    "weft.linear": _product,
    "weft.linear_backward": _linear_backward,
    "weft.product": _product,
    "weft.weight_grad": lambda call: Work(
        flops=2 * call.argument("grad").numel * call.argument("x").shape[-1], stream=bytes_in(call) + bytes_out(call)
    ),
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


# ---- The Program: one Value per storage (kind, lifetime), one Operator per call.


def program_of(
    observer: Observer,
    resident: Sequence[int],
    kinds: Mapping[int, str],
    *,
    part: slice = slice(None),
    setup: int | None = None,
    carried: Sequence[int] = (),
    left: Sequence[int] = (),
) -> Program:
    """The Program of ``part`` of the calls.

    ``resident`` are the storages that were alive before; ``kinds`` gives the kind of kept storages (default
    ``"constant"``). Writes to storages of kind ``"weight"`` separate the update from the evaluation. ``setup``: the
    calls, from the first one on, run once, those before that number to set up and the others in a first step; storages
    of a known kind stay.
    ``carried`` are storages that a step takes over from the previous one, ``left`` those it leaves for the next.
    """
    calls = observer.calls[part]
    if setup is None:
        phases = phases_of(calls, {number for number, kind in kinds.items() if kind == "weight"})
        born = [number for call in calls for number in call.made]
        # A module that keeps an activation keeps its autograd graph, numbers from the host included.
        born += [number for number in left if number not in set(resident)]
    else:
        phases = ["preparation" if number < setup else "warm-up" for number in range(len(calls))]
        # Also storages made without a call: numbers copied from the host.
        born = [storage.number for storage in observer.storages if storage.born < len(calls)]
    ids = {number: position for position, number in enumerate(dict.fromkeys([*resident, *carried, *born]))}
    step = dict.fromkeys([*carried, *born], "temporary") | born_kinds(calls, phases)
    step |= {number: kinds.get(number, "constant") for number in resident}
    step |= {number: kinds[number] for number in born if number in kinds}
    storages = [observer.storages[number] for number in ids]
    values = tuple(Value(s.bytes, step[s.number], s.shape, s.dtype) for s in storages)
    operators = tuple(_operator(call, phase, ids) for call, phase in zip(calls, phases, strict=True))
    if setup is not None:
        stays = tuple(ids[number] for number in born if number in kinds)
        operators += (Operator(MARKER_KEPT, "warm-up", stays, ()),)
    unknown = {
        call.name
        for call in calls
        if not (call.name in ATEN or call.name in WEFT or call.name.startswith(KERNELS)) or not call.inside.seen
    }
    return Program(
        values=values,
        operators=operators,
        resident=tuple(ids[number] for number in resident),
        unknown=tuple(sorted(unknown)),
        carried=tuple(ids[number] for number in carried),
        left=tuple(ids[number] for number in left),
    )


def work_of(call: ObservedCall) -> Work:
    """The cost of a call; without a rule, that of reading and writing its tensors once."""
    rule = ATEN.get(call.name) or WEFT.get(call.name)
    return rule(call) if rule is not None else Work(stream=bytes_in(call) + bytes_out(call))


def phases_of(calls: Sequence[ObservedCall], weights: set[int]) -> list[str]:
    """The phase of every call: backward while autograd runs, then update until the weights are written.

    Evaluation runs without gradients: a later call that reads weights with gradients enabled begins the next stack's
    forward pass, and so does the first call on another stream, if stacks have separate streams.
    Calls of a merged step carry their phase, except that writing weights is always an update.
    """
    phases, phase, stream = [], "forward", None
    for call in calls:
        elsewhere, stream = call.stream != stream, call.stream
        if call.phase is not None:
            phase = "update" if call.phase != "evaluation" and weights & set(call.writes) else call.phase
            phases.append(phase)
            continue
        if call.in_backward:
            phase = "backward"
        elif phase == "backward":
            phase = "update"
        elif phase == "evaluation" and (elsewhere or (call.grad_enabled and weights & set(call.reads))):
            phase = "forward"
        phases.append(phase)
        if phase == "update" and weights & set(call.writes):
            phase = "evaluation"
    return phases


def born_kinds(calls: Sequence[ObservedCall], phases: Sequence[str]) -> dict[int, str]:
    """The kind of every storage that the step makes: those alive when the backward pass starts are activations."""
    kinds: dict[int, str] = {}
    for call, phase in zip(calls, phases, strict=True):
        for number in call.made:
            kinds[number] = "gradient" if phase == "backward" else "temporary"
        if phase == "backward":
            for number in call.reads:
                if kinds.get(number) == "temporary":
                    kinds[number] = "activation"
    return kinds


def _operator(call: ObservedCall, phase: str, ids: Mapping[int, int]) -> Operator:
    work, inside = work_of(call), call.inside
    return Operator(
        name=call.name,
        phase=phase,
        reads=tuple(ids[n] for n in call.reads if n in ids),
        writes=tuple(ids[n] for n in call.writes if n in ids),
        flops=float(work.flops),
        stream_bytes=float(work.stream),
        gather_bytes=float(work.gather),
        launches=work.launches if inside.launches is None else inside.launches,
        workspace=sum(inside.pieces) or sum(work.pieces),
        frees=tuple(ids[n] for n in call.frees if n in ids),
        library=inside.library or call.name in LIBRARY,
        pieces=inside.pieces or work.pieces,
        stream=call.stream,
        engine=call.in_backward,
        lt=inside.lt or is_lt(call),
    )
