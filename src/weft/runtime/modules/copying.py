"""Deep-copy a user's module without failing on attributes that cannot be copied.

Modules keep activations (``self.embedding = h``), which autograd or ``vmap`` made and which cannot be copied, and
locks, files or generators, which cannot be copied either. None of them is part of the model's weights.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.modules.state import followers, tensors_in

LOCKS = (type(threading.Lock()), type(threading.RLock()))  # hold nothing between calls
DEPTH = 5  # functions in closures of functions, and so on
REGISTERED = ("_parameters", "_buffers", "_modules")  # a module's own attributes in torch


def copy_module(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A deep copy, and the names of attributes that are None in it because they cannot be copied.

    Kept activations are in the copy without their history; those of a stack, which are of all members at once, are
    None.
    """
    memo: dict[int, Any] = {}
    modules = {id(module) for module in model.modules()}
    for _, value in _attributes(model):
        if isinstance(value, LOCKS):
            memo[id(value)] = type(value)() if type(value) is not LOCKS[0] else threading.Lock()
        for tensor in tensors_in(value, modules):
            of_stack = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # it has no values outside of that call
            if not tensor.is_leaf or of_stack:
                memo[id(tensor)] = None if of_stack else tensor.detach().clone()
    left_out: dict[str, Any] = {}
    copies = dict(memo)
    try:
        copied = copy.deepcopy(model, copies)
    except Exception:
        left_out = {name: value for name, value in _attributes(model) if not _can_be_copied(value, memo)}
        if not left_out:
            raise
        copies = memo | {id(value): None for value in left_out.values()}
        copied = copy.deepcopy(model, copies)
    for theirs, twin_parameter in zip(model.parameters(), copied.parameters(), strict=True):
        if not theirs.requires_grad:  # frozen after it was hooked: nothing calls them
            continue
        for hook in (theirs._backward_hooks or {}).values():  # torch does not copy hooks of parameters
            twin_parameter.register_hook(hook)
        for hook in (getattr(theirs, "_post_accumulate_grad_hooks", None) or {}).values():
            twin_parameter.register_post_accumulate_grad_hook(hook)
    owners = dict((*copied.named_parameters(), *copied.named_buffers()))
    for follower in followers(model, owners.keys()):  # torch copies parameters without the views that share them
        twin = copies.get(id(follower.tensor))
        if isinstance(twin, Tensor) and twin is not owners[follower.owner]:
            replace(follower, tensor=twin).follow(owners[follower.owner])
    for module in copied.modules():
        for key, value in vars(module).items():  # weak references to parts of the model are to those of the copy
            if isinstance(value, weakref.ref) and isinstance(copies.get(id(value())), (nn.Module, Tensor)):
                vars(module)[key] = weakref.ref(copies[id(value())])
    return copied, list(left_out)


def functions_that_hold(model: nn.Module) -> list[str]:
    """Names of functions that a module keeps, as attributes or hooks, and that refer to parts of it.

    A copy of the module keeps the same functions, which go on with the parts of the original.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    names = []
    for name, value in _attributes(model):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(_holds(item, parts, DEPTH) for item in values if isinstance(item, FunctionType)):
            names.append(name)
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(_holds(hook, parts, DEPTH) for some in hooks for hook in (some or {}).values()):
            names.append(name)
    return names


def _holds(thing: Any, parts: set[int], depth: int) -> bool:
    """Whether ``thing`` is one of the parts, or a function, method or collection that leads to one."""
    if id(thing) in parts:
        return True
    if depth == 0:
        return False
    inside: Iterable[Any] = ()
    if isinstance(thing, FunctionType):
        cells = (cell.cell_contents for cell in thing.__closure__ or () if not _empty(cell))
        inside = (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    elif isinstance(thing, MethodType):
        inside = (thing.__self__, thing.__func__)
    elif isinstance(thing, partial):
        inside = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, (list, tuple, set)):
        inside = thing
    elif isinstance(thing, dict):
        inside = thing.values()
    return any(_holds(item, parts, depth - 1) for item in inside)


def _empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Full name and value of everything that a module keeps except parameters, buffers and submodules."""
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in REGISTERED:
                yield f"{prefix}.{key}" if prefix else key, value


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
