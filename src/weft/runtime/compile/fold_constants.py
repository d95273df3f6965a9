"""fold_constants: compute once what a traced step computes from the graph alone.

A layer that takes edges as data may normalise them, add loops or select some of them in every call, with the same
result every time. Folding it leaves a step with static shapes, which can be compiled and captured as a CUDA graph. A
tensor that existed before the step and that it writes to, such as a counter, differs from call to call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from weft.capture.schemas import written_places

NAME = "_folded"
SHARES = ("_unsafe_view", "_reshape_alias")  # outputs alias an input, though their schemas do not say so


def fold_constants(traced: GraphModule, changing: Iterable[Tensor]) -> GraphModule:
    """``traced`` with everything folded that depends on neither its inputs nor the tensors ``changing``.

    Folded results that are read become attributes; the module is changed and returned.
    """
    varying = _varying(traced, {place_of(tensor) for tensor in changing})
    kept = {node for node in traced.graph.nodes if node not in varying and node.op == "call_function"}
    for number, (node, value) in enumerate(_worked_out(traced, kept)):
        name = f"{NAME}{number}"
        traced.register_buffer(name, value)
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.get_attr(name))
    for node in reversed(list(traced.graph.nodes)):
        if node in kept and not node.users:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code(lambda node: node.op not in ("get_attr",))
    traced.recompile()
    return traced


def _varying(traced: GraphModule, changing: set[int]) -> set[Node]:
    """The nodes whose value may differ from call to call."""
    nodes = list(traced.graph.nodes)
    root = _roots(traced)
    varying = {node for node in nodes if _varies_by_itself(traced, node, changing)}
    places = {root[node] for node in varying}
    while True:
        for node in nodes:
            if node not in varying and (root[node] in places or any(arg in varying for arg in node.all_input_nodes)):
                varying.add(node)
        grown = places | _written_late(nodes, root, varying)
        if grown == places:
            return varying
        places = grown


def _varies_by_itself(traced: GraphModule, node: Node, changing: set[int]) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        value = getattr(traced, str(node.target), None)
        return not isinstance(value, Tensor) or place_of(value) in changing
    tags = getattr(node.target, "tags", ())
    return node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags


def _written_late(nodes: list[Node], root: dict[Node, Node], varying: set[Node]) -> set[Node]:
    """Places that a varying node writes to, or that are written to after a varying node has read them.

    A tensor that existed before a call and is written in it has another value in the next one.
    """
    found, read = set(), set()
    for node in nodes:
        for written in _written(node):
            if node in varying or root[written] in read or root[written].op == "get_attr":
                found.add(root[written])
        if node in varying:
            read.update(root[arg] for arg in node.all_input_nodes)
    return found


def _roots(traced: GraphModule) -> dict[Node, Node]:
    """For every node the first one that owns its memory: views and in-place results share it."""
    root: dict[Node, Node] = {}
    by_place: dict[Any, Node] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced, str(node.target), None)
            root[node] = by_place.setdefault(place_of(value) if isinstance(value, Tensor) else node.target, node)
        else:
            shared = next(iter(_shared(node)), None)
            root[node] = node if shared is None else root[shared]
    return root


def _shared(node: Node) -> list[Node]:
    """The inputs that a node's result may alias."""
    if node.op != "call_function":
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # picking one of several results
        return list(node.all_input_nodes[:1])
    if schema.name.rpartition("::")[2] in SHARES:
        return list(node.all_input_nodes[:1])
    named = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    places = zip(schema.arguments, node.args, strict=False)
    given = [value for argument, value in places if argument.name in named]
    given += [value for name, value in node.kwargs.items() if name in named]
    return _nodes_in(given)


def _written(node: Node) -> list[Node]:
    if node.op != "call_function":
        return []
    return _nodes_in(
        node.args[at] if at < len(node.args) else node.kwargs.get(n) for at, n in written_places(node.target)
    )


def _nodes_in(values: Iterable[Any]) -> list[Node]:
    found: list[Node] = []
    map_arg(tuple(values), found.append)
    return found


def _worked_out(traced: GraphModule, kept: set[Node]) -> list[tuple[Node, Tensor]]:
    """The values of the ``kept`` nodes that others read."""
    last = {arg: node for node in traced.graph.nodes for arg in node.all_input_nodes if node in kept}
    values: dict[Node, Any] = {}
    found = []
    with torch.no_grad():
        for node in list(traced.graph.nodes):
            if node not in kept:
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda arg: _value(traced, arg, values))
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor) and any(user not in kept for user in node.users):
                found.append((node, values[node]))
            for arg in node.all_input_nodes:
                if last.get(arg) is node:
                    values.pop(arg, None)
    return found


def _value(traced: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    return getattr(traced, str(node.target)) if node.op == "get_attr" else values[node]


def attributes_read(traced: GraphModule) -> list[Tensor]:
    """The tensors that existed before ``traced`` ran and that it reads."""
    values = [getattr(traced, str(node.target), None) for node in traced.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


def attributes_written(traced: GraphModule) -> list[Tensor]:
    """Those of them that it writes to."""
    root = _roots(traced)
    places = {root[written] for node in traced.graph.nodes for written in _written(node)}
    values = [getattr(traced, str(node.target), None) for node in places if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


def place_of(tensor: Tensor) -> int:
    """A key equal for live tensors that share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or left over from a transform that has ended
        return id(tensor)
