"""record: trace a step into a graph of operators while it runs once.

The step works in place on tensors that stay where they are (weights, moments, the clock). The recorder is a dispatch
mode below autograd and vmap that traces every operator; a tensor that no operator made is an input, bound to that very
tensor. Running the graph on its inputs runs the step again, without its Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.observer import HOST_READS, written_places
from weft.core.errors import InputError
from weft.ops.launch.hooks import intercepted
from weft.ops.sparse import spmm  # noqa: F401  this and the next register the operators that are written down
from weft.runtime.step.state import put_back
from weft.weave import launchers as copies

# ---- The graph of a traced step: operators in execution order, and their arguments.
#
# The nodes have the attributes of ``torch.fx`` nodes (``op``, ``target``, ``args``, ``meta``, ``users``), but nothing
# is
# looked up, named or checked while they are made: a step has hundreds of them, and tracing, matching and merging must
# cost less than a few epochs. ``Graph.to_fx`` converts to an fx graph, for printing or compiling.


class Node:
    """``target(*args, **kwargs)``, an input (``op`` is ``"placeholder"``) or what the graph returns (``"output"``)."""

    __slots__ = ("all_input_nodes", "args", "kwargs", "meta", "number", "op", "target", "users")

    def __init__(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> None:
        self.op, self.target, self.args, self.kwargs, self.number = op, target, args, kwargs, number
        self.meta: dict[str, Any] = {}
        self.users: dict[Node, None] = {}
        given: dict[Node, None] = {}
        _collect(args, given)
        if kwargs:
            _collect(kwargs.values(), given)
        self.all_input_nodes = tuple(given)  # the nodes whose results are its arguments, each once
        for node in given:
            node.users[self] = None

    @property
    def name(self) -> str:
        """Unique within its graph."""
        if self.op != "call_function":
            return str(self.target)
        return f"{getattr(self.target, '__name__', 'call').replace('.', '_')}_{self.number}"

    def __repr__(self) -> str:
        return self.name


def _collect(values: Iterable[Any], found: dict[Node, None]) -> None:
    """Add the nodes in a nest of tuples, lists and dictionaries to ``found``."""
    for value in values:
        kind = type(value)
        if kind is Node:
            found[value] = None
        elif kind is list or kind is tuple:
            _collect(value, found)
        elif kind is dict:
            _collect(value.values(), found)


def map_nodes(value: Any, change: Callable[[Node], Any]) -> Any:
    """``value`` with every node in it replaced by ``change(node)``."""
    kind = type(value)
    if kind is Node:
        return change(value)
    if kind is list:
        return [map_nodes(one, change) for one in value]
    if kind is tuple:
        return tuple([map_nodes(one, change) for one in value])
    if kind is dict:
        return {name: map_nodes(one, change) for name, one in value.items()}
    return value


class Graph:
    """Inputs, operators in order, and what is returned."""

    def __init__(self) -> None:
        self.inputs: list[Node] = []
        self.calls: list[Node] = []
        self.returns: Node | None = None
        self._numbers = 0

    @property
    def nodes(self) -> list[Node]:
        """All nodes: inputs first, the output last."""
        return [*self.inputs, *self.calls, *(() if self.returns is None else (self.returns,))]

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        self._numbers += 1
        return Node(op, target, args, kwargs or {}, self._numbers)

    def placeholder(self, name: str) -> Node:
        """Add an input."""
        self.inputs.append(self._node("placeholder", name, ()))
        return self.inputs[-1]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """Append an operator."""
        self.calls.append(self._node("call_function", target, args, kwargs))
        return self.calls[-1]

    def output(self, value: Any) -> Node:
        """Return ``value``."""
        self.returns = self._node("output", "output", (value,))
        return self.returns

    def drop_unread(self, kept: Callable[[Node], bool]) -> None:
        """Eliminate dead operators, and those that only dead ones read, except ``kept`` ones."""
        left = []
        for node in reversed(self.calls):
            if node.users or kept(node):
                left.append(node)
            else:
                for given in node.all_input_nodes:
                    del given.users[node]
        self.calls = left[::-1]

    def to_fx(self) -> fx.Graph:
        """The same as an fx graph."""
        graph = fx.Graph()
        made: dict[Node, fx.Node] = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.calls:
            args, kwargs = map_nodes((node.args, node.kwargs), made.__getitem__)
            made[node] = graph.call_function(node.target, args, kwargs)
        if self.returns is not None:
            graph.output(map_nodes(self.returns.args[0], made.__getitem__))
        return graph

    def module(self) -> fx.GraphModule:
        """A function of the inputs; generating its code takes longer than everything else here."""
        return fx.GraphModule(torch.nn.Module(), self.to_fx())


# ---- Rules that trace a multi-stage operator as one graph node per stage.
#
# A weight gradient ends in a split-K reduction that only the update reads; transposed weights are copied before they
# are
# multiplied. As nodes of their own, such stages share launches with whatever else is ready. A rule adds the nodes that
# make up one operator, whose arguments are nodes already, and says which node stands for which of its results.

weft = torch.ops.weft
aten = torch.ops.aten


class Writer(Protocol):
    """The tracer that a rule adds nodes to."""

    def write(self, function: Any, args: tuple[Any, ...], like: Tensor | None = None) -> Node:
        """A new node; with ``like``, one that stands for a tensor in new memory."""

    def describe(self, node: Node, tensor: Tensor) -> None:
        """``node`` stands for ``tensor`` from here on."""


Rule = Callable[[Writer, tuple[Any, ...], Any], None]


def _sums(writer: Writer, partial: Node, outs: Sequence[Tensor], tasks: int) -> None:
    """The sum over ``partial [T, P, K]``, and the node of each of its one or two results."""
    sizes = [out.numel() // max(tasks, 1) for out in outs]
    dtype = str(outs[0].dtype).removeprefix("torch.")
    node = writer.write(weft.add_parts.default, (partial, *(*sizes, 0)[:2], dtype))
    for place, out in enumerate(outs):
        part = writer.write(operator.getitem, (node, place))
        writer.describe(part, out)
        writer.describe(writer.write(aten.view.default, (part, list(out.shape))), out)


def _results(writer: Writer, node: Node, outs: Sequence[Tensor]) -> None:
    for place, out in enumerate(outs):
        writer.describe(writer.write(operator.getitem, (node, place)), out)


def _weight_grad(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.weight_grad_parts.default, args, out)
    _sums(writer, partial, [out], out.shape[:-2].numel())


def _column_sum(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.column_sum_parts.default, args, out)
    _sums(writer, partial, [out], out.shape[:-1].numel())


def _cross_entropy(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    partial = writer.write(weft.cross_entropy_rows_parts.default, args, out)
    _sums(writer, partial, [out], out.numel())


def _backward_bias(writer: Writer, args: tuple[Any, ...], outs: tuple[Tensor, Tensor]) -> None:
    node = writer.write(weft.bias_act_dropout_backward_bias_parts.default, args)
    _results(writer, node, outs[:1])
    partial = writer.write(operator.getitem, (node, 1), outs[1])
    _sums(writer, partial, outs[1:], outs[1].shape[:-1].numel())


def _linear_backward(writer: Writer, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> None:
    node = writer.write(weft.linear_backward_parts.default, args)
    _results(writer, node, outs[:2])
    partial = writer.write(operator.getitem, (node, 2), outs[2])
    _sums(writer, partial, outs[2:], outs[3].shape[:-1].numel())


def _spmm(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    """The kernel needs contiguous rows; a transposed weight is copied first."""
    x, *rest = args
    if not x.meta["contiguous"]:
        x = writer.write(weft.copied.default, (x,), out)
    writer.describe(writer.write(weft.spmm.default, (x, *rest)), out)


def _over_contiguous_weight(function: Any) -> Rule:
    """The kernel needs a contiguous weight; the transposed one of a backward pass is copied first."""

    def rule(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
        x, weight, *rest = args
        if not weight.meta["contiguous"]:
            weight = writer.write(weft.copied.default, (weight,), out)
        writer.describe(writer.write(function, (x, weight, *rest)), out)

    return rule


def _clone(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    writer.describe(writer.write(weft.copied.default, args[:1]), out)


def _cat(writer: Writer, args: tuple[Any, ...], out: Tensor) -> None:
    writer.describe(writer.write(weft.side_by_side.default, args[:1]), out)


def _suits_clone(args: tuple[Any, ...], out: Tensor) -> bool:
    return out.is_contiguous() and out.dim() <= copies.DIMENSIONS


def _suits_cat(args: tuple[Any, ...], out: Tensor) -> bool:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    even = all(part.dim() == out.dim() and part.dtype == out.dtype for part in parts)
    return even and out.dim() <= 2 and dim % out.dim() == out.dim() - 1


RULES: dict[Any, tuple[Rule, Callable[[tuple[Any, ...], Any], bool]]] = {
    weft.weight_grad.default: (_weight_grad, lambda args, out: True),
    weft.column_sum.default: (_column_sum, lambda args, out: True),
    weft.cross_entropy_rows.default: (_cross_entropy, lambda args, out: True),
    weft.bias_act_dropout_backward_bias.default: (_backward_bias, lambda args, out: True),
    weft.linear_backward.default: (_linear_backward, lambda args, out: True),
    weft.spmm.default: (_spmm, lambda args, out: True),
    weft.product.default: (_over_contiguous_weight(weft.product.default), lambda args, out: True),
    weft.linear.default: (_over_contiguous_weight(weft.linear.default), lambda args, out: True),
    aten.clone.default: (_clone, _suits_clone),
    aten.cat.default: (_cat, _suits_cat),
}


def rule_for(function: Any, args: tuple[Any, ...], out: Any) -> Rule | None:
    """The rule that traces ``out = function(*args)`` (tensors, not nodes) as several nodes; None: as one."""
    rule, suits = RULES.get(function, (None, None))
    return rule if rule is not None and suits is not None and suits(args, out) else None


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
