"""Deep-copy a user's module without failing on attributes that cannot be copied.

Modules keep activations (``self.embedding = h``), which autograd or ``vmap`` made and which cannot be copied, and
locks, files or generators, which cannot be copied either. None of them is part of the model's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

REGISTERED = ("_parameters", "_buffers", "_modules")  # a module's own attributes in torch


def copy_module(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A deep copy, and the names of attributes that are None in it because they cannot be copied.

    Kept activations are in the copy without their history; those of a stack, which are of all members at once, are
    None.
    """
    memo: dict[int, Any] = {}
    for _, value in _attributes(model):
        for tensor in _tensors(value):
            if not tensor.is_leaf or _of_a_stack(tensor):
                memo[id(tensor)] = None if _of_a_stack(tensor) else tensor.detach().clone()
    try:
        return copy.deepcopy(model, dict(memo)), []
    except Exception:
        left_out = {name: value for name, value in _attributes(model) if not _can_be_copied(value, memo)}
        if not left_out:
            raise
    memo |= {id(value): None for value in left_out.values()}
    return copy.deepcopy(model, memo), list(left_out)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Full name and value of everything that a module keeps beside parameters, buffers and submodules."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in REGISTERED:
                yield f"{prefix}.{key}" if prefix else key, value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an attribute, also in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _of_a_stack(tensor: Tensor) -> bool:
    """Whether ``vmap`` made it: it has no values outside of that call."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
