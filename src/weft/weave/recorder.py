"""record: trace a step into a graph of operators while it runs once.

The step works in place on tensors that stay where they are (weights, moments, the clock). The recorder is a dispatch
mode below autograd and vmap that traces every operator; a tensor that no operator made is an input, bound to that very
tensor. Running the graph on its inputs runs the step again, without its Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.schemas import HOST_READS, written_places
from weft.core.errors import InputError
from weft.ops.launch.hooks import intercepted
from weft.runtime.step.state import put_back
from weft.weave.graph import Graph, Node, map_nodes
from weft.weave.split_rules import rule_for

aten = torch.ops.aten
PLAIN = frozenset((int, float, bool, str, type(None)))  # types of most arguments that are no tensors


@dataclass(frozen=True)
class Captured:
    """A step: ``graph`` has a placeholder for each of ``inputs`` and returns what the step returned.

    Nodes that stand for a tensor have ``meta["storage"]``, the number of its storage within this step, and its
    ``meta["shape"]``, ``meta["dtype"]`` and ``meta["contiguous"]``; ``meta["backward"]``: whether a node ran inside
    autograd's backward pass.
    """

    name: str
    graph: Graph
    inputs: tuple[Tensor, ...]


def record(
    step: Callable[[], Any],
    name: str = "step",
    changed: Iterable[Tensor] = (),
    *,
    apart: bool = False,
    has_run: bool = False,
) -> Captured:
    """Trace ``step()`` by running it; the tensors ``changed`` are restored afterwards.

    It runs twice unless it ``has_run`` before: what is built once (forms of the adjacency, compiled kernels) is
    built by the first run and not traced. ``apart`` traces operators of several stages as one node per stage: see
    ``split_rules.py``.
    """
    recorder = Recorder(name, apart)
    with put_back(changed):
        if not has_run:
            step()
        with recorder:
            result = step()
        recorder.graph.output(recorder.nodes_of(result))
    recorder.graph.drop_unread(kept=_counts_unread)
    return Captured(name, recorder.graph, tuple(recorder.inputs))


def _counts_unread(node: Node) -> bool:
    """Whether an operator without readers has an effect: it writes to a tensor, or draws random numbers."""
    return bool(written_arguments(node)) or is_random(node)


def written_arguments(node: Node) -> list[Node]:
    """The arguments that a node writes to."""
    found: list[Node] = []
    for place, name in written_places(node.target):
        map_nodes(node.args[place] if place < len(node.args) else node.kwargs.get(name), found.append)
    return found


def is_random(node: Node) -> bool:
    """Whether a node draws from torch's own generator."""
    return _is_random(node.target)


@cache
def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class Recorder(TorchDispatchMode):
    """Traces every operator that runs while it is entered; ``apart`` as in :func:`record`."""

    def __init__(self, name: str, apart: bool = False) -> None:
        super().__init__()
        self.name, self.apart, self.graph = name, apart, Graph()
        self.inputs: list[Tensor] = []
        self._nodes: dict[int, tuple[ref[Tensor], Node]] = {}  # address of a tensor's object to what it stands for
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}  # address to number
        self._numbers = 0
        self._given: set[int] = set()  # numbers of storages that were there before
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
        """A launch inside an operator belongs to it; one outside of any operator would be missing from the graph."""
        if self._depth:
            return launch
        raise InputError(
            f"{self.name}: the step launches {kernel.fn.__name__} itself; register it as an operator (torch.library) or"
            " train it apart"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise InputError(f"{self.name}: the step reads a number back to the host ({func}); it cannot be woven")
        known_args, known_kwargs = self.nodes_of(args), self.nodes_of(kwargs)
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

    def write(self, function: Any, args: tuple[Any, ...], like: Tensor | None = None) -> Node:
        """A new node; with ``like``, one that stands for a tensor of its type in new memory."""
        node = self._call(function, args)
        if like is not None:
            node.meta |= {"storage": self._numbers, "shape": tuple(like.shape), "dtype": like.dtype, "contiguous": True}
            self._numbers += 1
        return node

    def _call(self, function: Any, args: tuple, kwargs: dict | None = None) -> Node:
        node = self.graph.call_function(function, args, kwargs)
        node.meta["backward"] = torch._C._current_graph_task_id() != -1
        return node

    def _register(self, node: Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self.describe(node, out)
        elif isinstance(out, (tuple, list)):
            for place, part in enumerate(out):
                if isinstance(part, Tensor):
                    self.describe(self._call(operator.getitem, (node, place)), part)

    def describe(self, node: Node, tensor: Tensor) -> None:
        """``node`` stands for ``tensor`` from here on."""
        meta = node.meta
        meta["storage"], meta["shape"] = self._number(tensor), tuple(tensor.shape)
        meta["dtype"], meta["contiguous"] = tensor.dtype, tensor.is_contiguous()
        self._nodes[id(tensor)] = ref(tensor), node

    def _number(self, tensor: Tensor) -> int:
        """The number of the tensor's storage; another storage at the address of one that is gone is a new one."""
        storage = tensor.untyped_storage()
        number, alive = self._storages.get(storage._cdata, (-1, None))
        if alive is None or alive.expired():
            number, self._numbers = self._numbers, self._numbers + 1
            self._storages[storage._cdata] = number, StorageWeakRef(storage)
        return number

    def nodes_of(self, value: Any) -> Any:
        """``value``, a nest of lists and the like, with a node in the place of every tensor.

        It is the one that made the tensor, and a new input where none did.
        """
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.nodes_of(one) for one in value])
        if kind in PLAIN:
            return value
        if isinstance(value, Tensor):
            known = self._nodes.get(id(value))  # of a tensor that is gone, if its object lay at the same address
            return known[1] if known is not None and known[0]() is value else self._input(value)
        if kind is dict:
            return {name: self.nodes_of(one) for name, one in value.items()}
        return value

    def _input(self, tensor: Tensor) -> Node:
        before = self._numbers
        number = self._number(tensor)
        if number < before and number not in self._given:
            raise InputError(
                f"{self.name}: a tensor was made outside of the traced operators; the step cannot be woven"
            )
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(tensor)
        self._given.add(number)
        self.describe(node, tensor)
        return node
