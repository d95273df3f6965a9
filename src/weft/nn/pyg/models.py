"""from_pyg and to_pyg: models and layers of torch_geometric as ours, and back, with the same outputs."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from weft.core.errors import SpecError
from weft.nn.conv.conv import Conv
from weft.nn.dropout import assign_sites
from weft.nn.models import GAT, GCN, GIN, GNN, SAGE, GATv2
from weft.nn.norm import BatchNorm
from weft.nn.pyg.layers import activation_name, conv_from_pyg, conv_to_pyg, library, norm_from_pyg, norm_to_pyg, require
from weft.nn.pyg.swap import possible_swaps, swap


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
    found = possible_swaps(module, draws=True)
    if not found.layers:
        reasons = "; ".join(dict.fromkeys(found.kept.values())) or otherwise
        raise SpecError(f"{type(module).__name__}: nothing in it can be converted: {reasons}")
    converted = copy.deepcopy(module)
    swap(converted, found.layers, builds=True)
    assign_sites(converted)
    return converted


def to_pyg(module: GNN | Conv) -> nn.Module:
    """The inverse of :func:`from_pyg`. Input dropout, which PyG's models have no place for, is left out."""
    if isinstance(module, GNN):
        converted = _model_to_pyg(module)
    elif isinstance(module, Conv):
        converted = conv_to_pyg(module)
    else:
        raise SpecError(f"to_pyg: {type(module).__name__} is neither a model nor a layer of weft.nn")
    return _like(converted, module)


def _like(converted: nn.Module, original: nn.Module) -> Any:
    """``converted`` on the device, in the type and in the mode of ``original``."""
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
    if type(ours) not in kinds:
        raise SpecError(f"{type(ours).__name__} has no counterpart among PyG's models; its layers can be converted")
    options: dict[str, Any] = {"v2": True} if isinstance(ours, GATv2) else {}
    hidden = list(ours.epilogues)
    if hidden:
        act = hidden[0].activation
        options |= {"dropout": hidden[0].dropout.p, "act": None if act == "none" else act}
        options |= {"norm": _norm_name(hidden[0].norm)}
    theirs = kinds[type(ours)](
        ours.in_features, ours.hidden, len(ours.convs), out_channels=ours.out_features, **options
    )
    theirs.convs = nn.ModuleList(conv_to_pyg(conv) for conv in ours.convs)
    norms = [norm_to_pyg(epilogue.norm) for epilogue in hidden]
    theirs.norms = nn.ModuleList([*norms, nn.Identity()])
    return theirs


def _norm_name(norm: nn.Module | None) -> str | None:
    if norm is None:
        return None
    return "batch_norm" if isinstance(norm, BatchNorm) else "layer_norm"
