"""Shapes of results on the meta device, for operators whose own meta rule in torch is slow to load.

Some of torch's rules are written in Python and import its compiler on first use: 0.8 s of a plan for built-in models,
before anything is estimated. This module covers the common cases; the rest is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode


def shape_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of ``func`` on meta tensors, or NotImplemented."""
    rule = RULES.get(func)
    if rule is None:
        return WITH_OPTIONS[func](*args, **kwargs) if func in WITH_OPTIONS else NotImplemented
    if rule in (pointwise, in_place) and "alpha" in kwargs and args[0].is_floating_point():
        kwargs = {**kwargs, "alpha": None}  # a factor changes no shape
    plain = all(value is None or value is False for value in kwargs.values())  # left out or switched off
    return rule(*args) if plain else NotImplemented


def new_empty(tensor: Tensor, size: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """A result of the type of ``tensor`` or of another: torch's own rule is written in Python and takes 20 us."""
    if not tensor.is_meta or device not in (None, tensor.device) or any(options.values()):
        return NotImplemented
    return torch.empty(size, dtype=dtype or tensor.dtype, device=tensor.device)


def arange(*ends: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """A row of whole numbers, up to the last of ``ends``."""
    begin, end = (0, *ends)[-2:]
    fits = type(begin) is type(end) is int and begin <= end and device is not None
    if not fits or torch.device(device).type != "meta":
        return NotImplemented
    return torch.empty(end - begin, dtype=dtype or torch.int64, device=device)


def index(tensor: Tensor, positions: Sequence[Any]) -> Any:
    """Rows by a list of positions."""
    rows = positions[0] if len(positions) == 1 else None
    if not _dense(tensor) or tensor.dim() == 0 or not _dense(rows) or rows.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return new_empty(tensor, (*rows.shape, *tensor.shape[1:]))


def sort(tensor: Tensor, *args: Any, **options: Any) -> Any:
    """The elements in order, and their former positions."""
    if not _dense(tensor):
        return NotImplemented
    return new_empty(tensor, tensor.shape), new_empty(tensor, tensor.shape, dtype=torch.int64)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A result of the right size for dense tensors of one type that differ in ``dim`` alone."""
    first = tensors[0]
    dim %= max(first.dim(), 1)
    if not 0 < first.dim() < 4:  # four dimensions may be laid out in another order
        return NotImplemented
    rest = [*first.shape[:dim], *first.shape[dim + 1 :]]
    for tensor in tensors:
        alike = tensor.is_meta and tensor.dtype == first.dtype and tensor.dim() == first.dim()
        if not alike or [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != rest:
            return NotImplemented
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return new_empty(first, shape)


def cumsum(tensor: Tensor, dim: int) -> Any:
    """A result of the same shape; whole numbers are added up in 64 bits."""
    if not tensor.is_meta or not tensor.is_contiguous():
        return NotImplemented
    return new_empty(tensor, tensor.shape, dtype=tensor.dtype if tensor.is_floating_point() else torch.int64)


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A result with one dimension more, for tensors of one shape and type."""
    first = tensors[0]
    if not _in_order(tensors) or any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        return NotImplemented
    shape = list(first.shape)
    shape.insert(dim % (first.dim() + 1), len(tensors))
    return new_empty(first, shape)


def pointwise(*operands: Any) -> Any:
    """A result of the operands' broadcast shape, and of the type that the first two promote to."""
    tensors = [value for value in operands if isinstance(value, Tensor)]
    return _made(tensors, torch.result_type(*operands[:2]) if len(operands) > 1 else tensors[0].dtype)


def floating(*operands: Any) -> Any:
    """The same for operators with a floating-point result, if one operand is floating-point."""
    kind = torch.result_type(*operands[:2]) if len(operands) > 1 else operands[0].dtype
    return pointwise(*operands) if kind.is_floating_point else NotImplemented


def clamp(tensor: Tensor, low: Any = None, high: Any = None) -> Any:
    """A result like the argument, for bounds of its own kind."""
    fits = all(type(bound) is int or tensor.is_floating_point() for bound in (low, high) if bound is not None)
    return pointwise(tensor) if fits and tensor.dtype != torch.bool else NotImplemented


def softmax(tensor: Tensor, dim: int, widen: bool) -> Any:
    """A result like the argument."""
    return new_empty(tensor, tensor.shape) if _dense(tensor) and not widen else NotImplemented


def cross_entropy(logits: Tensor, target: Tensor, weight: Any = None, positive: Any = None, reduction: int = 1) -> Any:
    """The loss of every label, if there is no reduction."""
    fits = _dense(logits) and _dense(target) and logits.shape == target.shape and logits.dtype == target.dtype
    plain = reduction == 0 and weight is None and positive is None
    return new_empty(logits, logits.shape) if fits and plain else NotImplemented


def softmax_backward(grad: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Any:
    """A gradient like the result."""
    fits = _dense(grad) and _dense(result) and grad.shape == result.shape and dtype == grad.dtype == result.dtype
    return new_empty(grad, grad.shape) if fits else NotImplemented


def reduced(tensor: Tensor, dims: Any = None, keep: bool = False) -> Any:
    """A result without the dimensions that are summed over, or with one of each."""
    if not dims or tensor.dim() == 0 or not tensor.is_floating_point() or not _in_order([tensor]):
        return NotImplemented
    gone = {dim % tensor.dim() for dim in dims}
    sizes = [1 if dim in gone else size for dim, size in enumerate(tensor.shape)]
    return new_empty(tensor, sizes if keep else [size for dim, size in enumerate(sizes) if dim not in gone])


def addmm(bias: Tensor, left: Tensor, right: Tensor) -> Any:
    """``[M, K] x [K, N]`` and a row that is added to each of the result's."""
    fits = bias.shape == right.shape[1:] and bias.dtype == left.dtype
    return product(left, right) if fits else NotImplemented


def truth(tensor: Tensor, dim: int, keep: bool = False) -> Any:
    """One bool per row, over one dimension."""
    if tensor.dim() == 0 or not _in_order([tensor]):
        return NotImplemented
    dim %= tensor.dim()
    middle = [1] if keep else []
    return new_empty(tensor, [*tensor.shape[:dim], *middle, *tensor.shape[dim + 1 :]], dtype=torch.bool)


def argmax(tensor: Tensor, dim: Any = None, keep: bool = False) -> Any:
    """One position per row, over one dimension."""
    rows = NotImplemented if dim is None else truth(tensor, dim, keep)
    return rows if rows is NotImplemented else new_empty(rows, rows.shape, dtype=torch.int64)


def gather(tensor: Tensor, dim: int, positions: Tensor) -> Any:
    """A value per position."""
    fits = _dense(positions) and tensor.is_meta and positions.dim() == tensor.dim()
    return new_empty(tensor, positions.shape) if fits else NotImplemented


def index_copy_(target: Tensor, dim: int, positions: Tensor, source: Tensor) -> Any:
    """The target itself, for rows that fit."""
    sizes = list(target.shape)
    sizes[dim % target.dim()] = positions.numel()
    fits = target.is_meta and source.is_meta and target.dtype == source.dtype
    return target if fits and list(source.shape) == sizes else NotImplemented


def index_copy(target: Tensor, dim: int, positions: Tensor, source: Tensor) -> Any:
    """A copy of the target with those rows."""
    fits = _dense(target) and index_copy_(target, dim, positions, source) is target
    return new_empty(target, target.shape) if fits else NotImplemented


def product(left: Tensor, right: Tensor, dims: int = 2) -> Any:
    """``[..., M, K] x [..., K, N]`` with ``dims`` dimensions."""
    fits = left.dim() == right.dim() == dims and left.shape[:-2] == right.shape[:-2]
    fits = fits and left.shape[-1] == right.shape[-2] and left.is_meta and right.is_meta and left.dtype == right.dtype
    return new_empty(left, (*left.shape[:-1], right.shape[-1])) if fits else NotImplemented


def layer_norm(tensor: Tensor, sizes: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """The result, and mean and deviation of every row, which are never halves."""
    depth = tensor.dim() - len(sizes)
    if not _dense(tensor) or tuple(tensor.shape[depth:]) != tuple(sizes):
        return NotImplemented
    rows, dtype = (*tensor.shape[:depth], *(1 for _ in sizes)), torch.promote_types(tensor.dtype, torch.float32)
    return (new_empty(tensor, tensor.shape), *(new_empty(tensor, rows, dtype=dtype) for _ in range(2)))


def batch_norm(tensor: Tensor, weight: Any, bias: Any, mean: Any, spread: Any, training: bool, *rest: Any) -> Any:
    """The result, and mean and deviation of every column, which are never halves."""
    if not training or not _dense(tensor) or tensor.dim() != 2:
        return NotImplemented
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return (new_empty(tensor, tensor.shape), *(new_empty(tensor, tensor.shape[1], dtype=dtype) for _ in range(2)))


def gradients(grad: Tensor, inputs: Sequence[Any], requested: Sequence[bool]) -> Any:
    """The requested ones of the gradients of ``inputs``."""
    pairs = list(zip(requested, inputs, strict=True))
    if not _dense(grad) or any(yes and not _dense(value) for yes, value in pairs):
        return NotImplemented
    return tuple(new_empty(value, value.shape) if yes else None for yes, value in pairs)


def _dense(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_meta and tensor.is_contiguous()


def comparison(*operands: Any) -> Any:
    """One bool per element."""
    return _made([value for value in operands if isinstance(value, Tensor)], torch.bool)


def split_out(tensor: Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[Tensor]) -> Any:
    """Parts of a tensor into tensors of their sizes; nothing is returned."""
    shapes = [[*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]] for size in sizes]
    fits = dim >= 0 and tensor.is_meta and shapes == [list(part.shape) for part in out]
    return None if fits else NotImplemented


def where_out(condition: Tensor, first: Tensor, second: Tensor, out: Tensor) -> Any:
    """``torch.where`` into a tensor of the right shape."""
    return out if _shape([condition, first, second, out]) == tuple(out.shape) else NotImplemented


def where(condition: Tensor, first: Tensor, second: Tensor) -> Any:
    """``torch.where``."""
    return _made([condition, first, second], torch.result_type(first, second))


def in_place(target: Tensor, *operands: Any) -> Any:
    """The target itself, if the operands can be broadcast and cast to it."""
    tensors = [target, *(value for value in operands if isinstance(value, Tensor))]
    fits = target.is_meta and torch.can_cast(torch.result_type(target, *operands), target.dtype)
    return target if fits and _shape(tensors) == tuple(target.shape) else NotImplemented


def _made(tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """A result for operands that broadcast; if they do not, torch raises the error."""
    shape = _shape(tensors)
    whole = [tensor for tensor in tensors if tuple(tensor.shape) == shape and 0 not in tensor.stride()]
    if shape is None or not all(tensor.is_meta for tensor in tensors):
        return NotImplemented
    first = tensors[0]
    if _in_order(tensors) or (tuple(first.shape) == shape and _dense(first)):
        return new_empty(first, shape, dtype=dtype)
    if len(whole) != len(tensors) or len(set(first.stride())) < first.dim():
        return NotImplemented
    # With the first operand's order of dimensions; its strides are distinct.
    strides, step = [0] * first.dim(), 1
    for dim in sorted(range(first.dim()), key=first.stride):
        strides[dim], step = step, step * first.shape[dim]
    return torch.empty_strided(first.shape, strides, dtype=dtype, device=first.device)


def _in_order(tensors: Sequence[Tensor]) -> bool:
    """Whether the result is contiguous: no operand is transposed, though it may be a slice."""
    for tensor in tensors:
        steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1 and step != 0]
        if not tensor.is_meta or steps != sorted(steps, reverse=True):
            return False
    return True


def _shape(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The broadcast shape; None if there is none."""
    depth = max(tensor.dim() for tensor in tensors)
    rows = [(1,) * (depth - tensor.dim()) + tuple(tensor.shape) for tensor in tensors]
    by_dim = [{size for size in sizes if size != 1} for sizes in zip(*rows, strict=True)]
    return None if any(len(sizes) > 1 for sizes in by_dim) else tuple(sizes.pop() if sizes else 1 for sizes in by_dim)


aten = torch.ops.aten
RULES: dict[Any, Callable[..., Any]] = {
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.cumsum.default: cumsum,
    aten.where.self: where,
    aten.clamp.default: clamp,
    aten.mm.default: product,
    aten.addmm.default: addmm,
    aten.bmm.default: partial(product, dims=3),
    aten.index.Tensor: index,
    aten.mean.dim: reduced,
    aten.sum.dim_IntList: reduced,
    aten.argmax.default: argmax,
    aten.gather.default: gather,
    aten.index_copy_.default: index_copy_,
    aten.index_copy.default: index_copy,
    aten.bitwise_not.default: pointwise,
    aten.addcmul.default: pointwise,
    aten.all.dim: truth,
    aten.logsumexp.default: reduced,
    aten.binary_cross_entropy_with_logits.default: cross_entropy,
    aten._softmax.default: softmax,
    aten._log_softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: softmax_backward,
    aten.native_batch_norm.default: batch_norm,
    # The bias has the weight's size.
    aten.native_batch_norm_backward.default: lambda grad, x, weight, *rest: gradients(
        grad, (x, weight, weight), rest[-1]
    ),
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: lambda grad, x, sizes, mean, deviation, weight, bias, requested: gradients(
        grad, (x, weight, bias), requested
    ),
    **{
        getattr(aten, name).default: floating
        for name in ["reciprocal", "rsqrt", "sqrt", "exp", "log", "neg", "abs", "relu", "sigmoid", "tanh", "erf"]
    },
    **{getattr(aten, name).default: pointwise for name in ["zeros_like", "ones_like", "empty_like"]},
    **{
        getattr(aten, name).Tensor: pointwise
        for name in ["add", "sub", "mul", "remainder", "bitwise_and", "bitwise_or", "bitwise_xor"]
    },
    **{getattr(aten, name).Scalar: pointwise for name in ["add", "sub", "mul", "rsub", "remainder"]},
    aten.div.Tensor: floating,
    aten.div.Scalar: floating,
    **{getattr(aten, name).Tensor: in_place for name in ["add_", "sub_", "mul_"]},
    **{getattr(aten, name).default: comparison for name in ["isinf", "isnan", "logical_not", "logical_and"]},
    **{getattr(aten, name).Tensor: comparison for name in ["eq", "ne", "lt", "le", "gt", "ge"]},
    **{getattr(aten, name).Scalar: comparison for name in ["eq", "ne", "lt", "le", "gt", "ge"]},
}
WITH_OPTIONS: dict[Any, Callable[..., Any]] = {
    aten.arange.default: arange,
    aten.arange.start: arange,
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.new_empty.default: new_empty,
    aten.where.self_out: where_out,
    aten.split_with_sizes_copy.out: split_out,
}


# ---- Torch's CUDA code paths, where they differ
#
# Two are known to matter. Dropout on a GPU is one kernel that saves a mask of one byte per element; elsewhere the mask
# has the input's type. And a gather by 32-bit positions first copies them to 64 bits.


class GpuRules(TorchFunctionMode):
    """Redirects functions that have a CUDA code path of their own to it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and not args[0].requires_grad:  # autograd would save the 32-bit positions
            narrow = isinstance(args[1], Tensor) and args[1].dtype == torch.int32
            return args[0][args[1].long() if narrow else args[1]]
        return func(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    # torch.utils.checkpoint recomputes outside of this mode, and compares what is saved.
    repeated = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if training and not inplace and 0.0 < p < 1.0 and not repeated:
        return torch.native_dropout(input, p, True)[0]
    return dropout(input, p, training, inplace)
