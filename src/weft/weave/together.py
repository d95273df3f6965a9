"""together: run several operators, of any kinds and over any graphs, in one merged launch.

An :class:`OpCall` is an operator of this package with its arguments. On a GPU the first launches of all calls share one
grid (see ``merged_launch.py``), and the sums over hubs that follow share another. Every part runs the code that its
operator runs alone, on the same tiles; the number of warps, and with it the order in which the lanes of a tile are
summed, is chosen for the whole launch, so results agree with those of separate launches to rounding, and bit for bit if
all parts use the same number of warps. On a CPU, and for operators that do more than launch, the calls are made one
after another.

The custom operators under it take flat lists only, so calls are flattened: tensors, lengths of lists and lists of
integers, floats, and strings, each in the order of the operators' own schemas. ``together`` is for operators that
return new tensors, ``together_`` for those that change tensors in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import use_triton
from weft.ops.launch.custom_op import custom_op
from weft.ops.sparse import spmm_max  # noqa: F401  registers an operator that may be merged
from weft.weave.merged_launch import Launch, collected, launch_parts


@dataclass(frozen=True)
class OpCall:
    """``torch.ops.weft.<name>(*arguments)``, arguments in the order of its schema."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self) -> tuple[Tensor, ...]:
        """Make the call on its own; returns its results as a tuple."""
        out = operator(self.name)(*self.arguments)
        return tuple(out) if isinstance(out, (tuple, list)) else () if out is None else (out,)


def operator(name: str) -> Any:
    """The registered operator ``weft::name``."""
    return getattr(torch.ops.weft, name).default


@cache
def results(name: str) -> int:
    """How many tensors ``weft::name`` returns."""
    return len(operator(name)._schema.returns)


@cache
def is_mutable(name: str) -> bool:
    """Whether ``weft::name`` changes its arguments."""
    return operator(name)._schema.is_mutable


def together_triton(calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """The first launches of all calls in one, then the second ones of those that have any, and so on."""
    from weft.weave.launchers import INDEPENDENT, LAUNCHERS  # circular: it imports the operators that use this

    outputs: list[Any] = []
    phases: list[list[Launch]] = []
    for call in calls:
        if call.name not in LAUNCHERS:
            outputs.append(call())
            continue
        with collected() as parts:
            outputs.append(LAUNCHERS[call.name](*completed(call.name, call.arguments)))
        for place, part in enumerate(parts):
            phase = 0 if call.name in INDEPENDENT else place
            phases += [[] for _ in range(phase + 1 - len(phases))]
            phases[phase].append(part)
    for phase in phases:
        launch_parts(phase)
    return [made() if callable(made) else made for made in outputs]


# ---- calls as flat lists for a custom operator ------------------------------------------------------------


@dataclass
class FlatCalls:
    """Calls as flat lists."""

    names: list[str]
    tensors: list[Tensor | None]
    counts: list[int]
    numbers: list[float]
    words: list[str] = field(default_factory=list)


KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor",
    "List[Tensor]": "tensors",
    "List[int]": "ints",
    "int": "int",
    "bool": "bool",
    "float": "float",
    "str": "word",
}


@cache
def _kinds(name: str) -> tuple[tuple[str, Any], ...]:
    """The kind (a value of :data:`KINDS`) and the default of every argument of ``weft::name``."""
    return tuple((KINDS[str(one.type)], one.default_value) for one in operator(name)._schema.arguments)


def completed(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``arguments``, completed by the defaults of ``weft::name``."""
    return (*arguments, *(default for _, default in _kinds(name)[len(arguments) :]))


def flatten(calls: Sequence[OpCall]) -> FlatCalls:
    """The calls as flat lists."""
    flat = FlatCalls([call.name for call in calls], [], [], [])
    for call in calls:
        for (kind, _), value in zip(_kinds(call.name), completed(call.name, call.arguments), strict=True):
            if kind == "tensor":
                flat.tensors.append(value)
            elif kind == "tensors":
                flat.counts.append(len(value))
                flat.tensors.extend(value)
            elif kind == "ints":
                flat.counts += [len(value), *value]
            elif kind == "word":
                flat.words.append(value)
            else:
                flat.numbers.append(float(value))
    return flat


def unflatten(flat: FlatCalls) -> list[OpCall]:
    """The inverse of :func:`flatten`."""
    tensors, counts, numbers, words = (iter(given) for given in (flat.tensors, flat.counts, flat.numbers, flat.words))
    take = {
        "tensor": lambda: next(tensors),
        "tensors": lambda: [next(tensors) for _ in range(next(counts))],
        "ints": lambda: [next(counts) for _ in range(next(counts))],
        "word": lambda: next(words),
        "int": lambda: int(next(numbers)),
        "bool": lambda: bool(next(numbers)),
        "float": lambda: next(numbers),
    }
    return [OpCall(name, tuple(take[kind]() for kind, _ in _kinds(name))) for name in flat.names]


def _made(names, tensors, counts, numbers, words) -> list[Tensor]:
    calls = unflatten(FlatCalls(names, tensors, counts, numbers, words))
    on_gpu = any(tensor is not None and use_triton(tensor) for tensor in tensors)
    done = together_triton(calls) if on_gpu else [call() for call in calls]
    return [result for outputs in done for result in outputs]


@custom_op(
    "weft::together",
    mutates_args=(),
    schema="(str[] names, Tensor?[] tensors, int[] counts, float[] numbers, str[] words) -> Tensor[]",
)
def _op(names, tensors, counts, numbers, words):
    return _made(names, tensors, counts, numbers, words)


@_op.register_fake
def _fake(names, tensors, counts, numbers, words):
    return [result for call in unflatten(FlatCalls(names, tensors, counts, numbers, words)) for result in call()]


@custom_op(
    "weft::together_",
    mutates_args=("tensors",),
    schema="(str[] names, Tensor(a!)?[] tensors, int[] counts, float[] numbers, str[] words) -> ()",
)
def _in_place(names, tensors, counts, numbers, words):
    _made(names, tensors, counts, numbers, words)


@_in_place.register_fake
def _in_place_fake(names, tensors, counts, numbers, words):
    return None


def together(calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """The results of every call, made in one merged launch if their tensors are on a GPU.

    No gradient flows through it: see ``multi_spmm`` and its like for that.
    """
    devices = {value.device for call in calls for value in _tensors(call)}
    if len(devices) > 1:
        raise InputError(f"together: tensors on {sorted(map(str, devices))}; all calls must be on one device")
    flat = flatten(calls)
    out = iter(_op(flat.names, flat.tensors, flat.counts, flat.numbers, flat.words))
    return [tuple(next(out) for _ in range(results(call.name))) for call in calls]


def _tensors(call: OpCall) -> Iterator[Tensor]:
    for value in call.arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (one for one in value if isinstance(one, Tensor))
