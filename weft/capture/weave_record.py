"""record: a step as a graph of operators, taken down while it runs once.

The step works in place on tensors that stay where they are (weights, moments, the clock). The recorder stands below
autograd and vmap and writes every operator down; a tensor that no operator made is an input, bound to the very tensor
it was. Running the graph on its inputs is running the step again, without its Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from weft.capture.weave_apart import rule_for
from weft.core.errors import InputError
from weft.ops.multi_launch import intercepted

HOST_QUESTIONS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default")


@dataclass(frozen=True)
class Captured:
    """A step: ``graph`` has a placeholder for each of ``inputs`` and returns what the step returned.

    Nodes that stand for a tensor have ``meta["storage"]``, the number of its storage within this step, and its
    ``meta["shape"]``, ``meta["dtype"]`` and ``meta["contiguous"]``; ``meta["backward"]``: whether a node ran inside
    autograd's backward pass.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Tensor, ...]

    def module(self) -> fx.GraphModule:
        """The graph, ready to be called with ``inputs``."""
        return fx.GraphModule(torch.nn.Module(), self.graph)


def record(
    step: Callable[[], Any], name: str = "step", changed: Iterable[Tensor] = (), apart: bool = False
) -> Captured:
    """What ``step()`` does, found out by running it; the tensors ``changed`` are put back as they were.

    It runs twice: what is built once (forms of the adjacency, compiled kernels) is built by the first run and not
    recorded. ``apart`` writes operators of several stages down stage by stage: see ``weave_apart.py``.
    """
    recorder = Recorder(name, apart)
    with _put_back(changed):
        step()
        with recorder:
            result = step()
        recorder.graph.output(tree_map(recorder.node_of, result))
    recorder.graph.eliminate_dead_code(is_impure_node=_counts_unread)
    return Captured(name, recorder.graph, tuple(recorder.inputs))


@contextmanager
def _put_back(changed: Iterable[Tensor]) -> Iterator[None]:
    """Tensors hold afterwards what they held before."""
    saved = [(tensor, tensor.clone()) for tensor in changed]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)


def _counts_unread(node: fx.Node) -> bool:
    """Whether a node counts though nobody reads it: it writes to a tensor, draws numbers, or is part of the frame."""
    return node.op in ("placeholder", "output") or bool(written_arguments(node)) or is_random(node)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found: list[fx.Node] = []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            fx.node.map_arg(given.get(argument.name), found.append)
    return found


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from torch's own generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class Recorder(TorchDispatchMode):
    """Writes down every operator that runs while it is entered; ``apart`` as in :func:`record`."""

    def __init__(self, name: str, apart: bool = False) -> None:
        super().__init__()
        self.name, self.apart, self.graph = name, apart, fx.Graph()
        self.inputs: list[Tensor] = []
        self._nodes = WeakTensorKeyDictionary()
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}  # address to number
        self._numbers = 0
        self._given: set[int] = set()  # numbers of storages that were there before
        self._first: fx.Node | None = None  # the first operator: inputs go before it
        self._depth = 0  # operators that are running
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(intercepted(self._launch))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _launch(self, kernel: Any, grid: Any, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A launch inside of an operator belongs to it; one of its own would be missing from the graph."""
        if self._depth:
            return launch
        raise InputError(
            f"{self.name}: the step launches {kernel.fn.__name__} itself; register it as an operator (torch.library) or"
            " train it apart"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in HOST_QUESTIONS:
            raise InputError(f"{self.name}: the step asks the host for a number ({func}); such a step cannot be woven")
        known_args, known_kwargs = tree_map(self.node_of, (tuple(args), kwargs))
        self._depth += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._depth -= 1
        rule = rule_for(func, args, out) if self.apart else None
        if rule is None:
            self._register(self._call(func, known_args, known_kwargs), out)
        else:
            rule(self, known_args, out)
        return out

    def write(self, function: Any, args: tuple[Any, ...], like: Tensor | None = None) -> fx.Node:
        """A new node; with ``like``, one that stands for a tensor of its type with memory that nobody else knows."""
        node = self._call(function, args)
        if like is not None:
            node.meta |= {"storage": self._numbers, "shape": tuple(like.shape), "dtype": like.dtype, "contiguous": True}
            self._numbers += 1
        return node

    def _call(self, function: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["backward"] = torch._C._current_graph_task_id() != -1
        self._first = self._first or node
        return node

    def _register(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self.describe(node, out)
        elif isinstance(out, (tuple, list)):
            for place, part in enumerate(out):
                if isinstance(part, Tensor):
                    self.describe(self._call(operator.getitem, (node, place)), part)

    def describe(self, node: fx.Node, tensor: Tensor) -> None:
        """``node`` stands for ``tensor`` from here on."""
        node.meta["storage"] = self._number(tensor)
        node.meta |= {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "contiguous": tensor.is_contiguous()}
        self._nodes[tensor] = node

    def _number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage; another storage at the address of one that is gone is a new one."""
        storage = tensor.untyped_storage()
        number, alive = self._storages.get(storage._cdata, (-1, None))
        if alive is None or alive.expired():
            number, self._numbers = self._numbers, self._numbers + 1
            self._storages[storage._cdata] = number, StorageWeakRef(storage)
        return number

    def node_of(self, value: Any) -> Any:
        """The node that made a tensor, a new input where none did; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        node = self._nodes.get(value)
        return self._input(value) if node is None else node

    def _input(self, tensor: Tensor) -> fx.Node:
        before = self._numbers
        number = self._number(tensor)
        if number < before and number not in self._given:
            raise InputError(f"{self.name}: a tensor was made out of the recorder's sight; such a step cannot be woven")
        with nullcontext() if self._first is None else self.graph.inserting_before(self._first):
            node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(tensor)
        self._given.add(number)
        self.describe(node, tensor)
        return node
