"""Observer: record every operator that runs, the storages it touches, and the lifetime of each storage.

It is a dispatch mode below autograd and vmap, so it records what a device would run. Lifetimes are the real ones: a
storage ends when the code, autograd included, has released it, not when it was last used.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from weft.capture.meta_shapes import shape_of
from weft.core.program import family_of
from weft.graph.check import dtype_name
from weft.ops.launch.hooks import intercepted


def watched_launches(seen: Callable[[str, list[Tensor]], None]) -> AbstractContextManager[None]:
    """Kernel launches of this thread call ``seen(name, tensor arguments)`` and do nothing else.

    So launchers can be dry-run on meta tensors.
    """

    def watch(kernel: Any, grid: Any, launch: Callable[..., Any]) -> Callable[..., None]:
        def report(*args: Any, **options: Any) -> None:
            arguments = [*args, *options.values()]
            seen(kernel.fn.__name__, [value for value in arguments if isinstance(value, Tensor)])

        return report

    return intercepted(watch)


@dataclass
class Storage:
    """One storage under observation: when it was made, and the shape of the tensor that made it."""

    number: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    born: int
    alive: weakref.ref[torch.UntypedStorage]


@dataclass
class ObservedCall:
    """One operator call. ``reads``/``writes`` are numbers of storages; ``made`` those that it allocated.

    ``args`` are the arguments with tensors replaced by :class:`Seen`, so that nothing is kept alive.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    made: tuple[int, ...]
    inside: Inside
    phase: str | None = None
    stream: int = 0
    in_backward: bool = field(default_factory=lambda: in_backward())
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    frees: list[int] = field(default_factory=list)

    def argument(self, name: str) -> Any:
        """The argument of that name in the operator's schema; None if it is None or the operator has none."""
        return argument(self.name, self.args, name)


@dataclass
class Inside:
    """What an operator's own code does on the device: launches, workspace blocks, library calls.

    ``seen``: whether its code could be dry-run.
    """

    seen: bool = True
    launches: int | None = None
    pieces: tuple[int, ...] = ()
    library: bool = False
    lt: bool = False


@dataclass(frozen=True)
class Seen:
    """Metadata of a tensor: its shape, the bytes per element, its storage and whether it is dense."""

    shape: tuple[int, ...]
    itemsize: int
    storage: int
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements, whatever the storage holds besides."""
        return self.numel * self.itemsize


class Observer(TorchDispatchMode):
    """Records calls and storages of one device while it is entered.

    ``kind`` is the type of device whose tensors count (``"meta"``, ``"cpu"``). ``look_inside`` finds the launches and
    workspaces of Weft's own operators by running their launchers on the arguments of the call.
    """

    def __init__(self, kind: str, look_inside: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.phase: str | None = None  # of the next calls, if known
        self.stream = 0  # on which the next calls would run
        self.calls: list[ObservedCall] = []
        self.storages: list[Storage] = []
        self._live: dict[int, int] = {}
        self._gone: list[int] = []  # since the last call
        self._look_inside = look_inside
        self._stack, self._depth = ExitStack(), 0
        self._insides: dict[Any, Inside] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: with it, every call would go through torch's compiler."""
        return False

    def __enter__(self) -> Observer:
        if self._depth == 0:
            self._stack.enter_context(watched_launches(self._launch))
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self._stack.close()
            self.settle()

    def number(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage if it is known and alive, else None."""
        return self._live.get(tensor.untyped_storage()._cdata) if self._counts(tensor) else None

    def alive(self) -> list[int]:
        """The numbers of the storages that are alive now."""
        self.settle()
        return sorted(self._live.values())

    def settle(self) -> None:
        """Record the storages that were released since the last call."""
        gone, self._gone = self._gone, []
        if self.calls:
            self.calls[-1].frees += gone

    def _counts(self, tensor: Tensor) -> bool:
        there = tensor.is_meta if self.kind == "meta" else tensor.device.type == self.kind
        return there and tensor.layout == torch.strided

    def _know(self, tensor: Tensor) -> tuple[int, bool]:
        """The number of the tensor's storage, and whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._live.get(key)
        if number is not None:
            return number, False
        number = len(self.storages)
        # A finalizer, not a scan at every call: thousands of members hold thousands of storages.
        alive = weakref.ref(storage, lambda _: self._gone.append(self._live.pop(key)))
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        self.storages.append(Storage(number, storage.nbytes(), shape, dtype, len(self.calls), alive))
        self._live[key] = number
        return number, True

    def _seen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not self._counts(value):
                return None
            return Seen(tuple(value.shape), value.element_size(), self._know(value)[0], dtype_name(value.dtype))
        return type(value)(map(self._seen, value)) if type(value) in (list, tuple) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tensors_in((args, kwargs)) if self._counts(t)]
        device = kwargs.get("device")
        if not inputs and (self.kind != "cpu" if device is None else torch.device(device).type != self.kind):
            return func(*args, **kwargs)  # neither its arguments nor its results are on the device
        if is_composite(func):
            with self:  # inside an operator, below autograd, no other rule decomposes it
                if func is torch.ops.aten.matmul.default:
                    left, right = args
                    if left.dim() == right.dim() == 2:
                        return torch.mm(left, right)
                    if left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0]:
                        return torch.bmm(left, right)
                return func.decompose(*args, **kwargs)
        reads = _unique([self._know(t)[0] for t in inputs])
        if func.is_view:  # nothing happens on the device; 4 of 10 operators of a step
            return func(*args, **kwargs)
        self.settle()
        seen_args, seen_kwargs = self._seen(tuple(args)), {key: self._seen(v) for key, v in kwargs.items()}
        if _accumulates(func, args):
            func = torch.ops.aten.add_.Tensor  # what autograd's engine does outside of any mode
        out = shape_of(func, args, kwargs) if self.kind == "meta" else NotImplemented
        if out is NotImplemented:
            out = func(*args, **kwargs)
        known = [self._know(t) for t in tensors_in(out) if self._counts(t)]
        made = _unique([number for number, new in known if new])
        changed = [args[i] if i < len(args) else kwargs.get(name) for i, name in written_places(func)]
        written = [self._know(t)[0] for t in tensors_in(changed) if self._counts(t)]
        if not any(self.storages[number].bytes for number in (*made, *written)):
            return out  # a view, or nothing at all: nothing happens on the device
        name = func._schema.name.replace("::", ".")  # "aten.mm", "weft.spmm"
        outs = self._seen(out if isinstance(out, (list, tuple)) else (out,))
        inside, writes = self._inside(func, args, kwargs), _unique([*made, *written])
        call = ObservedCall(name, seen_args, seen_kwargs, outs, reads, writes, made, inside, self.phase, self.stream)
        self.calls.append(call)
        return out

    def _launch(self, kernel: str, tensors: list[Tensor]) -> None:
        """Record a kernel that is launched outside of any operator."""
        self.settle()
        counted = [t for t in tensors if self._counts(t)]
        args, reads = tuple(self._seen(t) for t in counted), _unique(self._know(t)[0] for t in counted)
        name, inside = "triton." + kernel.strip("_"), Inside(launches=1)
        self.calls.append(ObservedCall(name, args, {}, (), reads, (), (), inside, self.phase, self.stream))

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Inside:
        if not self._look_inside or func.namespace != "weft":
            return Inside()
        key = (func, _signature(args), _signature(tuple(kwargs.items())))
        if key not in self._insides:
            try:
                self._insides[key] = look_inside(func, args, kwargs, self.kind)
            except (RuntimeError, NotImplementedError):  # a launcher that reads data cannot be dry-run
                self._insides[key] = Inside(seen=False)
        return self._insides[key]


def is_dry_run() -> bool:
    """Whether an :class:`Observer` records what runs now."""
    return any(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())


def look_inside(func: Any, args: Any, kwargs: Any, kind: str) -> Inside:
    """Dry-run the code of one of Weft's operators on meta tensors, and record what it does."""
    implementation = torch._library.custom_ops.OPDEFS[func._schema.name]._init_fn
    inner = Observer(kind)
    with inner:
        for tensor in tensors_in((args, kwargs)):
            if inner._counts(tensor):
                inner._know(tensor)
        first = len(inner.storages)
        result = implementation(*args, **kwargs)
    results = {number for t in tensors_in(result) if (number := inner.number(t)) is not None and number >= first}
    now: dict[int, int] = {}
    most: tuple[int, ...] = ()  # the blocks allocated besides arguments and results, at their peak
    for call in inner.calls:
        now |= {n: inner.storages[n].bytes for n in call.made if n >= first and n not in results}
        if sum(now.values()) > sum(most):
            most = tuple(now.values())
        for number in call.frees:
            now.pop(number, None)
    return Inside(
        launches=sum(family_of(call.name) != "allocation" for call in inner.calls),
        pieces=most,
        library=any(call.name in LIBRARY for call in inner.calls),
        lt=any(is_lt(call) for call in inner.calls),
    )


# Operators that call cuBLAS, which keeps a workspace.
LIBRARY = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm", "aten.addmv", "aten.mv")


def is_lt(call: ObservedCall) -> bool:
    """Whether a product goes through cuBLASLt: torch uses it for products with a bias vector.

    A matrix with a single row or column is the exception.
    """
    if call.name != "aten.addmm":
        return False
    bias, left, right = call.args[:3]
    return len(bias.shape) == 1 and min(*left.shape, *right.shape) > 1


def tensors_in(tree: Any, kind: type = Tensor) -> list[Any]:
    """Every tensor, or object of another ``kind``, in nested tuples, lists and dictionaries."""
    found: list[Any] = []
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else (tree,):
        if isinstance(part, kind):
            found.append(part)
        elif isinstance(part, (list, tuple, dict)):
            found += tensors_in(part, kind)
    return found


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return torch._C._current_graph_task_id() != -1


ENGINE_HOLDS = 4, 2  # references to a gradient, and to its storage, while the engine alone adds to it


def _accumulates(func: Any, args: Any) -> bool:
    """Whether the engine itself adds two gradients of one tensor, holding the only reference to the first."""
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or not in_backward() or not _from_engine():
        return False
    left, right = args
    if not isinstance(right, Tensor) or left.shape != right.shape or not left.is_contiguous():
        return False
    storage = torch._C._storage_Use_Count(left.untyped_storage()._cdata)
    return left._use_count() <= ENGINE_HOLDS[0] and storage <= ENGINE_HOLDS[1]


def _from_engine() -> bool:
    """Whether the operator was called by autograd's engine directly, without a Python function in between."""
    frame = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _signature(tree: Any) -> Any:
    """What decides an operator's own allocations: shapes, strides, types and plain values."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple(map(_signature, tree))
    return tree


def _unique(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


# ---- Schemas of operators

aten = torch.ops.aten
HOST_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


@cache
def argument_places(operator: str) -> Mapping[str, int]:
    """Positions of the arguments of an operator (``"weft.spmm"``), by their names in its schema."""
    namespace, _, name = operator.rpartition(".")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return MappingProxyType({argument.name: position for position, argument in enumerate(schema.arguments)})


def argument(operator: str, args: Sequence[Any], name: str) -> Any:
    """The argument called ``name`` among ``args``; None if the operator has none of that name, or it was left out."""
    position = argument_places(operator).get(name)
    return args[position] if position is not None and position < len(args) else None


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator of torch is written in terms of others, such as ``aten.matmul``."""
    composite = "CompositeImplicitAutograd"
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite)


@cache
def written_places(target: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that ``target`` writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)
