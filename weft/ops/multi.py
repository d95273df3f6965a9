"""together: several sparse operators, of any kinds, over any walks, in one launch.

A :class:`Call` is an operator of this package with its arguments. On a GPU the first launches of all calls share one
grid (see ``multi_launch.py``), the sums over hubs that follow share another; each result is bit for bit what its
operator gives alone. Elsewhere, and for operators that do more than launch, the calls are made one after another.

The custom operator under it takes lists of tensors only, so calls cross its border flat: tensors, the lengths of
lists of tensors, and numbers, each in the order of the operators' own schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.backend import use_triton
from weft.ops.multi_launch import collected, launch_parts


@dataclass(frozen=True)
class Call:
    """``torch.ops.weft.<name>(*arguments)``, arguments in the order of its schema."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self) -> tuple[Tensor, ...]:
        """The call made on its own; its results as a tuple."""
        out = operator(self.name)(*self.arguments)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def operator(name: str) -> Any:
    """The registered operator ``weft::name``."""
    return getattr(torch.ops.weft, name).default


def results(name: str) -> int:
    """How many tensors ``weft::name`` returns."""
    return len(operator(name)._schema.returns)


def together_triton(calls: Sequence[Call]) -> list[tuple[Tensor, ...]]:
    """The first launches of all calls in one, then the second ones of those that have any, and so on."""
    from weft.ops.multi_operators import LAUNCHERS  # which imports the operators, which may want to share launches

    outputs, launches = [], []
    for call in calls:
        if call.name in LAUNCHERS:
            with collected() as parts:
                outputs.append(LAUNCHERS[call.name](*call.arguments))
            launches.append(parts)
        else:
            outputs.append(call())
    for phase in range(max(map(len, launches), default=0)):
        launch_parts([parts[phase] for parts in launches if phase < len(parts)])
    return [made() if callable(made) else made for made in outputs]


# ---- across the border of a custom operator ---------------------------------------------------------------


@dataclass
class Flat:
    """Calls as flat lists."""

    names: list[str]
    tensors: list[Tensor | None]
    counts: list[int]
    numbers: list[float]


@cache
def _kinds(name: str) -> tuple[str, ...]:
    """``"tensor"``, ``"tensors"``, ``"int"`` or ``"float"`` for every argument of ``weft::name``."""
    types = {
        "Tensor": "tensor",
        "Optional[Tensor]": "tensor",
        "List[Tensor]": "tensors",
        "int": "int",
        "float": "float",
    }
    return tuple(types[str(argument.type)] for argument in operator(name)._schema.arguments)


def flatten(calls: Sequence[Call]) -> Flat:
    """The calls as flat lists."""
    flat = Flat([call.name for call in calls], [], [], [])
    for call in calls:
        for kind, value in zip(_kinds(call.name), call.arguments, strict=True):
            if kind == "tensor":
                flat.tensors.append(value)
            elif kind == "tensors":
                flat.counts.append(len(value))
                flat.tensors.extend(value)
            else:
                flat.numbers.append(float(value))
    return flat


def unflatten(flat: Flat) -> list[Call]:
    """The inverse of :func:`flatten`."""
    tensors, counts, numbers = iter(flat.tensors), iter(flat.counts), iter(flat.numbers)

    def take(kind: str) -> Any:
        if kind == "tensor":
            return next(tensors)
        if kind == "tensors":
            return [next(tensors) for _ in range(next(counts))]
        return int(next(numbers)) if kind == "int" else next(numbers)

    return [Call(name, tuple(take(kind) for kind in _kinds(name))) for name in flat.names]


@torch.library.custom_op(
    "weft::together",
    mutates_args=(),
    schema="(str[] names, Tensor?[] tensors, int[] counts, float[] numbers) -> Tensor[]",
)
def _op(names, tensors, counts, numbers):
    calls = unflatten(Flat(names, tensors, counts, numbers))
    on_gpu = any(tensor is not None and use_triton(tensor) for tensor in tensors)
    done = together_triton(calls) if on_gpu else [call() for call in calls]
    return [result for outputs in done for result in outputs]


@_op.register_fake
def _fake(names, tensors, counts, numbers):
    return [result for call in unflatten(Flat(names, tensors, counts, numbers)) for result in call()]


def together(calls: Sequence[Call]) -> list[tuple[Tensor, ...]]:
    """The results of every call, all of them made in one launch where their tensors are on a GPU.

    No gradient flows through it: see ``multi_spmm`` and its like for that.
    """
    devices = {value.device for call in calls for value in _tensors(call)}
    if len(devices) > 1:
        raise InputError(f"together: tensors on {sorted(map(str, devices))}; all calls must be on one device")
    flat = flatten(calls)
    out = iter(_op(flat.names, flat.tensors, flat.counts, flat.numbers))
    return [tuple(next(out) for _ in range(results(call.name))) for call in calls]


def _tensors(call: Call) -> Iterator[Tensor]:
    for value in call.arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from value
