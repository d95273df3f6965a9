"""build: a model by its name; the one table from names to classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import nn

from weft.core.errors import SpecError
from weft.core.models import ModelTraits, with_traits
from weft.nn.checks import hint
from weft.nn.models import GAT, GCN, GIN, GNN, RGCN, SAGE, GATv2

# One class per row of weft.core.models.
CLASSES: Mapping[str, type[GNN]] = MappingProxyType(
    {"gcn": GCN, "sage": SAGE, "gin": GIN, "gat": GAT, "gatv2": GATv2, "rgcn": RGCN}
)

# The classes in force here: per thread and per asynchronous task, never changed in place.
_classes: ContextVar[Mapping[str, type[GNN]]] = ContextVar("_classes", default=CLASSES)


@contextmanager
def register_model(traits: ModelTraits, model: type[GNN]) -> Iterator[None]:
    """Make ``model`` known as ``traits.name`` inside the ``with`` block, as if it were built in.

    It is then trained alone, stacked and padded like the others, and planned by the numbers of ``traits``. Nothing is
    left of it after the block, and other threads do not see it.
    """
    if not (isinstance(model, type) and issubclass(model, GNN)):
        raise SpecError(f"register_model: {model!r} must be a subclass of weft.nn.GNN")
    missing = [name for name in traits.settings if name not in _options_of(model)]
    if missing:
        raise SpecError(
            f"register_model: the row of {traits.name!r} lists {', '.join(missing)} among its settings, "
            f"but {model.__name__} takes {', '.join(_options_of(model))}"
        )
    with with_traits(traits):
        before = _classes.set({**_classes.get(), traits.name: model})
        try:
            yield
        finally:
            _classes.reset(before)


def is_named_model(model: nn.Module) -> bool:
    """Whether ``model`` is one of the named models, whose insides Weft knows; a subclass of theirs is not."""
    return type(model) in _classes.get().values()


def build(name: str, in_features: int, out_features: int, **options: Any) -> GNN:
    """The model ``name`` from ``in_features`` to ``out_features``; ``hidden`` is 64 unless given."""
    classes = _classes.get()
    if name not in classes:
        raise SpecError(f"model={name!r} must be one of {', '.join(classes)}{hint(name, classes)}")
    check_options(name, options)
    options.setdefault("hidden", 64)
    return classes[name](in_features, out_features=out_features, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """A :class:`SpecError` for the first of ``options`` that the model ``name`` does not take."""
    known = options_of(name)
    for option in options:
        if option not in known:
            advice = hint(option, known) or f"; it takes {', '.join(known)}"
            raise SpecError(f"model {name!r} has no option {option!r}{advice}")


def options_of(name: str) -> tuple[str, ...]:
    """The options that :func:`build` takes for the model ``name``."""
    return _options_of(_classes.get()[name])


def _options_of(model: type[GNN]) -> tuple[str, ...]:
    hidden_from_users = {"self", "in_features", "out_features", "conv", "common"}
    names: dict[str, None] = {}
    for ancestor in model.__mro__:
        if issubclass(ancestor, GNN) and "__init__" in vars(ancestor):
            names |= dict.fromkeys(inspect.signature(ancestor.__init__).parameters)
    return tuple(option for option in names if option not in hidden_from_users)
