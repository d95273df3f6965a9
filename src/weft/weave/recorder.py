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
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.observer import HOST_READS, in_backward, written_places
from weft.core.errors import InputError
from weft.ops.launch.hooks import intercepted
from weft.ops.sparse import spmm  # noqa: F401  this and the next register the operators that are written down
from weft.runtime.step.state import restored
from weft.weave.launchers import DIMENSIONS

# Nodes have the attributes of ``torch.fx`` nodes (``op``, ``target``, ``args``, ``meta``, ``users``), but nothing is
# looked up, named or checked while they are made: a step has hundreds of them, and tracing, matching and merging must
# cost less than a few epochs. ``StepGraph.module`` converts to an fx graph.


class StepNode:
    """``target(*args, **kwargs)``, an input (``op`` is ``"placeholder"``) or what the graph returns (``"output"``)."""

    __slots__ = ("all_input_nodes", "args", "kwargs", "meta", "number", "op", "target", "users")

    def __init__(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> None:
        self.op, self.target, self.args, self.kwargs, self.number = op, target, args, kwargs, number
        self.meta: dict[str, Any] = {}
        self.users: dict[StepNode, None] = {}
        inputs: dict[StepNode, None] = {}
        _collect(args, inputs)
        if kwargs:
            _collect(kwargs.values(), inputs)
        self.all_input_nodes = tuple(inputs)  # the nodes whose results are its arguments, each once
        for node in inputs:
            node.users[self] = None

    @property
    def name(self) -> str:
        """Unique within its graph."""
        if self.op != "call_function":
            return str(self.target)
        return f"{getattr(self.target, '__name__', 'call').replace('.', '_')}_{self.number}"

    def __repr__(self) -> str:
        return self.name


def _collect(values: Iterable[Any], nodes: dict[StepNode, None]) -> None:
    """Add the nodes in a nest of tuples, lists and dictionaries to ``nodes``."""
    for value in values:
        kind = type(value)
        if kind is StepNode:
            nodes[value] = None
        elif kind is list or kind is tuple:
            _collect(value, nodes)
        elif kind is dict:
            _collect(value.values(), nodes)


def map_nodes(value: Any, change: Callable[[StepNode], Any]) -> Any:
    """``value`` with every node in it replaced by ``change(node)``."""
    kind = type(value)
    if kind is StepNode:
        return change(value)
    if kind is list:
        return [map_nodes(item, change) for item in value]
    if kind is tuple:
        return tuple([map_nodes(item, change) for item in value])
    if kind is dict:
        return {name: map_nodes(item, change) for name, item in value.items()}
    return value


class StepGraph:
    """Inputs, operators in order, and what is returned."""

    def __init__(self) -> None:
        self.inputs: list[StepNode] = []
        self.calls: list[StepNode] = []
        self.returns: StepNode | None = None
        self._numbers = 0

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> StepNode:
        self._numbers += 1
        return StepNode(op, target, args, kwargs or {}, self._numbers)

    def placeholder(self, name: str) -> StepNode:
        """Add an input."""
        self.inputs.append(self._node("placeholder", name, ()))
        return self.inputs[-1]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> StepNode:
        """Append an operator."""
        self.calls.append(self._node("call_function", target, args, kwargs))
        return self.calls[-1]

    def output(self, value: Any) -> StepNode:
        """Return ``value``."""
        self.returns = self._node("output", "output", (value,))
        return self.returns

    def drop_dead(self) -> None:
        """Eliminate operators that nothing reads and that have no effect: no writes, no random numbers drawn."""
        alive = []
        for node in reversed(self.calls):
            if node.users or written_arguments(node) or is_random(node.target):
                alive.append(node)
            else:
                for source in node.all_input_nodes:
                    del source.users[node]
        self.calls = alive[::-1]

    def module(self) -> fx.GraphModule:
        """A function of the inputs; generating its code takes longer than everything else here."""
        graph = fx.Graph()
        made: dict[StepNode, fx.Node] = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.calls:
            args, kwargs = map_nodes((node.args, node.kwargs), made.__getitem__)
            made[node] = graph.call_function(node.target, args, kwargs)
        if self.returns is not None:
            graph.output(map_nodes(self.returns.args[0], made.__getitem__))
        return fx.GraphModule(torch.nn.Module(), graph)


# ---- Operators traced as one node per stage
#
# A weight gradient ends in a split-K reduction that only the update reads; transposed weights are copied before they
# are multiplied. As nodes of their own, such stages share launches with whatever else is ready. A rule adds the nodes
# that make up one operator, whose arguments are nodes already, and says which node stands for which of its results.

weft = torch.ops.weft
aten = torch.ops.aten


Rule = Callable[["Recorder", tuple[Any, ...], Any], None]


def _add_sums(recorder: Recorder, partial: StepNode, outs: Sequence[Tensor], tasks: int) -> None:
    """Add the sum over ``partial [T, P, K]``, and the node of each of its one or two results."""
    sizes = [out.numel() // max(tasks, 1) for out in outs]
    dtype = str(outs[0].dtype).removeprefix("torch.")
    node = recorder.write(weft.add_parts.default, (partial, *(*sizes, 0)[:2], dtype))
    for number, out in enumerate(outs):
        part = recorder.write(operator.getitem, (node, number))
        recorder.describe(part, out)
        recorder.describe(recorder.write(aten.view.default, (part, list(out.shape))), out)


def _one_sum(function: Any, result_dims: int) -> Rule:
    """An operator whose only result is a sum, of ``result_dims`` dimensions per task."""

    def rule(recorder: Recorder, args: tuple[Any, ...], out: Tensor) -> None:
        tasks = out.shape[: out.dim() - result_dims].numel()
        _add_sums(recorder, recorder.write(function, args, out), [out], tasks)

    return rule


def _sums_after(function: Any, whole: int) -> Rule:
    """An operator whose first ``whole`` results are complete, and the last ones sums."""

    def rule(recorder: Recorder, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> None:
        node = recorder.write(function, args)
        for number, out in enumerate(outs[:whole]):
            recorder.describe(recorder.write(operator.getitem, (node, number)), out)
        partial = recorder.write(operator.getitem, (node, whole), outs[whole])
        _add_sums(recorder, partial, outs[whole:], outs[-1].shape[:-1].numel())

    return rule


def _contiguous(function: Any, position: int) -> Rule:
    """An operator whose kernel needs one argument contiguous; a transposed one is copied first."""

    def rule(recorder: Recorder, args: tuple[Any, ...], out: Tensor) -> None:
        if not args[position].meta["contiguous"]:
            copy = recorder.write(weft.copied.default, (args[position],), out)
            args = (*args[:position], copy, *args[position + 1 :])
        recorder.describe(recorder.write(function, args), out)

    return rule


def _first_argument(function: Any) -> Rule:
    """``function`` of the first argument instead of the operator."""
    return lambda recorder, args, out: recorder.describe(recorder.write(function, args[:1]), out)


RULES: dict[Any, Rule] = {
    weft.weight_grad.default: _one_sum(weft.weight_grad_parts.default, 2),
    weft.column_sum.default: _one_sum(weft.column_sum_parts.default, 1),
    weft.cross_entropy_rows.default: _one_sum(weft.cross_entropy_rows_parts.default, 0),
    weft.bias_act_dropout_backward_bias.default: _sums_after(weft.bias_act_dropout_backward_bias_parts.default, 1),
    weft.linear_backward.default: _sums_after(weft.linear_backward_parts.default, 2),
    weft.spmm.default: _contiguous(weft.spmm.default, 0),
    weft.product.default: _contiguous(weft.product.default, 1),
    weft.linear.default: _contiguous(weft.linear.default, 1),
    aten.clone.default: _first_argument(weft.copied.default),
    aten.cat.default: _first_argument(weft.side_by_side.default),
}


def rule_for(function: Any, args: tuple[Any, ...], out: Any) -> Rule | None:
    """The rule that traces ``out = function(*args)`` (tensors, not nodes) as several nodes; None: as one."""
    if function is aten.clone.default and not (out.is_contiguous() and out.dim() <= DIMENSIONS):
        return None
    if function is aten.cat.default:
        parts, dim = args[0], args[1] if len(args) > 1 else 0
        even = all(part.dim() == out.dim() and part.dtype == out.dtype for part in parts)
        if not (even and out.dim() <= 2 and dim % out.dim() == out.dim() - 1):
            return None
    return RULES.get(function)


PLAIN = frozenset((int, float, bool, str, type(None)))  # types of most arguments that are no tensors


@dataclass(frozen=True)
class TracedStep:
    """A step: ``graph`` has a placeholder for each of ``inputs`` and returns what the step returned.

    Nodes that stand for a tensor have ``meta["storage"]``, the number of its storage within this step, and its
    ``meta["shape"]``, ``meta["dtype"]`` and ``meta["contiguous"]``; ``meta["backward"]``: whether a node ran inside
    autograd's backward pass.
    """

    name: str
    graph: StepGraph
    inputs: tuple[Tensor, ...]


def record(
    step: Callable[[], Any],
    name: str = "step",
    changed: Iterable[Tensor] = (),
    *,
    split: bool = False,
    has_run: bool = False,
) -> TracedStep:
    """Trace ``step()`` by running it; the tensors ``changed`` are restored afterwards.

    It runs twice unless it ``has_run`` before: what is built once (forms of the adjacency, compiled kernels) is
    built by the first run and not traced. ``split`` traces operators of several stages as one node per stage.
    """
    recorder = Recorder(name, split)
    with restored(changed):
        if not has_run:
            step()
        with recorder:
            result = step()
        recorder.graph.output(recorder.nodes_of(result))
    recorder.graph.drop_dead()
    return TracedStep(name, recorder.graph, tuple(recorder.inputs))


def written_arguments(node: StepNode) -> list[StepNode]:
    """The arguments that a node writes to."""
    written: list[StepNode] = []
    for position, name in written_places(node.target):
        map_nodes(node.args[position] if position < len(node.args) else node.kwargs.get(name), written.append)
    return written


@cache
def is_random(target: Any) -> bool:
    """Whether an operator draws from torch's own generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


class Recorder(TorchDispatchMode):
    """Traces every operator that runs while it is entered; ``split`` as in :func:`record`."""

    def __init__(self, name: str, split: bool = False) -> None:
        super().__init__()
        self.name, self.split, self.graph = name, split, StepGraph()
        self.inputs: list[Tensor] = []
        self._nodes: dict[int, tuple[ref[Tensor], StepNode]] = {}  # address of a tensor's object to what it stands for
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}  # address to number
        self._numbers = 0
        self._inputs: set[int] = set()  # numbers of storages that existed before the step
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
            " train it separately"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise InputError(f"{self.name}: the step reads a number back to the host ({func}); it cannot be woven")
        node_args, node_kwargs = self.nodes_of(args), self.nodes_of(kwargs)
        self._depth += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._depth -= 1
        rule = rule_for(func, args, out) if self.split else None
        if rule is not None:
            rule(self, node_args, out)
            return out
        node = self.write(func, node_args, kwargs=node_kwargs)
        if isinstance(out, Tensor):
            self.describe(node, out)
        elif isinstance(out, (tuple, list)):
            for number, part in enumerate(out):
                if isinstance(part, Tensor):
                    self.describe(self.write(operator.getitem, (node, number)), part)
        return out

    def write(self, function: Any, args: tuple, like: Tensor | None = None, kwargs: dict | None = None) -> StepNode:
        """Add a node; with ``like``, one that stands for a tensor of its type in new memory."""
        node = self.graph.call_function(function, args, kwargs)
        node.meta["backward"] = in_backward()
        if like is not None:
            node.meta |= {"storage": self._numbers, "shape": tuple(like.shape), "dtype": like.dtype, "contiguous": True}
            self._numbers += 1
        return node

    def describe(self, node: StepNode, tensor: Tensor) -> None:
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
        """``value``, a nest of lists and the like, with every tensor replaced by the node that made it.

        A tensor that no node made is a new input.
        """
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.nodes_of(item) for item in value])
        if kind in PLAIN:
            return value
        if isinstance(value, Tensor):
            alive, node = self._nodes.get(id(value), (None, None))
            # The address may be that of a tensor that is gone.
            return node if alive is not None and alive() is value else self._input(value)
        if kind is dict:
            return {name: self.nodes_of(item) for name, item in value.items()}
        return value

    def _input(self, tensor: Tensor) -> StepNode:
        before = self._numbers
        number = self._number(tensor)
        if number < before and number not in self._inputs:
            raise InputError(
                f"{self.name}: a tensor was made outside of the traced operators; the step cannot be woven"
            )
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        self.inputs.append(tensor)
        self._inputs.add(number)
        self.describe(node, tensor)
        return node
