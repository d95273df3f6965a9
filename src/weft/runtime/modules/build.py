"""Build a task's ``model`` as an ``nn.Module``: by name, by import, by factory, or as a copy of a user's."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from weft import nn as weft_nn
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.core.wording import brief
from weft.nn.initial import parameters_without_initial
from weft.runtime.device.process import seed_all
from weft.runtime.modules.settings import SIZES, arguments, function_of, in_words, refused_argument, signature_of
from weft.runtime.modules.state import CACHED, LOCKS, followers, reachable


def build_model(task: Task, in_features: int, out_features: int, num_relations: int = 0) -> nn.Module:
    """The model of ``task`` with fresh weights from its seed; a module given as an object keeps its own."""
    if task.traits is not None:
        options = {name: getattr(task, name) for name in task.traits.settings} | task.model_args
        options |= {"num_relations": num_relations} if task.traits.relational else {}
        model: nn.Module = weft_nn.build(task.model, in_features, out_features, **options)
        weft_nn.reset_parameters(model, task.seed)
    elif isinstance(task.model, nn.Module):
        copied = f"task {task.label!r}: {task.model_name} is given as an object, of which a copy is trained, and "
        if holding := functions_that_hold(task.model):
            raise SpecError(
                f"{copied}a function that it keeps ({', '.join(holding)}) refers to parts of it; give the class, or a "
                "function that builds it"
            )
        model, left_out = copy_module(task.model)
        if left_out:
            raise SpecError(
                f"{copied}{', '.join(left_out)} cannot be copied; give the class, or a function that builds it"
            )
        # Take off a trained model what treats its features: a run does that itself, before first aggregations.
        for key, hook in list(model._forward_pre_hooks.items()):
            if hasattr(hook, "converted"):  # a weft.runtime.infer.TrainedInputs, which stands above this
                if hook.norm not in (None, task.feature_norm):
                    trained = f"{task.model_name} was trained with feature_norm={hook.norm!r}"
                    raise SpecError(f"task {task.label!r}: {trained}; give it again")
                model._forward_pre_hooks.pop(key)
                model._forward_pre_hooks_with_kwargs.pop(key, None)
        if task.init == "fresh":
            if unknown := parameters_without_initial(model):
                raise SpecError(
                    f"task {task.label!r}: init='fresh': nothing says how {', '.join(unknown)} of {task.model_name} "
                    f"begin{'s' * (len(unknown) == 1)}; write a reset_parameters() for the module that has them, or "
                    "give the class instead of an object"
                )
            weft_nn.reset_parameters(model, task.seed)
    else:
        factory = function_of(task, "model")
        _refuse_lightning(task, factory)  # before it is called: its constructor may need what no task has
        signature = signature_of(factory)
        names = signature.sizes if signature.by_name else SIZES[0]
        sizes = dict(zip(names, (in_features, out_features), strict=True))
        keywords = arguments(task, signature, num_relations)
        seed_all(task.seed)
        try:
            by_position = () if signature.by_name else tuple(sizes.values())
            model = factory(*by_position, **(sizes if signature.by_name else {}), **keywords)
        except Exception as error:
            shown = ", ".join(f"{name}={brief(value)}" for name, value in (sizes | keywords).items())
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} could not be called as ({shown}): "
                f"{refused_argument(error) or in_words(error, __file__)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise SpecError(
                f"task {task.label!r}: model {task.model_name} returned {type(model).__name__}; expected an nn.Module"
            )
    _refuse_lightning(task, model)
    weft_nn.assign_sites(model)
    return model


def _refuse_lightning(task: Task, model: Any) -> None:
    if ignored := [name for name in ("training_step", "configure_optimizers") if hasattr(model, name)]:
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} has {' and '.join(ignored)}, as a LightningModule has, and "
            "Weft calls neither; give the nn.Module that it trains, and its loss and optimizer as settings objective=, "
            "optimizer=, lr="
        )


# ---- Modules that torch compiled: they train as they were written, since Weft traces, stacks and compiles steps
# itself.

WRAPPER, INNER = "OptimizedModule", "_orig_mod"  # torch's; importing its class takes a second


def is_compiled(module: nn.Module, scripted: bool = True) -> bool:
    """Whether it is ``torch.compile``'s, or ``torch.jit``'s if ``scripted``."""
    by_dynamo = module._compiled_call_impl is not None or type(module).__name__ == WRAPPER
    return by_dynamo or (scripted and isinstance(module, torch.jit.ScriptModule))


def as_written(model: nn.Module) -> nn.Module:
    """``model`` with all of its parts as before ``torch.compile``, its parameters the same objects."""
    whole = nn.ModuleList([model])
    for part in list(whole.modules()):
        for key, child in part._modules.items():
            while type(child).__name__ == WRAPPER:
                part._modules[key] = child = getattr(child, INNER)
        if part._compiled_call_impl is not None:
            part._compiled_call_impl = None
    return whole[0]


# ---- Deep copies of users' modules, which do not fail on attributes that cannot be copied.
#
# Modules keep activations (``self.embedding = h``), which autograd or ``vmap`` made and which cannot be copied, and
# locks, files or generators, which cannot be copied either. None of them is part of the model's weights.

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
        for tensor in reachable(value, modules):
            if not isinstance(tensor, Tensor):
                continue
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
        for hook in (theirs._post_accumulate_grad_hooks or {}).values():
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
    modules = {id(module) for module in model.modules()}
    parts = modules | {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    functions = [
        (name, [item for item in reachable(value, modules) if isinstance(item, (FunctionType, CACHED))])
        for name, value in _attributes(model)
    ]
    for name, p in model.named_parameters():  # a copy has the same hooks, whatever they are
        functions.append((name, [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]))
    return [name for name, some in functions if any(id(r) in parts for item in some for r in reachable(item))]


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
