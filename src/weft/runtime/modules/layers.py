"""CountedDropout: ``nn.Dropout`` and ``F.dropout`` of a user's module draw their masks as Weft's own layers do.

Torch's generator has no notion of members or steps: a stack could not share its draws, and a resumed, stacked or
compiled run would get other masks. Here a mask is a function of (seed, step, site, element); the site counts the
calls of one pass through the model, after the sites of its own random modules.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import linear as torch_linear
from torch.overrides import TorchFunctionMode

from weft.nn.epilogue import next_mask
from weft.nn.models import is_named_model
from weft.nn.pyg.edges import forget, is_bypass
from weft.ops.dense.bias_act_dropout import dropout, dropout_rows
from weft.ops.dense.linear import is_tall, linear
from weft.ops.launch.backend import on_gpu
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.modules.build import is_compiled

# ---- Detect functorch transforms, forward-mode AD and saved-tensor hooks.
#
# In these contexts, replacing torch's operators by Weft's inside a user's module would be observable.

PLAIN = (Tensor, nn.Parameter)  # a subclass of Tensor may override operators


def operators_are_observed() -> bool:
    """Whether forward-mode AD (``torch.func.jvp``) or saved-tensor hooks are active.

    ``torch.utils.checkpoint`` has such hooks: it recomputes a layer, and compares what is saved.
    """
    return forward_ad._current_level >= 0 or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def vmap_sizes(tensor: Tensor) -> dict[int, int] | None:
    """Size of the batch at every level of ``vmap``; None inside other transforms (``torch.func.grad``)."""
    functorch, sizes = torch._C._functorch, {}
    while functorch.is_functorch_wrapped_tensor(tensor):
        if not functorch.is_batchedtensor(tensor):
            return None
        level, dim = functorch.maybe_get_level(tensor), functorch.maybe_get_bdim(tensor)
        tensor = functorch.get_unwrapped(tensor)
        sizes[level] = tensor.shape[dim]
    return sizes


class CountedDropout(TorchFunctionMode):
    """Inside, dropout takes its masks from ``clock [2]`` = (seed, step), the first call at ``site``.

    Where nodes are spread over ranks (``reduce``), a tensor with a row per node has the mask of its rows.
    """

    def __init__(self, clock: Tensor, site: int, reduce: Reduce = ONE_RANK) -> None:
        super().__init__()
        self._clock, self._site, self._with_grad = clock, site, torch.is_grad_enabled()
        self._reduce = reduce

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_dropout and not torch.compiler.is_compiling():
            x, p, training, inplace = _arguments(*args, **(kwargs or {}))
            if training and not inplace and isinstance(p, (int, float)) and 0.0 < p < 1.0 and self._serves(x):
                site = self._next_site()
                if x.numel() == 0:
                    return x
                if self._reduce.ranks > 1 and x.dim() > 1 and x.shape[0] == self._reduce.rows:
                    return dropout_rows(x, p, self._clock, site, self._reduce.first_row)
                rows = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x.reshape(1, 1) if x.dim() == 0 else x
                return dropout(rows.contiguous(), p, self._clock, site).view(x.shape)
        if func is next_mask and self._serves(args[0]):
            return args[1], self._clock, self._next_site()
        if is_bypass(func):
            forget(args[0])  # its edges may change unseen
        return func(*args, **(kwargs or {}))

    def _serves(self, x: Any) -> bool:
        """Whether ``x`` is on the clock's device, and no derivative is taken that only torch's dropout supports."""
        if type(x) not in PLAIN or not x.is_floating_point() or x.device != self._clock.device:
            return False
        observed = operators_are_observed() or (self._with_grad and not torch.is_grad_enabled())
        return not observed and vmap_sizes(x) is not None

    def _next_site(self) -> int:
        self._site += 1
        return self._site - 1


def _arguments(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Any, float, bool, bool]:
    return input, p, training, inplace


# ---- StackedRows: fetch and sum rows by shared positions at the speed of one task, in stacks of users' modules on a
# CPU.
#
# A user's module says ``x[src]``, ``x.index_select(0, src)`` and ``out.scatter_add_(0, dst, messages)``, as PyG's do.
# Under ``vmap`` torch turns them into a gather and a scatter of single numbers (T = 4, 32,517 edges, 32 features, one
# thread: 14.8 and 14.2 ms, against 0.6 and 0.8 ms per task alone). All tasks use the same positions, so here they are
# rows of one long matrix, fetched and added as rows.
#
# Shapes: T tasks, N rows, E positions, F features.

FETCHES = frozenset((torch.index_select, Tensor.index_select))
POSITIONS = (torch.int64, torch.int32)


class StackedRows(TorchFunctionMode):
    """Inside, rows of ``x [N, ...]`` that differ by task are fetched and added up by positions that do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FETCHES and len(args) == 3 and not kwargs and _along_rows(*args[:2]) and _serves(args[0], args[2]):
            return FetchRows.apply(args[0], args[2])
        if func is Tensor.__getitem__ and _serves(*args):
            return FetchRows.apply(*args)
        if func is Tensor.scatter_add_ and len(args) == 4 and not kwargs:
            index = _shared_index(*args)
            if index is not None:
                return args[0].add_(AddRows.apply(args[3], index, args[0].shape[0]))
        return func(*args, **kwargs)


class FetchRows(torch.autograd.Function):
    """``x [N, ...]`` and positions ``[E]`` to ``[E, ...]``."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, index = inputs
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return AddRows.apply(grad, index, ctx.rows), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, index: Tensor) -> tuple[Tensor, int]:
        """``x [T, N, ...]`` as ``[T N, ...]``, with the positions of every task."""
        x, tasks = x.movedim(in_dims[0], 0), info.batch_size
        rows_of_all = x.flatten(0, 1).index_select(0, _places(index, x.shape[1], tasks))
        return rows_of_all.unflatten(0, (tasks, index.numel())), 0


class AddRows(torch.autograd.Function):
    """Sum of the rows ``[E, ...]`` at every position: ``[N, ...]``."""

    @staticmethod
    def forward(rows: Tensor, index: Tensor, count: int) -> Tensor:
        return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, index, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return FetchRows.apply(grad, index), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor, index: Tensor, count: int) -> tuple[Tensor, int]:
        """The rows of all tasks, added into ``[T N, ...]``."""
        rows, tasks = rows.movedim(in_dims[0], 0), info.batch_size
        positions = _places(index, count, tasks)
        total = rows.new_zeros(tasks * count, *rows.shape[2:]).index_add(0, positions, rows.flatten(0, 1))
        return total.unflatten(0, (tasks, count)), 0


def _places(index: Tensor, rows: int, tasks: int) -> Tensor:
    """Positions ``[E]`` as those of every task in ``[T N]`` rows: ``[T E]``."""
    first = torch.arange(0, rows * tasks, rows, device=index.device, dtype=index.dtype) if rows else index[:0]
    return (first[:, None] + index).flatten()


def _along_rows(x: Any, dim: Any) -> bool:
    return isinstance(x, Tensor) and isinstance(dim, int) and x.dim() > 0 and dim in (0, -x.dim())


def _serves(x: Any, index: Any, *more: Any) -> bool:
    """Whether ``x`` is one tensor per task of a single ``vmap``, and ``index`` a list of positions for all of them."""
    if more or type(x) not in PLAIN or type(index) not in PLAIN or x.dim() == 0 or 0 in x.shape:
        return False
    if index.dim() != 1 or index.dtype not in POSITIONS or index.numel() == 0 or vmap_sizes(index) != {}:
        return False
    batches = vmap_sizes(x)
    single = batches is not None and len(batches) == 1
    return single and not torch.compiler.is_compiling() and not operators_are_observed()


def _shared_index(out: Any, dim: Any, index: Any, rows: Any) -> Tensor | None:
    """The positions ``[E]`` of a scatter whose index was expanded from them; None if it is another scatter."""
    if not _along_rows(out, dim) or not isinstance(index, Tensor) or not isinstance(rows, Tensor):
        return None
    if index.dim() == 0 or index.shape != rows.shape or out.shape[1:] != rows.shape[1:] or out.dtype != rows.dtype:
        return None
    if vmap_sizes(index) != {} or any(index.stride()[1:]) or not vmap_sizes(out):
        return None
    first = index[(slice(None), *(0,) * (index.dim() - 1))]
    return first if _serves(rows, first) else None


# ---- TallLinear: run the dense layers of a user's module through Weft's own products.
#
# A user's module says ``nn.Linear``, ``F.linear`` or ``x @ W``. On a GPU, products of many rows with a small matrix
# go to :func:`weft.ops.dense.linear`, as those of Weft's layers do; everything else stays what its author wrote.
#
# In a stack, so do rows in groups ``x [N, G, I]``, as of heads: where every task has a matrix of its own, torch repeats
# it for every one of the N (pubmed's shape, 4 tasks, 4 x 8 features: 79,000 products of 4 x 8 with 8 x 8).
#
# Shapes: T tasks, N rows, G groups, I inputs, O outputs.

MATMULS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm))
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TallLinear(TorchFunctionMode):
    """Inside, ``F.linear(x, W, b)`` and ``x @ W`` of tall ``x`` on a GPU are :func:`weft.ops.dense.linear`.

    ``x [N, I]``, or in a stack ``[..., I]``, whose rows are then put one below another. Libraries make few tiles of the
    weight gradient of many rows and few columns; other shapes, types and transforms are left to torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():  # inside torch.compile, leave torch's operators alone
            x, weight, bias = _operands(func, args, kwargs)
            turned = func in MATMULS
            if weight is not None and _linear_serves(
                x, weight, bias, *(reversed(weight.shape) if turned else weight.shape)
            ):
                weight = weight.transpose(0, 1) if turned else weight
                if x.dim() == 2:
                    return linear(x, weight, bias)
                return linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
        return func(*args, **kwargs)


def has_own_products(model: nn.Module) -> bool:
    """Whether ``model`` may multiply by other means than Weft's: a user's module, unless torch compiled parts of it."""
    return not is_named_model(model) and not any(is_compiled(module) for module in model.modules())


def _operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """``x``, a matrix and the bias, if any; all None if ``func`` is no dense layer or not called as one."""
    nothing = (None, None, None)
    if func is torch_linear and 2 <= len(args) + len(kwargs) <= 3 and kwargs.keys() <= {"input", "weight", "bias"}:
        x, weight, bias = _of_linear(*args, **kwargs)
    elif func in MATMULS and len(args) == 2 and not kwargs:
        x, weight, bias = *args, None
    else:
        return nothing
    operands = (x, weight) if bias is None else (x, weight, bias)
    plain = all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in operands)
    return (x, weight, bias) if plain and x.dim() >= weight.dim() == 2 else nothing


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of ``F.linear`` in their order."""
    return input, weight, bias


def _linear_serves(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> bool:
    """Whether ``x [..., I]``, a matrix of I inputs and O outputs, and ``bias [O]`` are what Weft's products are for."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not on_gpu(x) or x.dtype not in TYPES or any((t.dtype, t.device) != (x.dtype, x.device) for t in operands):
        return False
    if x.shape[-1] != inputs or not (bias is None or bias.shape == (outputs,)):
        return False
    device = "cuda" if x.is_meta else x.device.type  # a meta tensor stands for a GPU's
    if torch.is_autocast_enabled(device) or operators_are_observed():
        return False
    batches = [batch for tensor in operands if (batch := vmap_sizes(tensor)) is not None]
    if len(batches) < len(operands):
        return False
    tasks = prod(dict(level for batch in batches for level in batch.items()).values())
    if tasks == 1 and not x.is_contiguous():  # cuBLAS reads it without a copy
        return False
    if x.dim() > 2 and not batches[1]:  # one matrix for all rows: torch's product is one as well
        return False
    return is_tall(x.shape[:-1].numel(), inputs, outputs, tasks, shared=tasks > 1 and not batches[0])
