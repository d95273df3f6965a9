"""swap: replace the layers of PyG inside a module by those of :mod:`weft.nn.pyg.swapped_layers`, where they are equal.

The module stays the user's: parameters, names and arguments are the same, and :func:`restore` undoes it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.nn.conv.attention import AttentionConv
from weft.nn.conv.conv import Conv
from weft.nn.dropout import Dropout
from weft.nn.pyg.templates import TEMPLATES

SETTINGS = (bool, int, float, str, type(None))
DROPOUT = "weft_dropout"  # a submodule of a swapped attention layer
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LINEAR = ("lin", "res")  # how parts are called whose weights Weft's operators read without calling them
METHODS = ("forward", "propagate", "message", "aggregate", "update", "edge_update", "message_and_aggregate")


@dataclass(frozen=True)
class Swaps:
    """Layers of PyG in a module: the names of those that can be swapped, with their kinds, and why others are kept."""

    layers: dict[str, str]
    kept: dict[str, str]

    def counted(self) -> str:
        """``"3 GCNConv and 1 SAGEConv"``."""
        return " and ".join(f"{count} {kind}" for kind, count in Counter(self.layers.values()).items())


def possible_swaps(model: nn.Module, draws: bool) -> Swaps:
    """The layers of PyG in ``model``; ``draws``: those that draw masks of their own count as well."""
    layers: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, layer in _message_passing(model):
        kind = type(layer).__name__
        try:
            _check(layer, draws)
            layers[name] = kind
        except SpecError as error:
            kept[name] = str(error)
    return Swaps(layers, kept)


def swap(model: nn.Module, names: Collection[str], builds: bool) -> None:
    """Swap the layers ``names`` of ``model`` in place.

    ``builds``: whether a layer builds the adjacency of an ``edge_index`` that it does not know, and draws masks by
    itself; or leaves such a call to PyG, and takes its masks from whoever counts them (a run).
    """
    from weft.nn.pyg.swapped_layers import BUILDS, SETUP, SWAPPED, TEMPLATE

    for name in names:
        layer = model.get_submodule(name)
        template = _template(layer)
        vars(layer).update({TEMPLATE: template, BUILDS: builds})
        if builds and isinstance(template, AttentionConv) and template.dropout.p > 0:
            template.dropout = Dropout(template.dropout.p).to(_device(layer)).train(layer.training)
            layer.add_module(DROPOUT, template.dropout)  # so that a run finds it
        layer.__class__ = SWAPPED[type(layer)]
        vars(layer)[SETUP] = setup_of(layer)


def restore(model: nn.Module) -> None:
    """Make swapped layers PyG's own again, in place."""
    places = sys.modules.get("weft.nn.pyg.swapped_layers")
    if places is None:
        return
    back = {ours: theirs for theirs, ours in places.SWAPPED.items()}
    for layer in list(model.modules()):
        if type(layer) in back:
            layer._modules.pop(DROPOUT, None)
            for key in (places.TEMPLATE, places.BUILDS, places.SETUP):
                vars(layer).pop(key)
            layer.__class__ = back[type(layer)]


def _message_passing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """PyG's layers, outermost first; what is inside of one is not looked at."""
    conv = sys.modules.get("torch_geometric.nn.conv")  # a model without it has no such layers
    if conv is None:
        return
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, conv.MessagePassing) and not name.startswith(inside or ("\0",)):
            inside = (*inside, f"{name}.")
            yield name, module


def _check(layer: nn.Module, draws: bool) -> None:
    """A :class:`SpecError` that says why ``layer`` cannot be swapped."""
    kind = type(layer)
    own = kind.__module__.startswith("torch_geometric.")
    if kind.__name__ not in TEMPLATES or not own:
        raise SpecError(f"{kind.__name__} has no counterpart in Weft")
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        raise SpecError(f"{kind.__name__}: its weights are not initialised; call the module once")
    if any(getattr(part, hooks) for part in layer.modules() if part is not layer for hooks in HOOKS):
        raise SpecError(f"{kind.__name__}: a layer inside has hooks")
    if any(value for key, value in vars(layer).items() if key.endswith("_hooks") and key not in _torch_hooks()):
        raise SpecError(f"{kind.__name__}: it has hooks on its messages")
    for name, part in layer.named_children():
        if name.startswith(LINEAR) and not _plain_linear(part):
            raise SpecError(f"{kind.__name__}: {name} is a {type(part).__name__} of one's own")
    if any(method in vars(layer) for method in METHODS) or getattr(layer, "explain", None):
        raise SpecError(f"{kind.__name__}: one of its methods is replaced")
    if getattr(layer, "cached", False) and not draws:
        raise SpecError(f"{kind.__name__}: cached=True keeps the edges of its first call; convert=True converts it")
    rate = _attention_dropout(_template(layer))
    if rate and not draws:
        raise SpecError(
            f"{kind.__name__}: dropout={rate:g} of its attention would draw other masks; convert=True converts it"
        )


def _plain_linear(part: nn.Module) -> bool:
    kind = type(part)
    known = kind is nn.Linear or (kind.__name__ == "Linear" and kind.__module__.startswith("torch_geometric."))
    return known and "forward" not in vars(part)


def setup_of(layer: nn.Module) -> tuple[dict[str, object], list[tuple[object, ...]]]:
    """What a call of a layer depends on beside its weights: settings, the kinds of its parts, and their hooks."""
    settings = {key: value for key, value in vars(layer).items() if type(value) in SETTINGS and key[0] != "_"}
    settings.pop("training", None)
    parts = [
        (type(part), "forward" in vars(part), *(len(getattr(part, hooks)) for hooks in HOOKS))
        for part in layer._modules.values()
        if part is not None
    ]
    return settings, parts


def drawing(model: nn.Module, names: Collection[str]) -> list[str]:
    """Those of the layers ``names`` that drop coefficients of attention."""
    return [name for name in names if _attention_dropout(_template(model.get_submodule(name)))]


def _attention_dropout(template: Conv | None) -> float:
    return template.dropout.p if isinstance(template, AttentionConv) else 0.0


def _torch_hooks() -> frozenset[str]:
    """The hooks that torch calls around ``forward``: those of a swapped layer are called as before."""
    return frozenset(key for key in vars(nn.Module()) if key.endswith("_hooks"))


def _template(layer: nn.Module) -> Conv | None:
    """Weft's layer of the same kind and sizes, without data; None for layers that need none."""
    with torch.device("meta"):
        return TEMPLATES[type(layer).__name__](layer)


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device
