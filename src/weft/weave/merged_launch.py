"""Merge several kernel launches, or calls of several operators, into one launch of a generated kernel.

Inside of :func:`collected` a launch ``kernel[grid](...)`` is not made but collected as a :class:`Launch`, so merging
reuses the code that launches an operator's kernels alone. :func:`merged_launch` concatenates the grids of many launches
into one grid, and generates the kernel that finds, from its program id, its launch and its ids there. The body of each
kernel is its own source with ``tl.program_id`` and ``tl.num_programs`` turned into arguments: every launch runs the
code that its operator runs alone, on the same tiles. Its results are bit-identical if it has as many warps alone; with
more or fewer the lanes of a tile are summed in another order.

Launches that differ only in addresses and sizes share one branch of the generated kernel, which selects between them;
so its code grows with the number of *kinds*, not of launches. Addresses and sizes are arguments of the launch, not a
table in memory: in a CUDA graph the launch replays without a copy. A kernel takes seconds to compile, so similar groups
share one: branches have a fixed order, and a capacity of 1, 4, 8, 16, ... launches.

``weft::merged_call`` does this for calls of Weft's operators, of any kinds and over any graphs: their first launches
share one grid, the sums over hubs that follow share another. On a CPU the calls run one after another. Results equal
those of separate calls to rounding. No gradient flows through it: backward passes are operators like any other.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.ops.launch.backend import custom_op, next_power_of_2, use_triton
from weft.ops.launch.hooks import intercepted
from weft.ops.launch.triton_lang import tl, triton
from weft.ops.sparse import spmm_max  # noqa: F401  registers an operator that may be merged

LIMIT = 400  # arguments of one launch: they travel in 4 KB of constant memory
DEFAULT_OPTIONS = {"num_warps": 4, "num_stages": 3}  # Triton's own
SMALLEST_CAPACITY = 4  # of a branch for several launches
SMALL_SHARE = 8  # a launch is small if it has fewer programs than the largest by this factor
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

    def __call__(self) -> None:
        """Make the launch."""
        bound = dict(zip(self.names, self.arguments, strict=True)) | dict(self.constants)
        self.kernel[self.grid](**bound, **dict(self.options))

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
    parameters = inspect.signature(function).parameters
    fixed = tuple(name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation))
    return tuple(parameters), tuple(name for name in parameters if name not in fixed), fixed


@contextmanager
def collected() -> Iterator[list[Launch]]:
    """Append the launches of this thread to the yielded list instead of making them."""
    launches: list[Launch] = []

    def collect(kernel: Any, grid: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
        def append(*args: Any, **kwargs: Any) -> None:
            options = tuple((name, kwargs.pop(name)) for name in DEFAULT_OPTIONS if name in kwargs)
            parameters, names, fixed = _parameters(kernel.fn)
            bound = dict(zip(parameters, args, strict=False)) | kwargs
            constants = tuple((name, bound[name]) for name in fixed)
            arguments = tuple(bound[name] for name in names)
            launches.append(Launch(kernel, (*grid, 1, 1)[:3], names, arguments, constants, options))

        return append

    with intercepted(collect):
        yield launches


def merged_launch(launches: Sequence[Launch]) -> None:
    """Run all ``launches`` in one launch (several if the arguments do not fit into one)."""
    batches: list[list[Launch]] = []
    room = 0
    for launch in launches:
        if launch.programs:
            need = len(launch.arguments) + 4
            if need > room:
                batches.append([])
                room = LIMIT
            batches[-1].append(launch)
            room -= need
    for batch in batches:
        if len(batch) == 1:
            batch[0]()
            continue
        branches = group_by_kind(batch)
        ordered = [launch for branch in branches for launch in branch.launches]
        ends = list(accumulate(launch.programs for launch in ordered))
        sizes = [value for launch, end in zip(ordered, ends, strict=True) for value in (end, *launch.grid)]
        arguments = [
            launch.arguments[number]
            for branch in branches
            for number, shared in enumerate(branch.shared)
            for launch in (branch.launches[:1] if shared else branch.launches)
        ]
        # The largest warps and stages, except of launches that are small compared with the largest: warps share a
        # tile, and if sums over edges got more of them because of a few small reductions, each would do less.
        most = max(launch.programs for launch in batch)
        large = [dict(launch.options) for launch in batch if launch.programs * SMALL_SHARE >= most]
        names = sorted({name for launch in batch for name, _ in launch.options})
        options = {name: max(have.get(name, DEFAULT_OPTIONS[name]) for have in large) for name in names}
        generate(tuple(branch.code for branch in branches))[(ends[-1],)](*sizes, *arguments, **options)


# ---- The generated kernel


@dataclass(frozen=True)
class BranchCode:
    """The code of one kind: how many launches take it, and which of its arguments are the same for all of them."""

    kernel: Any
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    count: int
    shared: tuple[bool, ...]


@dataclass(frozen=True)
class Branch:
    """Launches of one kind, padded to the capacity of a branch with launches that have no programs."""

    launches: tuple[Launch, ...]
    shared: tuple[bool, ...]

    @property
    def code(self) -> BranchCode:
        """What decides the generated text."""
        first = self.launches[0]
        return BranchCode(first.kernel, first.names, first.constants, len(self.launches), self.shared)


def group_by_kind(launches: Sequence[Launch]) -> list[Branch]:
    """The branch of every kind, in an order that does not depend on that of the launches."""
    kinds: dict[tuple[Any, ...], list[Launch]] = {}
    for launch in launches:
        kinds.setdefault(launch.kind, []).append(launch)
    branches = []
    for members in sorted(kinds.values(), key=lambda same: (same[0].kernel.fn.__name__, str(same[0].kind[1:]))):
        capacity = 1 if len(members) == 1 else max(SMALLEST_CAPACITY, next_power_of_2(len(members)))
        shared = tuple(
            (value is None or isinstance(value, Tensor))
            and all(member.arguments[number] is value for member in members)
            for number, value in enumerate(members[0].arguments)
        )
        padding = [replace(members[-1], grid=(0, 1, 1))] * (capacity - len(members))
        branches.append(Branch((*members, *padding), shared))
    return branches


@cache
def generate(branches: tuple[BranchCode, ...]) -> Any:
    """The Triton function of these branches, generated once per process (Triton caches the machine code)."""
    bodies = {f"body{number}": _body_of(branch.kernel) for number, branch in enumerate(branches)}
    return _define(kernel_source(branches), "woven_kernel", {"triton": triton, "tl": tl, **bodies})


@cache
def _body_of(kernel: Any) -> Any:
    """``kernel`` as a function of its program ids and the size of its grid, besides its own parameters."""
    source = textwrap.dedent(inspect.getsource(kernel.fn))
    name = kernel.fn.__name__
    source = re.sub(rf"def {name}\(", f"def {name}({', '.join(IDS)}, ", source, count=1)
    source = re.sub(r"tl\.program_id\((?:axis=)?(\d)\)", r"weft_id\1", source)
    source = re.sub(r"tl\.num_programs\((?:axis=)?(\d)\)", r"weft_n\1", source)
    origin = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    return _define(source, name, dict(kernel.fn.__globals__), origin)


def _define(source: str, name: str, scope: dict[str, Any], origin: str = "") -> Any:
    """The function ``name`` that ``source`` defines; ``origin`` tells equal sources apart.

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


def kernel_source(branches: Sequence[BranchCode]) -> str:
    """The source of the kernel: find this program's launch and its ids there, and call the launch's body."""
    total = sum(branch.count for branch in branches)
    parameters = [f"{letter}{launch}" for launch in range(total) for letter in ("end", "p", "q", "r")]
    lines = []
    first = 0
    for number, branch in enumerate(branches):
        parameters += [
            f"b{number}_{name}" + ("" if shared else f"_{launch}")
            for name, shared in zip(branch.names, branch.shared, strict=True)
            for launch in range(1 if shared else branch.count)
        ]
        indent, last = "    " * (number + 1), first + branch.count - 1
        text = _branch_lines(number, branch, first)
        if number + 1 < len(branches):
            lines += [f"{indent}if pid < end{last}:", *(f"{indent}    {line}" for line in text), f"{indent}else:"]
        else:
            lines += [f"{indent}{line}" for line in text]
        first = last + 1
    head = ["@triton.jit", f"def woven_kernel({', '.join(parameters)}):", "    pid = tl.program_id(0)"]
    return "\n".join([*head, *lines]) + "\n"


def _branch_lines(number: int, branch: BranchCode, first: int) -> list[str]:
    """The lines of branch ``number``, whose launches are numbered from ``first``; the names in it end in its number."""
    passed, chosen = [], {}
    for name, shared in zip(branch.names, branch.shared, strict=True):
        passed.append(f"{name}=b{number}_{name}" if shared else f"{name}=v{number}_{name}")
        if not shared:
            chosen[f"v{number}_{name}"] = f"b{number}_{name}_{{}}"
    for name, value in branch.constants:
        is_type = hasattr(value, "primitive_bitwidth")
        passed.append(f"{name}=tl.{value.name.replace('fp', 'float')}" if is_type else f"{name}={value!r}")
    chosen |= {f"{letter}_{number}": letter + "{}" for letter in ("p", "q", "r")}
    lines = [f"start{number} = {f'end{first - 1}' if first else '0'}"]
    lines += [f"{name} = {source.format(0 if name.startswith('v') else first)}" for name, source in chosen.items()]
    for launch in range(1, branch.count):
        here, before = f"here{number}_{launch}", f"end{first + launch - 1}"
        lines += [f"{here} = pid >= {before}", f"start{number} = tl.where({here}, {before}, start{number})"]
        for name, source in chosen.items():
            value = source.format(launch if name.startswith("v") else first + launch)
            lines.append(f"{name} = tl.where({here}, {value}, {name})")
    lines += [f"local{number} = pid - start{number}", f"rest{number} = local{number} // p_{number}"]
    ids = [f"local{number} % p_{number}", f"rest{number} % q_{number}", f"rest{number} // q_{number}"]
    # A size of 1 is a constant to Triton; kernels expect a value.
    ids += [f"pid * 0 + {letter}_{number}" for letter in ("p", "q", "r")]
    return [*lines, f"body{number}({', '.join([*ids, *passed])})"]


# ---- Calls of operators


@dataclass(frozen=True)
class OpCall:
    """``torch.ops.weft.<name>(*arguments)``, arguments in the order of its schema."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self) -> tuple[Tensor, ...]:
        """Make the call on its own; returns its results as a tuple."""
        return _as_tuple(operator(self.name)(*self.arguments))


def _as_tuple(out: Any) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else () if out is None else (out,)


def operator(name: str) -> Any:
    """The registered operator ``weft::name``."""
    return getattr(torch.ops.weft, name).default


@cache
def count_results(name: str) -> int:
    """How many tensors ``weft::name`` returns."""
    return len(operator(name)._schema.returns)


def merged_call_triton(calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """The first launches of all calls in one, then the second ones of those that have any, and so on."""
    from weft.weave.launchers import INDEPENDENT, LAUNCHERS  # circular: it imports the operators that use this

    outputs: list[Any] = []
    phases: list[list[Launch]] = []
    for call in calls:
        if call.name not in LAUNCHERS:
            outputs.append(call())
            continue
        with collected() as launches:
            outputs.append(LAUNCHERS[call.name](*_completed(call)))
        for number, launch in enumerate(launches):
            phase = 0 if call.name in INDEPENDENT else number
            phases += [[] for _ in range(phase + 1 - len(phases))]
            phases[phase].append(launch)
    for phase in phases:
        merged_launch(phase)
    return [_as_tuple(made() if callable(made) else made) for made in outputs]


class FlatCalls(NamedTuple):
    """Calls as flat lists, which is what a custom operator can take: the arguments of ``weft::merged_call``.

    Tensors, lengths of lists and lists of integers, floats, and strings, each in the order of the operators' schemas.
    """

    names: list[str]
    tensors: list[Tensor | None]
    counts: list[int]
    numbers: list[float]
    words: list[str]


@cache
def _arguments(name: str) -> tuple[tuple[str, Any], ...]:
    """The type and the default of every argument of ``weft::name``."""
    schema = operator(name)._schema
    kinds = (str(argument.type).replace("Optional[Tensor]", "Tensor") for argument in schema.arguments)
    return tuple(zip(kinds, (argument.default_value for argument in schema.arguments), strict=True))


def _completed(call: OpCall) -> tuple[Any, ...]:
    """The arguments of ``call``, completed by the defaults of its operator."""
    return (*call.arguments, *(default for _, default in _arguments(call.name)[len(call.arguments) :]))


def flatten(calls: Sequence[OpCall]) -> FlatCalls:
    """The calls as flat lists."""
    flat = FlatCalls([call.name for call in calls], [], [], [], [])
    for call in calls:
        for (kind, _), value in zip(_arguments(call.name), _completed(call), strict=True):
            if kind == "Tensor":
                flat.tensors.append(value)
            elif kind == "List[Tensor]":
                flat.counts.append(len(value))
                flat.tensors.extend(value)
            elif kind == "List[int]":
                flat.counts.extend([len(value), *value])
            elif kind == "str":
                flat.words.append(value)
            else:
                flat.numbers.append(float(value))
    return flat


def unflatten(flat: FlatCalls) -> list[OpCall]:
    """The inverse of :func:`flatten`."""
    tensors, counts, numbers, words = iter(flat.tensors), iter(flat.counts), iter(flat.numbers), iter(flat.words)
    take: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: next(tensors),
        "List[Tensor]": lambda: [next(tensors) for _ in range(next(counts))],
        "List[int]": lambda: [next(counts) for _ in range(next(counts))],
        "str": lambda: next(words),
        "int": lambda: int(next(numbers)),
        "bool": lambda: bool(next(numbers)),
        "float": lambda: next(numbers),
    }
    return [OpCall(name, tuple(take[kind]() for kind, _ in _arguments(name))) for name in flat.names]


def _run(flat: FlatCalls) -> list[Tensor]:
    calls = unflatten(flat)
    on_gpu = any(tensor is not None and use_triton(tensor) for tensor in flat.tensors)
    done = merged_call_triton(calls) if on_gpu else [call() for call in calls]
    return [result for outputs in done for result in outputs]


@custom_op(
    "weft::merged_call",
    schema="(str[] names, Tensor?[] tensors, int[] counts, float[] numbers, str[] words) -> Tensor[]",
)
def _merged_op(names, tensors, counts, numbers, words):
    return _run(FlatCalls(names, tensors, counts, numbers, words))


@_merged_op.register_fake
def _merged_fake(names, tensors, counts, numbers, words):
    return [result for call in unflatten(FlatCalls(names, tensors, counts, numbers, words)) for result in call()]


@custom_op(
    "weft::merged_call_",
    mutates_args=("tensors",),
    schema="(str[] names, Tensor(a!)?[] tensors, int[] counts, float[] numbers, str[] words) -> ()",
)
def _merged_in_place(names, tensors, counts, numbers, words):
    """For operators that change tensors in place and return none."""
    _run(FlatCalls(names, tensors, counts, numbers, words))


@_merged_in_place.register_fake
def _merged_in_place_fake(names, tensors, counts, numbers, words):
    return None
