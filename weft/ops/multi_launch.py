"""Several kernels' work in one launch: a kernel is generated for the group of parts at hand.

A *part* is what one kernel would do on its own: a body (a Triton function of three program ids and its arguments), the
grid it would be launched over, arguments and constants. :func:`launch_parts` lays the grids of all parts end to end in
one grid and writes the kernel that finds, from its program id, the part it belongs to and its three ids there.

Parts alike in everything but addresses and sizes share one branch of that kernel, in which they are told apart by a
select, so that its code grows with the number of *kinds*, not of parts. Every part runs the body that its operator
runs alone, on the same tiles and in the same order: the numbers are the same bits.

Addresses and sizes are arguments of the launch, not a table in memory: a recorded launch replays without a copy.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor

from weft.ops.lang import tl, triton

Constant = tuple[str, Any]
LIMIT = 400  # arguments of one launch: they travel in 4 KB of constant memory


@dataclass(frozen=True)
class Part:
    """``body(id0, id1, id2, *arguments, **constants)`` over ``grid``; ids 1 and 2 are int32 and int64."""

    body: Any
    grid: tuple[int, int, int]
    arguments: tuple[Tensor | int | float, ...]
    constants: tuple[Constant, ...]
    num_warps: int = 4

    @property
    def programs(self) -> int:
        """How many programs it takes."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def kind(self) -> tuple:
        """What decides the code: body, constants and the types of the arguments."""
        types = tuple(str(a.dtype) if isinstance(a, Tensor) else type(a).__name__ for a in self.arguments)
        return self.body, self.constants, types


@dataclass(frozen=True)
class Branch:
    """The code of one kind: how many parts take it, and which of its arguments are the same for all of them."""

    body: Any
    constants: tuple[Constant, ...]
    count: int
    shared: tuple[bool, ...]


def launch_parts(parts: Sequence[Part]) -> None:
    """Run all parts, in one launch (several where the arguments would not fit into one)."""
    for batch in _batches([part for part in parts if part.programs]):
        kinds = _by_kind(batch)
        branches = tuple(_branch(members) for members in kinds)
        ordered = [part for members in kinds for part in members]
        ends = list(accumulate(part.programs for part in ordered))
        arguments = [value for branch, members in zip(branches, kinds, strict=True) for value in _flat(branch, members)]
        sizes = [value for part, end in zip(ordered, ends, strict=True) for value in (end, *part.grid[:2])]
        warps = max(part.num_warps for part in ordered)
        generate(branches)[(ends[-1],)](*sizes, *arguments, num_warps=warps)


def _batches(parts: list[Part]) -> list[list[Part]]:
    """Runs of parts whose arguments fit into one launch."""
    batches: list[list[Part]] = []
    room = 0
    for part in parts:
        need = len(part.arguments) + 3
        if need > room:
            batches.append([])
            room = LIMIT
        batches[-1].append(part)
        room -= need
    return batches


def _by_kind(parts: list[Part]) -> list[list[Part]]:
    """The parts of every kind together, kinds in the order in which they first appear."""
    order: dict[tuple, int] = {}
    for part in parts:
        order.setdefault(part.kind, len(order))
    ranked = sorted(parts, key=lambda part: order[part.kind])
    return [list(members) for _, members in groupby(ranked, key=lambda part: order[part.kind])]


def _branch(members: list[Part]) -> Branch:
    first = members[0]
    shared = tuple(
        isinstance(value, Tensor) and all(part.arguments[place] is value for part in members)
        for place, value in enumerate(first.arguments)
    )
    return Branch(first.body, first.constants, len(members), shared)


def _flat(branch: Branch, members: list[Part]) -> list[Tensor | int | float]:
    """The arguments in the order of the generated signature: a shared one once, the others part by part."""
    return [
        part.arguments[place]
        for place, shared in enumerate(branch.shared)
        for part in (members[:1] if shared else members)
    ]


# ---- writing the kernel ----------------------------------------------------------------------------------


@cache
def generate(branches: tuple[Branch, ...]) -> Any:
    """The Triton function of these branches, written, and kept for the process (Triton keeps the machine code)."""
    source = kernel_source(branches)
    name = f"<weft generated {sha256(source.encode()).hexdigest()[:16]}>"
    # Triton reads a function's source through inspect, which finds it here.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"triton": triton, "tl": tl} | {f"body{place}": branch.body for place, branch in enumerate(branches)}
    scope["__name__"] = __name__
    exec(compile(source, name, "exec"), scope)  # text made above from our own templates, no input of a user
    return scope["woven_kernel"]


def kernel_source(branches: tuple[Branch, ...]) -> str:
    """The text of the kernel: which part is this program of, which piece of it, and the call of its body."""
    total = sum(branch.count for branch in branches)
    names = [name for part in range(total) for name in (f"end{part}", f"p{part}", f"q{part}")]
    names += [name for place, branch in enumerate(branches) for name in _argument_names(place, branch)]
    lines = ["@triton.jit", f"def woven_kernel({', '.join(names)}):", "    pid = tl.program_id(0)"]
    first = 0
    for place, branch in enumerate(branches):
        indent = "    " * (place + 1)
        last = first + branch.count - 1
        inside = indent + "    " if place + 1 < len(branches) else indent
        if place + 1 < len(branches):
            lines.append(f"{indent}if pid < end{last}:")
        lines += [inside + line for line in _branch_lines(place, branch, first)]
        if place + 1 < len(branches):
            lines.append(f"{indent}else:")
        first = last + 1
    return "\n".join(lines) + "\n"


def _argument_names(place: int, branch: Branch) -> list[str]:
    return [
        f"b{place}_a{argument}" + ("" if shared else f"_{part}")
        for argument, shared in enumerate(branch.shared)
        for part in range(1 if shared else branch.count)
    ]


def _branch_lines(place: int, branch: Branch, first: int) -> list[str]:
    """The lines of one branch, whose parts are numbered from ``first``; names end in its number."""
    own = [argument for argument, shared in enumerate(branch.shared) if not shared]
    values = {f"v{place}_{argument}": f"b{place}_a{argument}_" for argument in own}
    lines = [f"start{place} = {f'end{first - 1}' if first else '0'}", f"m{place} = p{first}", f"n{place} = q{first}"]
    lines += [f"{name} = {source}0" for name, source in values.items()]
    for part in range(1, branch.count):
        here = f"here{place}_{part}"
        lines.append(f"{here} = pid >= end{first + part - 1}")
        lines.append(f"start{place} = tl.where({here}, end{first + part - 1}, start{place})")
        lines.append(f"m{place} = tl.where({here}, p{first + part}, m{place})")
        lines.append(f"n{place} = tl.where({here}, q{first + part}, n{place})")
        lines += [f"{name} = tl.where({here}, {source}{part}, {name})" for name, source in values.items()]
    lines += [f"local{place} = pid - start{place}", f"rest{place} = local{place} // m{place}"]
    ids = f"local{place} % m{place}, rest{place} % n{place}, (rest{place} // n{place}).to(tl.int64)"
    passed = [f"b{place}_a{a}" if shared else f"v{place}_{a}" for a, shared in enumerate(branch.shared)]
    constants = [f"{name}={literal(value)}" for name, value in branch.constants]
    return [*lines, f"body{place}({', '.join([ids, *passed, *constants])})"]


def literal(value: Any) -> str:
    """A constant as it stands in the generated text."""
    return f"tl.{value.name.replace('fp', 'float')}" if hasattr(value, "primitive_bitwidth") else repr(value)
