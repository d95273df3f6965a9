"""Compile a Triton kernel for sm_90 as a launch on a GPU would, and run its PTX on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import tests.ptx.arithmetic
import tests.ptx.moves
import tests.ptx.warps  # noqa: F401  as the two above: registers instructions
from tests.ops.test_triton_compiles import kind_of
from tests.ptx.block import Block
from tests.ptx.memory import Memory
from tests.ptx.text import parse

OPTIONS = ("num_warps", "num_stages")


@contextmanager
def run_as_ptx() -> Iterator[list[str]]:
    """Inside, Triton's launches run on the CPU, of tensors on the CPU; the list gets the names of the kernels."""
    from triton.runtime.jit import JITFunction

    made: list[str] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        made.append(self.__name__)
        _run(self, bound, (*grid, 1, 1)[:3], options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield made


def _run(kernel: Any, bound: dict[str, Any], grid: tuple[int, int, int], options: dict[str, int]) -> None:
    memory = Memory()
    values = {name: memory.address(one) if isinstance(one, Tensor) else one for name, one in bound.items()}
    fixed = _fixed(kernel, bound)
    built = _compiled(kernel, bound, values, fixed, options)
    program = parse(built.asm["ptx"])
    passed = [_bits(values[name]) for name in kernel.arg_names if name not in fixed]
    given = dict(zip(program.parameters, passed, strict=False))  # Triton adds parameters of its own, unused here
    memory.load()
    warps, shared = built.metadata.num_warps, built.metadata.shared
    places = product(*(range(size) for size in reversed(grid)))
    _take_turns([Block(program, memory, given, place[::-1], grid, warps, shared) for place in places])
    memory.store()


def _fixed(kernel: Any, bound: dict[str, Any]) -> set[str]:
    """Arguments that are constants to Triton: a number that is 1 as well, unless the kernel says otherwise."""
    plain = set(kernel.do_not_specialize or ())
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    return fixed | {n for n, v in bound.items() if v is None or (type(v) is int and v == 1 and n not in plain)}


def _compiled(kernel: Any, bound: dict[str, Any], values: dict[str, Any], fixed: set[str], options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plain = set(kernel.do_not_specialize or ())
    signature = {name: "constexpr" if name in fixed else kind_of(bound[name]) for name in kernel.arg_names}
    even = [
        (place,)
        for place, name in enumerate(kernel.arg_names)
        if name not in fixed | plain and isinstance(values[name], int) and values[name] % 16 == 0
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={name: bound[name] for name in fixed},
        attrs={place: [["tt.divisibility", 16]] for place in even},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _bits(value: Any) -> int:
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)


def _take_turns(blocks: list[Block]) -> None:
    """Each block runs until it waits for others."""
    running, ended = [block.run() for block in blocks], object()
    while running:
        running = [one for one in running if next(one, ended) is not ended]
