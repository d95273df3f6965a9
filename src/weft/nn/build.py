"""build: a model by its name."""

from __future__ import annotations

import inspect
from typing import Any

from weft.core.errors import SpecError
from weft.nn.checks import hint
from weft.nn.models import GAT, GCN, GIN, GNN, SAGE, GATv2

MODELS: dict[str, type[GNN]] = {"gcn": GCN, "sage": SAGE, "gin": GIN, "gat": GAT, "gatv2": GATv2}


def build(name: str, in_features: int, out_features: int, **options: Any) -> GNN:
    """The model ``name`` from ``in_features`` to ``out_features``; ``hidden`` is 64 unless given."""
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise SpecError(f"model={name!r} must be one of {known}{hint(name, MODELS)}")
    known_options = options_of(name)
    for option in options:
        if option not in known_options:
            advice = hint(option, known_options) or f"; it takes {', '.join(known_options)}"
            raise SpecError(f"model {name!r} has no option {option!r}{advice}")
    options.setdefault("hidden", 64)
    return MODELS[name](in_features, out_features=out_features, **options)


def options_of(name: str) -> tuple[str, ...]:
    """The options that :func:`build` takes for the model ``name``."""
    hidden_from_users = {"self", "in_features", "out_features", "conv", "common"}
    names: dict[str, None] = {}
    for ancestor in MODELS[name].__mro__:
        if issubclass(ancestor, GNN) and "__init__" in vars(ancestor):
            names |= dict.fromkeys(inspect.signature(ancestor.__init__).parameters)
    return tuple(option for option in names if option not in hidden_from_users)
