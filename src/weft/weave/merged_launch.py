"""Merge several kernel launches into one, by generating a kernel for the group of launches.

Inside of :func:`collected` a launch ``kernel[grid](...)`` is not made but collected as a :class:`Launch`, so merging
reuses the code that launches an operator's kernels alone. :func:`launch_parts` concatenates the grids of many parts
into one grid, and generates the kernel that finds, from its program id, its part and its ids there. The body of each
kernel is its own source with ``tl.program_id`` and ``tl.num_programs`` turned into arguments: every part runs the code
that its operator runs alone, on the same tiles. Its results are bit-identical if it has as many warps alone; with more
or fewer the lanes of a tile are summed in another order.

Parts that differ only in addresses and sizes share one branch of the generated kernel, which selects between them; so
its code grows with the number of *kinds*, not of parts. Addresses and sizes are arguments of the launch, not a table in
memory: in a CUDA graph the launch replays without a copy. A kernel takes seconds to compile, so similar groups share
one: branches have a fixed order, and a capacity of 1, 4, 8, 16, ... parts.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import custom_op, next_power_of_2, use_triton
from weft.ops.launch.hooks import intercepted
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.sparse import spmm_max  # noqa: F401  registers an operator that may be merged

LIMIT = 400  # arguments of one launch: they travel in 4 KB of constant memory
USUAL = {"num_warps": 4, "num_stages": 3}  # Triton's default
OPTIONS = tuple(USUAL)
LEAST_ROOM = 4  # of a branch for several parts
SMALL_SHARE = 8  # a part is small that has fewer programs than the largest by this factor
IDS = ("weft_id0", "weft_id1", "weft_id2", "weft_n0", "weft_n1", "weft_n2")


@dataclass(frozen=True)
class Launch:
    """The launch ``kernel[grid](**arguments, **constants)`` with ``options`` such as ``num_warps``, not yet made."""

    kernel: Any
    grid: tuple[int, int, int]
    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, kernel: Any, grid: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> Launch:
        """``kernel[grid](*args, **kwargs)`` as a Launch."""
        options = tuple((name, kwargs.pop(name)) for name in OPTIONS if name in kwargs)
        parameters, names, fixed = _parameters(kernel.fn)
        bound = dict(zip(parameters, args, strict=False)) | kwargs
        sizes = (*grid, 1, 1)[:3]
        constants = tuple((name, bound[name]) for name in fixed)
        return cls(kernel, sizes, names, tuple(bound[name] for name in names), constants, options)

    @property
    def given(self) -> dict[str, Any]:
        """Arguments and constants by name."""
        return dict(zip(self.names, self.arguments, strict=True)) | dict(self.constants)

    @property
    def programs(self) -> int:
        """How many programs it takes."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides the code: the kernel, its constants and the types of its arguments."""
        types = tuple(str(a.dtype) if isinstance(a, Tensor) else type(a).__name__ for a in self.arguments)
        return self.kernel, self.constants, types


@cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of a kernel's parameters: all of them, those that a launch passes, those that are constants to Triton."""
    found = inspect.signature(function).parameters
    fixed = tuple(name for name, parameter in found.items() if "constexpr" in str(parameter.annotation))
    return tuple(found), tuple(name for name in found if name not in fixed), fixed


@dataclass(frozen=True)
class Branch:
    """The code of one kind: how many parts take it, and which of its arguments are the same for all of them."""

    kernel: Any
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    count: int
    shared: tuple[bool, ...]


# ---- collecting launches ----------------------------------------------------------------------------------


@contextmanager
def collected() -> Iterator[list[Launch]]:
    """Inside, and in this thread, launches are appended to the list that this yields, and not made."""
    parts: list[Launch] = []

    def note(kernel: Any, grid: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: parts.append(Launch.of(kernel, grid, args, kwargs))

    with intercepted(note):
        yield parts


# ---- launching --------------------------------------------------------------------------------------------


def launch_parts(parts: Sequence[Launch]) -> None:
    """Run all parts in one launch (several if the arguments do not fit into one)."""
    for batch in _batches([part for part in parts if part.programs]):
        if len(batch) == 1:
            launch_alone(batch[0])
        else:
            _launch_together(batch)


def launch_alone(part: Launch) -> None:
    """Make the launch that ``part`` stands for."""
    part.kernel[part.grid](**part.given, **dict(part.options))


def _launch_together(parts: list[Launch]) -> None:
    branches, programs, arguments = arguments_of(parts)
    generate(branches)[(programs,)](*arguments, **options_of(parts))


def arguments_of(parts: list[Launch]) -> tuple[tuple[Branch, ...], int, list[Any]]:
    """The branches of ``parts``, how many programs they have together, and their sizes and arguments in order."""
    kinds = [filled_up(members) for members in by_kind(parts)]
    branches = tuple(branch_of(members) for members in kinds)
    ordered = [part for members in kinds for part in members]
    ends = list(accumulate(part.programs for part in ordered))
    sizes = [value for part, end in zip(ordered, ends, strict=True) for value in (end, *part.grid)]
    arguments = [value for branch, members in zip(branches, kinds, strict=True) for value in _flat(branch, members)]
    return branches, ends[-1], [*sizes, *arguments]


def options_of(parts: Sequence[Launch]) -> dict[str, int]:
    """The largest warps and stages of the parts, except parts that are small compared with the largest.

    Warps share a tile: if sums over edges got more of them because of a few small reductions, each would do less.
    """
    most = max(part.programs for part in parts)
    counted = [dict(part.options) for part in parts if part.programs * SMALL_SHARE >= most]
    names = {name for part in parts for name, _ in part.options}
    return {name: max(have.get(name, USUAL[name]) for have in counted) for name in sorted(names)}


def _batches(parts: list[Launch]) -> list[list[Launch]]:
    """Runs of parts whose arguments fit into one launch."""
    batches: list[list[Launch]] = []
    room = 0
    for part in parts:
        need = len(part.arguments) + 4
        if need > room:
            batches.append([])
            room = LIMIT
        batches[-1].append(part)
        room -= need
    return batches


def by_kind(parts: Sequence[Launch]) -> list[list[Launch]]:
    """The parts of every kind together, kinds in an order that does not depend on that of the parts."""
    kinds: dict[tuple[Any, ...], list[Launch]] = {}
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    return sorted(kinds.values(), key=lambda members: (members[0].kernel.fn.__name__, str(members[0].kind[1:])))


def filled_up(members: list[Launch]) -> list[Launch]:
    """The parts padded to the capacity of a branch with parts without programs."""
    room = 1 if len(members) == 1 else max(LEAST_ROOM, next_power_of_2(len(members)))
    return members + [replace(members[-1], grid=(0, 1, 1))] * (room - len(members))


def branch_of(members: list[Launch]) -> Branch:
    """What the parts of one kind have in common."""
    first = members[0]
    shared = tuple(
        (value is None or isinstance(value, Tensor)) and all(part.arguments[place] is value for part in members)
        for place, value in enumerate(first.arguments)
    )
    return Branch(first.kernel, first.names, first.constants, len(members), shared)


def _flat(branch: Branch, members: list[Launch]) -> list[Any]:
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
    return compiled(kernel_source(branches), "woven_kernel", scope_of(branches))


def scope_of(branches: tuple[Branch, ...]) -> dict[str, Any]:
    """What the text of a generated kernel refers to."""
    bodies = {f"body{place}": body_of(branch.kernel) for place, branch in enumerate(branches)}
    return {"triton": triton, "tl": tl, **bodies}


@cache
def body_of(kernel: Any) -> Any:
    """``kernel`` as a function of its program ids and the size of its grid, besides its own parameters."""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    name = kernel.fn.__name__
    source = re.sub(rf"def {name}\(", f"def {name}({', '.join(IDS)}, ", source, count=1)
    source = re.sub(r"tl\.program_id\((?:axis=)?(\d)\)", r"weft_id\1", source)
    source = re.sub(r"tl\.num_programs\((?:axis=)?(\d)\)", r"weft_n\1", source)
    return compiled(source, name, dict(kernel.fn.__globals__), full_name(kernel))


def full_name(kernel: Any) -> str:
    """The name of a kernel and of the module that it is from."""
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def compiled(source: str, name: str, scope: dict[str, Any], origin: str = "") -> Any:
    """The function ``name`` that ``source`` defines; ``origin`` names what the source alone does not say.

    Triton takes two functions of one module, one name and the same types of arguments for one: the second is never
    compiled, and calls of it run the first. So every text gets a module name of its own.
    """
    digest = sha256(f"{source}\n{origin}".encode()).hexdigest()[:16]
    file = f"<weft {name} {digest}>"
    # Triton reads a function's source through inspect, which finds it here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope["__name__"] = f"{__name__}.{digest}"
    exec(compile(source, file, "exec"), scope)  # the text of our own kernels and templates, no input of a user
    return scope[name]


def kernel_source(branches: tuple[Branch, ...]) -> str:
    """The source of the kernel: find this program's part and its ids there, and call the part's body."""
    names = ", ".join(parameters_of(branches))
    lines = ["@triton.jit", f"def woven_kernel({names}):", "    pid = tl.program_id(0)", *body_lines(branches)]
    return "\n".join(lines) + "\n"


def parameters_of(branches: tuple[Branch, ...]) -> list[str]:
    """Names in the order of the arguments of :func:`arguments_of`."""
    total = sum(branch.count for branch in branches)
    names = [f"{letter}{part}" for part in range(total) for letter in ("end", "p", "q", "r")]
    return names + [name for place, branch in enumerate(branches) for name in _argument_names(place, branch)]


def body_lines(branches: tuple[Branch, ...]) -> list[str]:
    """The lines that run the program ``pid`` of the grid of all parts."""
    lines = []
    first = 0
    for place, branch in enumerate(branches):
        indent, last = "    " * (place + 1), first + branch.count - 1
        text = _branch_lines(place, branch, first)
        if place + 1 < len(branches):
            lines += [f"{indent}if pid < end{last}:", *(f"{indent}    {line}" for line in text), f"{indent}else:"]
        else:
            lines += [f"{indent}{line}" for line in text]
        first = last + 1
    return lines


def _argument_names(place: int, branch: Branch) -> list[str]:
    return [
        f"b{place}_{name}" + ("" if shared else f"_{part}")
        for name, shared in zip(branch.names, branch.shared, strict=True)
        for part in range(1 if shared else branch.count)
    ]


def _branch_lines(place: int, branch: Branch, first: int) -> list[str]:
    """The lines of one branch, whose parts are numbered from ``first``; the names in it end in its number."""
    own = [name for name, shared in zip(branch.names, branch.shared, strict=True) if not shared]
    chosen = {f"v{place}_{name}": f"b{place}_{name}_{{}}" for name in own}
    chosen |= {f"{letter}_{place}": letter + "{}" for letter in ("p", "q", "r")}
    lines = [f"start{place} = {f'end{first - 1}' if first else '0'}"]
    lines += [f"{name} = {source.format(0 if name.startswith('v') else first)}" for name, source in chosen.items()]
    for part in range(1, branch.count):
        here, before = f"here{place}_{part}", f"end{first + part - 1}"
        lines += [f"{here} = pid >= {before}", f"start{place} = tl.where({here}, {before}, start{place})"]
        for name, source in chosen.items():
            value = source.format(part if name.startswith("v") else first + part)
            lines.append(f"{name} = tl.where({here}, {value}, {name})")
    lines += [f"local{place} = pid - start{place}", f"rest{place} = local{place} // p_{place}"]
    ids = [f"local{place} % p_{place}", f"rest{place} % q_{place}", f"rest{place} // q_{place}"]
    # A size of 1 is a constant to Triton; kernels expect a value.
    ids += [f"pid * 0 + {letter}_{place}" for letter in ("p", "q", "r")]
    passed = [
        f"{name}=b{place}_{name}" if shared else f"{name}=v{place}_{name}"
        for name, shared in zip(branch.names, branch.shared, strict=True)
    ]
    passed += [f"{name}={literal(value)}" for name, value in branch.constants]
    return [*lines, f"body{place}({', '.join([*ids, *passed])})"]


def literal(value: Any) -> str:
    """A constant as it stands in the generated text."""
    return f"tl.{value.name.replace('fp', 'float')}" if hasattr(value, "primitive_bitwidth") else repr(value)


# ---- together: run several operators, of any kinds and over any graphs, in one merged launch.
#
# An :class:`OpCall` is an operator of this package with its arguments. On a GPU the first launches of all calls share
# one
# grid (see ``merged_launch.py``), and the sums over hubs that follow share another. Every part runs the code that its
# operator runs alone, on the same tiles; the number of warps, and with it the order in which the lanes of a tile are
# summed, is chosen for the whole launch, so results agree with those of separate launches to rounding, and bit for
# bit if
# all parts use the same number of warps. On a CPU, and for operators that do more than launch, the calls are made one
# after another.
#
# The custom operators under it take flat lists only, so calls are flattened: tensors, lengths of lists and lists of
# integers, floats, and strings, each in the order of the operators' own schemas. ``together`` is for operators that
# return new tensors, ``together_`` for those that change tensors in place.


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
