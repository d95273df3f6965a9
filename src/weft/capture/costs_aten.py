"""Costs of torch's operators, by families that move data in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from weft.capture.costs import Work, bytes_in, bytes_out, elements, tensors
from weft.capture.observer import Call
from weft.core.program import ALLOCATIONS


def _nothing(call: Call) -> Work:
    return Work(launches=0)


def _fill(call: Call) -> Work:
    return Work(stream=sum(t.bytes for t in tensors(call.outs)))


def _pointwise(call: Call) -> Work:
    return Work(flops=elements(call.outs), stream=bytes_in(call) + bytes_out(call))


def _costly_pointwise(call: Call) -> Work:
    """Exponentials and the like: ten operations per element."""
    return Work(flops=10 * elements(call.outs), stream=bytes_in(call) + bytes_out(call))


def _move(call: Call) -> Work:
    return Work(stream=bytes_in(call) + bytes_out(call))


def _reduce(call: Call) -> Work:
    return Work(flops=elements(call.args), stream=bytes_in(call) + bytes_out(call))


def _sum(call: Call) -> Work:
    """Inputs of another type than the result's are copied to it first, except halves, which are summed in place."""
    work, given, out = _reduce(call), next(tensors(call.args)), next(tensors(call.outs))
    if given.dtype == out.dtype or given.dtype in ("float16", "bfloat16"):
        return work
    copy = given.numel * out.itemsize
    return replace(work, stream=work.stream + 2 * copy, launches=2, pieces=(copy,))


def _rowwise(call: Call) -> Work:
    """Softmax and norms: a few passes over a row that stays in a cache."""
    return Work(flops=8 * elements(call.args), stream=bytes_in(call) + bytes_out(call))


def _gather(call: Call) -> Work:
    """Rows gathered by index: the result is gathered and written sequentially."""
    source, *rest = tensors((call.args, call.kwargs))
    index = sum(t.bytes for t in rest)
    masks = [t for t in rest if t.dtype == "bool"]
    # A mask becomes a list of positions, eight bytes each, before anything is gathered.
    found = sum(8 * elements(call.outs) * mask.numel // max(source.numel, 1) for mask in masks)
    return Work(stream=bytes_out(call) + index + 2 * found, gather=bytes_out(call), pieces=(found,))


def _scatter(call: Call) -> Work:
    """Values added to or written over existing ones by index."""
    target, *rest = tensors((call.args, call.kwargs))
    values = sum(t.bytes for t in rest)
    source = max((t.bytes for t in rest), default=0)
    copied = 0 if call.name.endswith("_") else 2 * target.bytes
    return Work(flops=elements(call.args) - target.numel, stream=values + copied, gather=2 * source)


def _sorted_scatter(call: Call) -> Work:
    """Rows added by an index that is sorted first: positions, their order, both sorted, and the sort's own copies."""
    work = _scatter(call)
    indices = sum(t.numel for t in tensors((call.args, call.kwargs)) if t.dtype == "int64")
    pieces = (8 * indices,) * 4 + (16 * indices,)
    return replace(work, stream=work.stream + 16 * 8 * indices, launches=10, pieces=pieces)


def _put(call: Call) -> Work:
    """``index_put``: sorted if values are accumulated, direct if they are written."""
    adds = call.kwargs.get("accumulate", call.args[3] if len(call.args) > 3 else False)
    return _sorted_scatter(call) if adds else _scatter(call)


def _matmul(call: Call) -> Work:
    """``[..., M, K] x [..., K, N]``, also with something added."""
    left, right = list(tensors(call.args))[-2:]
    flops = 2 * prod(left.shape) * (right.shape[-1] if len(right.shape) > 1 else 1)
    return Work(flops=flops, stream=bytes_in(call) + bytes_out(call))


SHORT = 4096  # elements that are sorted in place


def _sort(call: Call) -> Work:
    """A radix sort: eight passes over keys and positions, the positions as they were, and a second copy of both."""
    out, keys = bytes_out(call), next(tensors(call.args))
    pieces = (8 * keys.numel, (keys.itemsize + 8) * keys.numel) if max(keys.shape, default=0) > SHORT else ()
    return Work(flops=elements(call.args), stream=8 * (bytes_in(call) + out), launches=8, pieces=pieces)


FAMILIES: dict[Callable[[Call], Work], str] = {
    _nothing: "resize_ set_ lift_fresh " + " ".join(ALLOCATIONS),
    _fill: (
        "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill_ fill zero_ arange "
        "scalar_tensor eye rand rand_like randn randn_like randint randint_like bernoulli_ uniform_ normal_ "
        "exponential_ random_ linspace"
    ),
    _pointwise: (
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
    _costly_pointwise: (
        "exp exp_ exp2 expm1 log log_ log2 log1p sqrt sqrt_ rsqrt rsqrt_ sin cos tan tanh tanh_ tanh_backward "
        "sigmoid sigmoid_ sigmoid_backward elu elu_ elu_backward gelu gelu_ gelu_backward silu silu_ silu_backward "
        "mish mish_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward pow pow_ erf "
        "native_dropout binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits atan atan2 "
        "special_expit celu selu _fused_adam_ _fused_adamw_ _fused_sgd_ glu glu_backward bernoulli"
    ),
    _move: (
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
    _rowwise: (
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

ATEN: dict[str, Callable[[Call], Work]] = {
    f"aten.{name}": family for family, names in FAMILIES.items() for name in names.split()
}
