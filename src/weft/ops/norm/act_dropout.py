"""The epilogue of a norm as arguments of its operator: activation and dropout, as in ``bias_act_dropout.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.core.errors import InputError
from weft.ops.dense.bias_act_dropout import ACTIVATIONS, as_rate, lead_task

NO_ENDING = ("none", None, None, 0)  # act, rate, clock, site
ENDING = "str act, Tensor? rate, Tensor? clock, int site, int parts=1"  # in a schema


def as_ending(
    operator: str, columns: Tensor, act: str, p: float | Tensor, clock: Tensor | None, site: int, parts: int
) -> tuple[str, Tensor | None, Tensor | None, int, int]:
    """``(act, rate, clock, site, parts)`` as an operator takes them: rate and clock are both there, or neither is.

    ``columns [..., F]`` are a parameter of the norm: a clock is refused unless there is one wherever there are columns.
    """
    if act not in ACTIVATIONS:
        raise InputError(f"{operator}: act={act!r} must be one of {', '.join(ACTIVATIONS)}")
    if clock is not None and clock.shape[:-1] != columns.shape[:-1]:
        has = f"a clock of shape {list(clock.shape)} beside columns of shape {list(columns.shape)}"
        raise InputError(f"{operator}: {has}; every task has one of its own, or all share everything")
    rate = as_rate(p, columns.device) if clock is not None else None
    return act, rate, None if rate is None else clock, site, parts


def check_columns(operator: str, x: Tensor, lead: int, *columns: Tensor) -> None:
    """Refuse columns that are not ``[..., F]`` with the ``lead`` dimensions of ``x``: kernels would read past them."""
    expected = (*x.shape[:lead], x.shape[-1])
    for value in columns:
        if tuple(value.shape) != expected:
            has = f"x {list(x.shape)} takes columns of shape {list(expected)}"
            raise InputError(f"{operator}: {has}, not {list(value.shape)}")


def lead_tasks(size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    """All arguments of a mapped call, every tensor with the batch dimension in front."""
    pairs = zip(arguments, in_dims, strict=True)
    return [lead_task(value, dim, size) if isinstance(value, Tensor) else value for value, dim in pairs]
