"""from_pyg and to_pyg: models and layers of torch_geometric as ours, and back, with the same outputs."""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.core.errors import SpecError
from weft.nn.conv.conv import Conv
from weft.nn.dropout import assign_sites
from weft.nn.models import GAT, GCN, GIN, GNN, SAGE, GATv2
from weft.nn.norm import BatchNorm
from weft.nn.pyg.layers import activation_name, conv_from_pyg, conv_to_pyg, library, norm_from_pyg, norm_to_pyg, require


def from_pyg(module: nn.Module) -> GNN | Conv:
    """``torch_geometric.nn.models.{GCN, GraphSAGE, GIN, GAT}`` or one of their convolutions as ours.

    The result has copies of the weights and of the running statistics, on the same device and in the same
    type. An option that has no counterpart here is refused with a :class:`SpecError`.
    """
    is_model = isinstance(module, library().models.basic_gnn.BasicGNN)
    converted = _model_from_pyg(module) if is_model else conv_from_pyg(module)
    return _like(converted, module)


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
