"""The graph of a traced step: operators in execution order, and their arguments.

The nodes have the attributes of ``torch.fx`` nodes (``op``, ``target``, ``args``, ``meta``, ``users``), but nothing is
looked up, named or checked while they are made: a step has hundreds of them, and tracing, matching and merging must
cost less than a few epochs. ``Graph.to_fx`` converts to an fx graph, for printing or compiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx


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
