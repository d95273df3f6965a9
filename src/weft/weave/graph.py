"""The graph of a recorded step: operators in the order in which they run, and what each is given.

The nodes are those of ``torch.fx`` in what can be asked of them (``op``, ``target``, ``args``, ``meta``, ``users``),
but nothing is looked up, named or checked while they are made: a step has hundreds of them, and taking it down,
matching and merging must cost less than a few epochs. ``Graph.to_fx`` gives the fx graph to whoever wants to see or
compile it.
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
        self.all_input_nodes = tuple(given)  # the nodes whose results it is given, each once
        for node in given:
            node.users[self] = None

    @property
    def name(self) -> str:
        """Known by this in its graph."""
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
    """``value`` with every node in it replaced by what ``change`` makes of it."""
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
        """All of them: inputs first, what is returned last."""
        return [*self.inputs, *self.calls, *(() if self.returns is None else (self.returns,))]

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        self._numbers += 1
        return Node(op, target, args, kwargs or {}, self._numbers)

    def placeholder(self, name: str) -> Node:
        """One more input."""
        self.inputs.append(self._node("placeholder", name, ()))
        return self.inputs[-1]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """One more operator, after all others."""
        self.calls.append(self._node("call_function", target, args, kwargs))
        return self.calls[-1]

    def output(self, value: Any) -> Node:
        """Return ``value``."""
        self.returns = self._node("output", "output", (value,))
        return self.returns

    def drop_unread(self, kept: Callable[[Node], bool]) -> None:
        """Forget operators that nobody reads, and then those that only they read, save those that are ``kept``."""
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
        """A function of the inputs; writing its code takes longer than everything else here."""
        return fx.GraphModule(torch.nn.Module(), self.to_fx())
