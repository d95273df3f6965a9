"""Build a task's ``model`` as an ``nn.Module``: by name, by import, by factory, or as a copy of a user's."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from weft import nn as weft_nn
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.nn.initial import parameters_without_initial
from weft.runtime.device.process import seed_all
from weft.runtime.modules.copying import copy_module, functions_that_hold
from weft.runtime.modules.settings import arguments, import_callable, in_words, signature_of


def build_model(task: Task, in_features: int, out_features: int, num_relations: int = 0) -> nn.Module:
    """The model of ``task`` with fresh weights from its seed; a module given as an object keeps its own."""
    if task.traits is not None:
        options = model_options(task) | ({"num_relations": num_relations} if task.traits.relational else {})
        model: nn.Module = weft_nn.build(task.model, in_features, out_features, **options)
        weft_nn.reset_parameters(model, task.seed)
    elif isinstance(task.model, nn.Module):
        model = _copied(task)
    else:
        model = _from_factory(task, in_features, out_features)
    weft_nn.assign_sites(model)
    return model


def model_options(task: Task) -> dict[str, Any]:
    """The settings that the named model of ``task`` reads, and those by names of its own."""
    assert task.traits is not None
    return {name: getattr(task, name) for name in task.traits.settings} | task.model_args


def _copied(task: Task) -> nn.Module:
    """A copy of the module that a task was given, with new weights if ``init="fresh"``."""
    holding = functions_that_hold(task.model)
    if holding:
        raise SpecError(
            f"task {task.label!r}: {task.model_name} is given as an object, of which a copy is trained, and a function "
            f"that it keeps ({', '.join(holding)}) refers to parts of it; give the class, or a function that builds it"
        )
    model, left_out = copy_module(task.model)
    if left_out:
        raise SpecError(
            f"task {task.label!r}: {task.model_name} is given as an object, of which a copy is trained, and "
            f"{', '.join(left_out)} cannot be copied; give the class, or a function that builds it"
        )
    if task.init != "fresh":
        return model
    unknown = parameters_without_initial(model)
    if unknown:
        raise SpecError(
            f"task {task.label!r}: init='fresh': nothing says how {', '.join(unknown)} of {task.model_name} "
            f"begin{'s' * (len(unknown) == 1)}; write a reset_parameters() for the module that has them, or give the "
            "class instead of an object"
        )
    weft_nn.reset_parameters(model, task.seed)
    return model


def _from_factory(task: Task, in_features: int, out_features: int) -> nn.Module:
    factory = import_callable(task) if isinstance(task.model, str) else task.model
    signature = signature_of(factory)
    sizes = {"in_features": in_features, "out_features": out_features}
    keywords = arguments(task, signature)
    seed_all(task.seed)
    try:
        if signature.by_name:
            model = factory(**sizes, **keywords)
        else:
            model = factory(in_features, out_features, **keywords)
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in (sizes | keywords).items())
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} could not be called as ({shown}): "
            f"{in_words(error, __file__)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"task {task.label!r}: model {task.model_name} returned {type(model).__name__}; expected an nn.Module"
        )
    return model


# ---- Modules that torch compiled: they train as they were written, since Weft traces, stacks and compiles steps
# itself.

WRAPPER, INNER = "OptimizedModule", "_orig_mod"  # torch's; importing its class takes a second


def is_compiled(module: nn.Module) -> bool:
    """Whether it is ``torch.jit``'s or ``torch.compile``'s."""
    return isinstance(module, torch.jit.ScriptModule) or _by_dynamo(module)


def was_compiled(task: Task, model: nn.Module) -> bool:
    """Whether ``torch.compile`` made ``model``; a :class:`SpecError` if it made a part of it alone."""
    if type(model).__name__ == WRAPPER:
        return True
    for name, part in model.named_modules():
        if name and type(part).__name__ == WRAPPER:
            raise SpecError(
                f"task {task.label!r}: {name} of model {task.model_name} went through torch.compile, which Weft can "
                "neither stack nor follow; give the module as written, and compile=True to compile its steps"
            )
    return any(_by_dynamo(part) for part in model.modules())


def as_written(model: nn.Module) -> nn.Module:
    """``model`` without ``torch.compile``; its parameters are the same objects."""
    while type(model).__name__ == WRAPPER:
        model = cast(nn.Module, getattr(model, INNER))
    for part in model.modules():
        part._compiled_call_impl = None
    return model


def _by_dynamo(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == WRAPPER
