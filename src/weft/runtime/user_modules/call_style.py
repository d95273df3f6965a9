"""How a user's module is called, by the names of the parameters of its ``forward``.

- ``"features"``: ``forward(x)``; ``"edges"``: PyG's ``forward(x, edge_index)``, with :data:`OF_EDGES`;
- ``"transposed"``: PyG's ``forward(x, adj_t)``; ``"data"``: PyG's ``forward(data)``;
- ``"adjacency"``: Weft's ``forward(x, adj)``, whatever the second one is called.
"""

from __future__ import annotations

import inspect

from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task

EDGES, TRANSPOSED = "edge_index", "adj_t"
OF_EDGES = ("edge_weight", "edge_type", "edge_attr")  # what a graph may have one of per edge
OF_ADJACENCY = ("first", "layer")
GIVEN = {
    "features": "x",
    "edges": "x, edge_index, edge_weight, edge_type and edge_attr",
    "transposed": "x and adj_t",
    "data": "data",
    "adjacency": "x and the adjacency",
}
STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of ``forward`` by name."""
    return dict(inspect.signature(model.forward).parameters)


def call_style(model: nn.Module) -> str:
    """One of the styles above."""
    found = parameters_of(model)
    names = list(found)
    if names[:1] == ["data"] and not any(one in found for one in (EDGES, TRANSPOSED)):
        return "data"
    if len(names) < 2 or found[names[1]].kind in STARS:
        return "features"
    return {EDGES: "edges", TRANSPOSED: "transposed"}.get(names[1], "adjacency")


def check_call(task: Task, model: nn.Module, per_edge: tuple[str, ...]) -> None:
    """A :class:`SpecError` if ``forward`` needs more than Weft gives; ``per_edge``: what the graph has of OF_EDGES."""
    style, found = call_style(model), parameters_of(model)
    fixed = 1 if style in ("features", "data") else 2
    possible = {"edges": per_edge, "adjacency": OF_ADJACENCY}.get(style, ())
    for name, parameter in list(found.items())[fixed:]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in STARS
        if needed and name not in possible:
            raise SpecError(f"task {task.label!r}: {_forward(model)} needs {name!r}: {_why(name, style)}")


def _why(name: str, style: str) -> str:
    if style == "edges" and name in OF_EDGES:
        return "the edges of this graph have none; give the graph one, or the parameter a default"
    return f"it is called with {GIVEN[style]}; give the parameter a default"


def _forward(model: nn.Module) -> str:
    """``forward(x, edge_index) of Net (line 3 of net.py)``."""
    code = getattr(model.forward, "__code__", None)
    place = "" if code is None else f" (line {code.co_firstlineno} of {code.co_filename})"
    return f"forward({', '.join(parameters_of(model))}) of {type(model).__name__}{place}"
