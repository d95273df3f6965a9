"""from_pyg and to_pyg: models and layers of torch_geometric as ours, and back, with the same outputs."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from weft.core.errors import SpecError
from weft.nn.conv import AttentionConv, Conv
from weft.nn.epilogue import BatchNorm, Dropout, assign_sites
from weft.nn.models import GAT, GCN, GIN, GNN, RGCN, SAGE, GATv2
from weft.nn.pyg.layers import (
    TEMPLATES,
    activation_name,
    conv_from_pyg,
    conv_to_pyg,
    library,
    norm_from_pyg,
    norm_to_pyg,
    require,
    template_of,
)

# ---- swap: replace the layers of PyG inside a module by those of :mod:`weft.nn.pyg.swapped_layers`, where they are
# equal.
#
# The module stays the user's: parameters, names and arguments are the same, and :func:`restore` undoes it.

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
    """The layers of PyG in ``model``; ``draws``: those count as well that give other numbers where PyG's may differ.

    They draw masks of their own, cache their edges, or divide the gradient of equal maxima.
    """
    layers: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    for name, layer in _message_passing(model):
        kind = type(layer).__name__
        try:
            _check(layer, draws)
            layers[name] = kind
        except SpecError as error:
            unchanged[name] = str(error)
    return Swaps(layers, unchanged)


def swap(model: nn.Module, names: Collection[str], builds: bool) -> None:
    """Swap the layers ``names`` of ``model`` in place.

    ``builds``: whether a layer builds the adjacency of an ``edge_index`` that it does not know, and draws masks by
    itself; or leaves such a call to PyG, and takes its masks from the run that counts them.
    """
    from weft.nn.pyg.swapped_layers import BUILDS, SETUP, SWAPPED, TEMPLATE

    for name in names:
        layer = model.get_submodule(name)
        template = _template(layer)
        vars(layer).update({TEMPLATE: template, BUILDS: builds})
        if builds and isinstance(template, AttentionConv) and template.dropout.p > 0:
            template.dropout = Dropout(template.dropout.p).to(next(layer.parameters()).device).train(layer.training)
            layer.add_module(DROPOUT, template.dropout)  # so that a run finds it
        layer.__class__ = SWAPPED[type(layer)]
        vars(layer)[SETUP] = setup_of(layer)


def restore(model: nn.Module) -> None:
    """Make swapped layers PyG's own again, in place."""
    swapped_module = sys.modules.get("weft.nn.pyg.swapped_layers")
    if swapped_module is None:
        return
    back = {ours: theirs for theirs, ours in swapped_module.SWAPPED.items()}
    for layer in list(model.modules()):
        if type(layer) in back:
            layer._modules.pop(DROPOUT, None)
            for key in (swapped_module.TEMPLATE, swapped_module.BUILDS, swapped_module.SETUP):
                vars(layer).pop(key)
            layer.__class__ = back[type(layer)]


def _message_passing(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """PyG's layers, outermost first; layers inside of one are skipped."""
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
    if kind.__name__ not in TEMPLATES or kind is not getattr(library(), kind.__name__):
        raise SpecError(f"{kind.__name__} has no counterpart in Weft")
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        raise SpecError(f"{kind.__name__}: its weights are not initialised; call the module once")
    if any(getattr(part, hooks) for part in layer.modules() if part is not layer for hooks in HOOKS):
        raise SpecError(f"{kind.__name__}: a layer inside has hooks")
    if any(value for key, value in vars(layer).items() if key.endswith("_hooks") and key not in vars(nn.Module())):
        raise SpecError(f"{kind.__name__}: it has hooks on its messages")
    for name, part in layer.named_children():
        own = type(part)
        plain = own is nn.Linear or (own.__name__ == "Linear" and own.__module__.startswith("torch_geometric."))
        if name.startswith(LINEAR) and (not plain or "forward" in vars(part)):
            raise SpecError(f"{kind.__name__}: {name} is a {own.__name__} that is not PyG's or torch's")
    if any(method in vars(layer) for method in METHODS) or getattr(layer, "explain", None):
        raise SpecError(f"{kind.__name__}: one of its methods is replaced")
    if getattr(layer, "cached", False) and not draws:
        raise SpecError(f"{kind.__name__}: cached=True keeps the edges of its first call; convert=True converts it")
    if getattr(layer, "aggr", None) == "max" and not draws:
        raise SpecError(
            f"{kind.__name__}: aggr='max' divides the gradient of equal neighbours in another way; convert=True "
            "converts it"
        )
    rate = _attention_dropout(_template(layer))
    if rate and not draws:
        raise SpecError(
            f"{kind.__name__}: dropout={rate:g} of its attention would draw other masks; convert=True converts it"
        )


def setup_of(layer: nn.Module) -> tuple[dict[str, object], list[tuple[object, ...]]]:
    """What a call of a layer depends on besides its weights: settings, the kinds of its parts, and their hooks."""
    settings = {key: value for key, value in vars(layer).items() if type(value) in SETTINGS and key[0] != "_"}
    settings.pop("training", None)
    parts = [
        (type(part), "forward" in vars(part), *(len(getattr(part, hooks)) for hooks in HOOKS))
        for part in layer._modules.values()
        if part is not None
    ]
    return settings, parts


def _template(layer: nn.Module) -> Conv | None:
    with torch.device("meta"):  # without data
        return template_of(layer)


def drawing(model: nn.Module, names: Collection[str]) -> list[str]:
    """Those of the layers ``names`` that drop coefficients of attention."""
    return [name for name in names if _attention_dropout(_template(model.get_submodule(name)))]


def _attention_dropout(template: Conv | None) -> float:
    return template.dropout.p if isinstance(template, AttentionConv) else 0.0


def from_pyg(module: nn.Module) -> Any:
    """A model or layer of ``torch_geometric.nn`` as ours, or any module with the layers of PyG inside converted.

    ``models.{GCN, GraphSAGE, GIN, GAT}`` and their convolutions become a :class:`GNN` or a :class:`Conv`, which take
    ``(x, adj)``. Every other module is copied, and those layers inside that have a counterpart here compute with
    Weft's operators; it takes the arguments it took, its parameters have the names they had, and what has no
    counterpart stays as it is. A layer remembers the edges of a tensor; give a new one instead of changing its
    ``.data``, which is not seen. The result has copies of the weights and of the running statistics, on the same device
    and in the same type. A single layer, or a module of which nothing has a counterpart, is refused with a
    :class:`SpecError` that says why.
    """
    pyg = library()
    if isinstance(module, pyg.MessagePassing):
        return _like(conv_from_pyg(module), module)
    if isinstance(module, pyg.models.basic_gnn.BasicGNN):
        try:
            return _like(_model_from_pyg(module), module)
        except SpecError as error:
            return _swapped(module, str(error))
    return _swapped(module, "it has no layer of PyG")


def _swapped(module: nn.Module, otherwise: str) -> nn.Module:
    """A copy of ``module`` with layers of PyG swapped; ``otherwise``: why not, if nothing else says so."""
    swaps = possible_swaps(module, draws=True)
    if not swaps.layers:
        reasons = "; ".join(dict.fromkeys(swaps.kept.values())) or otherwise
        raise SpecError(f"{type(module).__name__}: nothing in it can be converted: {reasons}")
    converted = copy.deepcopy(module)
    swap(converted, swaps.layers, builds=True)
    assign_sites(converted)
    return converted


def to_pyg(module: GNN | Conv) -> nn.Module:
    """The inverse of :func:`from_pyg`. Input dropout, which PyG's models have no place for, is left out.

    A trained model divides features by their sums if its training did (``feature_norm="row"``); so does the result.
    """
    if isinstance(module, GNN):
        converted = _model_to_pyg(module)
    elif isinstance(module, Conv):
        converted = conv_to_pyg(module)
    else:
        raise SpecError(f"to_pyg: {type(module).__name__} is neither a model nor a layer of weft.nn")
    return _like(converted, module, dense=True)


def _like(converted: nn.Module, original: nn.Module, dense: bool = False) -> Any:
    """``converted`` on the device, in the type and in the mode of ``original``, with the same treatment of its inputs.

    ``dense``: the layers of ``converted`` take dense features only. A hook of another kind is refused: what it does
    cannot be converted.
    """
    for hook in (*original._forward_pre_hooks.values(), *original._forward_hooks.values()):
        if not hasattr(hook, "converted"):
            kind = type(original).__name__
            raise SpecError(f"{kind}: its forward hook {hook!r} cannot be converted; remove it, and register it again")
        converted.register_forward_pre_hook(hook.converted(dense), with_kwargs=True)
    some = next(original.parameters())
    return converted.to(some.device, some.dtype).train(original.training)


def _model_from_pyg(theirs: Any) -> GNN:
    pyg = library()
    require(theirs, jk_mode=None, act_first=False)
    kinds = {pyg.GCN: GCN, pyg.GraphSAGE: SAGE, pyg.GIN: GIN, pyg.GAT: GAT}
    kind = next((ours for base, ours in kinds.items() if isinstance(theirs, base)), None)
    if kind is None:
        raise SpecError(
            f"{type(theirs).__name__} has no counterpart in Weft; GCN, GraphSAGE, GIN and GAT can be converted"
        )
    convs = [conv_from_pyg(conv) for conv in theirs.convs]
    if kind is GAT and isinstance(theirs.convs[0], pyg.GATv2Conv):
        kind = GATv2
    options: dict[str, Any] = {"heads": 1} if kind in (GAT, GATv2) else {}
    model = kind(
        convs[0].in_features,
        theirs.hidden_channels,
        convs[-1].out_features,
        layers=len(convs),
        dropout=theirs.dropout.p,
        activation=activation_name(theirs.act),
        **options,
    )
    if hasattr(convs[0], "constant_input"):
        convs[0].constant_input = True
    model.convs = nn.ModuleList(convs)
    for epilogue, norm in zip(model.epilogues, theirs.norms, strict=False):
        epilogue.norm = norm_from_pyg(norm)
    assign_sites(model)
    return model


def _model_to_pyg(ours: GNN) -> nn.Module:
    pyg = library()
    kinds = {GCN: pyg.GCN, SAGE: pyg.GraphSAGE, GIN: pyg.GIN, GAT: pyg.GAT, GATv2: pyg.GAT}
    if type(ours) is RGCN:
        return _chained(ours)
    if type(ours) not in kinds:
        raise SpecError(f"{type(ours).__name__} has no counterpart among PyG's models; its layers can be converted")
    options: dict[str, Any] = {"v2": True} if isinstance(ours, GATv2) else {}
    hidden = list(ours.epilogues)
    if hidden:
        act = hidden[0].activation
        options |= {"dropout": hidden[0].dropout.p, "act": None if act == "none" else act}
        norm = hidden[0].norm
        options["norm"] = None if norm is None else "batch_norm" if isinstance(norm, BatchNorm) else "layer_norm"
    theirs = kinds[type(ours)](
        ours.in_features, ours.hidden, len(ours.convs), out_channels=ours.out_features, **options
    )
    theirs.convs = nn.ModuleList(conv_to_pyg(conv) for conv in ours.convs)
    norms = [norm_to_pyg(epilogue.norm) for epilogue in hidden]
    theirs.norms = nn.ModuleList([*norms, nn.Identity()])
    return theirs


def _chained(ours: RGCN) -> nn.Module:
    """The layers of PyG one after the other, called with ``(x, edge_index, edge_type)``: PyG has no model of them."""
    graph = fx.Graph()
    x, *edges = (graph.placeholder(name) for name in ("x", "edge_index", "edge_type"))
    parts: dict[str, nn.Module] = {}
    for number, conv in enumerate(ours.convs):
        parts[f"conv{number}"] = conv_to_pyg(conv)
        x = graph.call_module(f"conv{number}", (x, *edges))
        for epilogue in ours.epilogues[number : number + 1]:
            activation = {"relu": nn.ReLU, "elu": nn.ELU, "none": nn.Identity}[epilogue.activation]()
            after = nn.Sequential(norm_to_pyg(epilogue.norm), activation, nn.Dropout(epilogue.dropout.p))
            parts[f"after{number}"] = after
            x = graph.call_module(f"after{number}", (x,))
    graph.output(x)
    return fx.GraphModule(parts, graph, "RGCN")
