"""Register an operator with torch without importing torch's compiler when it first runs.

``torch.library.custom_op`` wraps every implementation in ``torch._dynamo.disable``, and its first call imports dynamo,
Inductor and sympy: two seconds. As long as nobody has imported dynamo there is nothing to disable, so the function is
called as it is; from then on it is wrapped as torch would have done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

DYNAMO = "torch._dynamo"
_DISABLED = "__dynamo_disable"  # where torch keeps the wrapped function, from its first call on


def custom_op(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``torch.library.custom_op``, whose implementation imports no compiler."""

    def register(fn: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(name, **options)(fn)
        for implementation in getattr(op, "_backend_fns", {}).values():
            inner = getattr(implementation, "__wrapped__", None)
            if inner is not None and getattr(inner, _DISABLED, None) is None:
                setattr(inner, _DISABLED, _called_plainly(inner))
        return op

    return register


def _called_plainly(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        disable = getattr(sys.modules.get(DYNAMO), "disable", None)
        if disable is None:
            return fn(*args, **options)
        disabled = disable(fn, True, wrapping=False)
        setattr(fn, _DISABLED, disabled)
        return disabled(*args, **options)

    return call
