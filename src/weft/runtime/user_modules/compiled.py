"""Modules that torch compiled: they train as they were written, since Weft traces, stacks and compiles steps itself."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task

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
