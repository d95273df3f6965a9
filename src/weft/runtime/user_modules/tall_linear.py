"""TallLinear: run the dense layers of a user's module through Weft's own products.

A user's module says ``nn.Linear``, ``F.linear`` or ``x @ W``. On a GPU, products of many rows with a small matrix
go to :func:`weft.ops.dense.linear`, as those of Weft's layers do; everything else stays what its author wrote.

In a stack, so do rows in groups ``x [N, G, I]``, as of heads: where every task has a matrix of its own, torch repeats
it for every one of the N (pubmed's shape, 4 tasks, 4 x 8 features: 79,000 products of 4 x 8 with 8 x 8).

Shapes: T tasks, N rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear
from torch.overrides import TorchFunctionMode

from weft.nn.build import is_named_model
from weft.ops.dense.linear import is_tall, linear
from weft.ops.launch.backend import on_gpu
from weft.runtime.user_modules.compiled import is_compiled
from weft.runtime.user_modules.transforms import PLAIN, has_forward_derivatives, saved_tensors_are_hooked, vmap_sizes

MATMULS = frozenset((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm))
TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TallLinear(TorchFunctionMode):
    """Inside, ``F.linear(x, W, b)`` and ``x @ W`` of tall ``x`` on a GPU are :func:`weft.ops.dense.linear`.

    ``x [N, I]``, or in a stack ``[..., I]``, whose rows are then put one below another.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():  # inside torch.compile, leave torch's operators alone
            x, weight, bias = _operands(func, args, kwargs)
            turned = func in MATMULS
            if weight is not None and _serves(x, weight, bias, *(reversed(weight.shape) if turned else weight.shape)):
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
    given = (x, weight) if bias is None else (x, weight, bias)
    plain = all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in given)
    return (x, weight, bias) if plain and x.dim() >= weight.dim() == 2 else nothing


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The arguments of ``F.linear`` in their order."""
    return input, weight, bias


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> bool:
    """Whether ``x [..., I]``, a matrix of I inputs and O outputs, and ``bias [O]`` are what Weft's products are for."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if not on_gpu(x) or x.dtype not in TYPES or any((t.dtype, t.device) != (x.dtype, x.device) for t in given):
        return False
    if x.shape[-1] != inputs or not (bias is None or bias.shape == (outputs,)) or _watched(x):
        return False
    batches = [batch for tensor in given if (batch := vmap_sizes(tensor)) is not None]
    if len(batches) < len(given):
        return False
    tasks = prod(dict(level for batch in batches for level in batch.items()).values())
    if tasks == 1 and not x.is_contiguous():  # cuBLAS reads it without a copy
        return False
    if x.dim() > 2 and not batches[1]:  # one matrix for all rows: torch's product is one as well
        return False
    return is_tall(x.shape[:-1].numel(), inputs, outputs, tasks, shared=tasks > 1 and not batches[0])


def _watched(x: Tensor) -> bool:
    """Whether the replacement would be observable: autocast, forward-mode AD, or saved-tensor hooks.

    ``torch.utils.checkpoint`` is such a hook: it repeats the layer outside of this mode and compares what is saved.
    """
    device = "cuda" if x.is_meta else x.device.type  # a meta tensor stands for a GPU's
    return torch.is_autocast_enabled(device) or has_forward_derivatives() or saved_tensors_are_hooked()
