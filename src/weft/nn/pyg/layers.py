"""Single layers and norms from and to torch_geometric: the same weights under other names.

What a layer here cannot express (edge features, other aggregators, no self loops, ...) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.nn.conv import AttentionConv, Conv
from weft.nn.epilogue import BatchNorm, LayerNorm
from weft.nn.gat import GATConv, GATv2Conv
from weft.nn.gcn import GCNConv
from weft.nn.gin import GINConv
from weft.nn.rgcn import RGCNConv
from weft.nn.sage import AGGREGATORS, SAGEConv


def library() -> Any:
    """``torch_geometric.nn``, or a clear error if it is not installed."""
    try:
        import torch_geometric.nn
    except ImportError:
        raise SpecError("torch_geometric is not installed; pip install 'weft-gnn[pyg]' to convert models") from None
    return torch_geometric.nn


def require_sum(module: nn.Module) -> None:
    """A :class:`SpecError` unless a layer adds its messages up."""
    if module.aggr not in ("add", "sum"):
        raise SpecError(
            f"{type(module).__name__}: aggr={module.aggr!r} has no counterpart in Weft; "
            "only aggr='add' can be converted"
        )


def require(module: nn.Module, **expected: Any) -> None:
    """A :class:`SpecError` for the first attribute of ``module`` that has no counterpart here."""
    for name, value in expected.items():
        setting = getattr(module, name, value)
        if setting != value:
            raise SpecError(
                f"{type(module).__name__}: {name}={setting!r} has no counterpart in Weft; "
                f"only {name}={value!r} can be converted"
            )


@torch.no_grad()
def copy_weights(pairs: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    """Copy every ``(target, source)``; both are None or neither is."""
    for name, (target, source) in pairs.items():
        if (target is None) != (source is None):
            raise SpecError(f"cannot convert: {name} exists on one side only")
        if target is not None:
            target.copy_(source.reshape(target.shape))


# ---- activations and norms ------------------------------------------------------------------------------


def activation_name(act: Any) -> str:
    """``"relu"``, ``"elu"`` or ``"none"`` for an activation of torch."""
    if act is None or isinstance(act, nn.Identity):
        return "none"
    if isinstance(act, nn.ReLU) or act is torch.relu or act is nn.functional.relu:
        return "relu"
    if isinstance(act, nn.ELU) and act.alpha == 1.0:
        return "elu"
    raise SpecError(f"activation {act!r} has no counterpart in Weft; relu, elu and none can be converted")


def norm_from_pyg(norm: nn.Module | None) -> BatchNorm | LayerNorm | None:
    """A norm of PyG or torch as one of ours; None for the identity."""
    pyg = library()
    if norm is None or isinstance(norm, nn.Identity):
        return None
    inner = norm.module if isinstance(norm, pyg.BatchNorm) else norm
    if isinstance(inner, nn.BatchNorm1d) and inner.track_running_stats and inner.momentum is not None:
        ours: BatchNorm | LayerNorm = BatchNorm(inner.num_features, inner.eps, inner.momentum)
        copy_weights(_statistics(ours, inner))
    elif isinstance(inner, pyg.LayerNorm):
        ours = LayerNorm(inner.in_channels, inner.eps, inner.mode)
    elif isinstance(inner, nn.LayerNorm) and len(inner.normalized_shape) == 1:
        ours = LayerNorm(inner.normalized_shape[0], inner.eps)
    else:
        raise SpecError(f"norm {norm!r} has no counterpart in Weft; batch and layer norms can be converted")
    copy_weights({"weight": (ours.weight, inner.weight), "bias": (ours.bias, inner.bias)})
    return ours


def norm_to_pyg(norm: BatchNorm | LayerNorm | None) -> nn.Module:
    """The inverse of :func:`norm_from_pyg`."""
    pyg = library()
    if norm is None:
        return nn.Identity()
    if isinstance(norm, BatchNorm):
        theirs = pyg.BatchNorm(norm.features, norm.eps, norm.momentum)
        copy_weights(_statistics(theirs.module, norm))
        inner = theirs.module
    else:
        theirs = inner = pyg.LayerNorm(norm.features, norm.eps, mode=norm.mode)
    copy_weights({"weight": (inner.weight, norm.weight), "bias": (inner.bias, norm.bias)})
    return theirs


def _statistics(target: nn.Module, source: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (getattr(target, name), getattr(source, name)) for name in ("running_mean", "running_var")}


# ---- which parameter is which: our name -> theirs --------------------------------------------------------


def _gin_pairs(ours: GINConv, theirs: Any) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    first, _, _, second = mlp_parts(theirs.nn)
    return {
        "weight_in": (ours.weight_in, first.weight),
        "bias_in": (ours.bias_in, first.bias),
        "weight_out": (ours.weight_out, second.weight),
        "bias": (ours.bias, second.bias),
        "eps": (ours.eps, theirs.eps if isinstance(theirs.eps, nn.Parameter) else None),
    }


def _residual(ours: AttentionConv, theirs: Any) -> tuple[Tensor | None, Tensor | None]:
    return ours.weight_residual, None if theirs.res is None else theirs.res.weight


def _gatv2_pairs(ours: GATv2Conv, theirs: Any) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    pairs = {
        "weight_src": (ours.weight_src, theirs.lin_l.weight),
        "bias_src": (ours.bias_src, theirs.lin_l.bias),
        "attention": (ours.attention, theirs.att),
        "weight_residual": _residual(ours, theirs),
        "bias": (ours.bias, theirs.bias),
    }
    if not ours.share_weights:
        pairs["weight_dst"] = (ours.weight_dst, theirs.lin_r.weight)
        pairs["bias_dst"] = (ours.bias_dst, theirs.lin_r.bias)
    return pairs


PAIRS: dict[str, Callable[[Any, Any], dict[str, tuple[Tensor | None, Tensor | None]]]] = {
    "GCNConv": lambda ours, theirs: {"weight": (ours.weight, theirs.lin.weight), "bias": (ours.bias, theirs.bias)},
    "SAGEConv": lambda ours, theirs: {
        "weight_neighbour": (ours.weight_neighbour, theirs.lin_l.weight),
        "weight_self": (ours.weight_self, theirs.lin_r.weight),
        "bias": (ours.bias, theirs.lin_l.bias),
    },
    "GINConv": _gin_pairs,
    "GATConv": lambda ours, theirs: {
        "weight": (ours.weight, theirs.lin.weight),
        "attention[0]": (ours.attention[0], theirs.att_src),
        "attention[1]": (ours.attention[1], theirs.att_dst),
        "weight_residual": _residual(ours, theirs),
        "bias": (ours.bias, theirs.bias),
    },
    "GATv2Conv": _gatv2_pairs,
    "RGCNConv": lambda ours, theirs: {
        "weight": (ours.weight, theirs.weight),
        "coefficients": (ours.coefficients, theirs.comp),
        "weight_self": (ours.weight_self.T, theirs.root),
        "bias": (ours.bias, theirs.bias),
    },
}


def mlp_parts(mlp: nn.Module) -> tuple[Any, nn.Module | None, Any, Any]:
    """``(first linear, norm or None, activation, second linear)`` of what stands inside a GINConv."""
    pyg = library()
    if isinstance(mlp, pyg.MLP) and len(mlp.lins) == 2:
        require(mlp, act_first=False, plain_last=True, dropout=[0.0, 0.0])
        return mlp.lins[0], mlp.norms[0], mlp.act, mlp.lins[1]
    parts = list(mlp) if isinstance(mlp, nn.Sequential) else []
    if len(parts) == 3:
        parts.insert(1, None)
    if len(parts) != 4 or not all(hasattr(part, "weight") for part in (parts[0], parts[3])):
        raise SpecError(
            f"GINConv: nn={mlp!r} has no counterpart in Weft; "
            "a linear layer, an optional norm, an activation and a linear layer can be converted"
        )
    return parts[0], parts[1], parts[2], parts[3]


# ---- layers ----------------------------------------------------------------------------------------------


def conv_from_pyg(theirs: nn.Module) -> Conv:
    """A convolution of PyG as one of ours, with copies of its weights."""
    pyg, kind = library(), type(theirs)
    name = kind.__name__.removeprefix("Fast")  # FastRGCNConv computes what RGCNConv does
    if name not in KINDS or kind is not getattr(pyg, kind.__name__, None):
        raise SpecError(f"{kind.__name__} has no counterpart in Weft; {', '.join(KINDS)} can be converted")
    require(theirs, flow="source_to_target")
    ours: Conv = KINDS[name][0](theirs)
    copy_weights(PAIRS[name](ours, theirs))
    return ours


def conv_to_pyg(ours: Conv) -> nn.Module:
    """The inverse of :func:`conv_from_pyg`."""
    if not isinstance(ours, AttentionConv) and ours.weight_residual is not None:
        raise SpecError(f"{type(ours).__name__}: residual=True has no counterpart in PyG")
    kind = type(ours).__name__
    theirs: nn.Module = KINDS[kind][1](ours)
    copy_weights({name: (target, source) for name, (source, target) in PAIRS[kind](ours, theirs).items()})
    return theirs


def gcn_from(theirs: Any) -> GCNConv:
    require_sum(theirs)
    require(theirs, improved=False, normalize=True, add_self_loops=True)
    outputs, inputs = theirs.lin.weight.shape
    return GCNConv(inputs, outputs, bias=theirs.bias is not None)


def _gcn_to(ours: GCNConv) -> nn.Module:
    return library().GCNConv(ours.in_features, ours.out_features, bias=ours.bias is not None)


def sage_sized(theirs: Any) -> SAGEConv:
    """With the sizes of ``theirs``, which may normalise, project or leave out the root."""
    reduce = "sum" if theirs.aggr == "add" else theirs.aggr
    if reduce not in AGGREGATORS:
        raise SpecError(
            f"{type(theirs).__name__}: aggr={theirs.aggr!r} has no counterpart in Weft; {', '.join(AGGREGATORS)} have"
        )
    outputs, inputs = theirs.lin_l.weight.shape
    return SAGEConv(inputs, outputs, str(reduce), bias=theirs.lin_l.bias is not None)


def _sage_from(theirs: Any) -> SAGEConv:
    require(theirs, normalize=False, root_weight=True, project=False)
    return sage_sized(theirs)


def _sage_to(ours: SAGEConv) -> nn.Module:
    has_bias = ours.bias is not None
    return library().SAGEConv(ours.in_features, ours.out_features, aggr=ours.aggregator, bias=has_bias)


def _gin_from(theirs: Any) -> GINConv:
    require_sum(theirs)
    first, norm, act, second = mlp_parts(theirs.nn)
    ours = GINConv(
        first.weight.shape[1],
        second.weight.shape[0],
        hidden=first.weight.shape[0],
        activation=activation_name(act),
        eps=theirs.eps.item(),
        train_eps=isinstance(theirs.eps, nn.Parameter),
        bias=second.bias is not None,
    )
    ours.inner.norm = norm_from_pyg(norm)
    return ours


def _gin_to(ours: GINConv) -> nn.Module:
    pyg = library()
    act = None if ours.inner.activation == "none" else ours.inner.activation
    widths = [ours.in_features, ours.hidden, ours.out_features]
    mlp = pyg.MLP(widths, act=act, norm=None, bias=[True, ours.bias is not None])
    theirs = pyg.GINConv(mlp, eps=ours.initial_eps, train_eps=ours.eps is not None)
    mlp.norms[0] = norm_to_pyg(ours.inner.norm)  # only now: GINConv has just reset what stands inside
    return theirs


def attention_from(theirs: Any) -> GATConv | GATv2Conv:
    """A layer for PyG's GATConv or GATv2Conv."""
    require_sum(theirs)
    require(theirs, edge_dim=None, add_self_loops=True)
    options = {
        "out_features": theirs.out_channels * (theirs.heads if theirs.concat else 1),
        "heads": theirs.heads,
        "concat": theirs.concat,
        "slope": theirs.negative_slope,
        "dropout": theirs.dropout,
        "bias": theirs.bias is not None,
        "residual": theirs.res is not None,
    }
    if hasattr(theirs, "share_weights"):
        return GATv2Conv(theirs.lin_l.weight.shape[1], share_weights=theirs.share_weights, **options)
    if theirs.lin is None:
        raise SpecError("GATConv: separate weights for sources and targets have no counterpart in Weft")
    return GATConv(theirs.lin.weight.shape[1], **options)


def _attention_to(ours: AttentionConv) -> nn.Module:
    options = {
        "heads": ours.heads,
        "concat": ours.concat,
        "negative_slope": ours.slope,
        "dropout": ours.dropout.p,
        "bias": ours.bias is not None,
        "residual": ours.weight_residual is not None,
    }
    if isinstance(ours, GATv2Conv):
        options["share_weights"] = ours.share_weights
    return getattr(library(), type(ours).__name__)(ours.in_features, ours.head_features, **options)


def _rgcn_from(theirs: Any) -> RGCNConv:
    require(theirs, aggr="mean")
    if theirs.root is None:
        raise SpecError(f"{type(theirs).__name__}: root_weight=False has no counterpart in Weft")
    inputs, outputs = theirs.root.shape
    sharing = {"bases": theirs.num_bases, "blocks": theirs.num_blocks}
    return RGCNConv(inputs, outputs, theirs.num_relations, **sharing, bias=theirs.bias is not None)


def _rgcn_to(ours: RGCNConv) -> nn.Module:
    sharing = {"num_bases": ours.bases, "num_blocks": ours.blocks, "bias": ours.bias is not None}
    return library().RGCNConv(ours.in_features, ours.out_features, ours.num_relations, **sharing)


# By the name that a class has in both libraries: ours of theirs, and theirs of ours.
KINDS: dict[str, tuple[Callable[[Any], Conv], Callable[[Any], nn.Module]]] = {
    "GCNConv": (gcn_from, _gcn_to),
    "SAGEConv": (_sage_from, _sage_to),
    "GINConv": (_gin_from, _gin_to),
    "GATConv": (attention_from, _attention_to),
    "GATv2Conv": (attention_from, _attention_to),
    "RGCNConv": (_rgcn_from, _rgcn_to),
}


# ---- Layers of Weft with the sizes of one of PyG's, for PyG's layers that compute with Weft's operators.
#
# A layer that Weft's operators do not cover is refused with a :class:`SpecError`.


def template_of(theirs: Any) -> Conv | None:
    """Weft's layer of the same kind and sizes; None for layers that need none, which are only checked."""
    require(theirs, flow="source_to_target", decomposed_layers=1)
    if isinstance(getattr(theirs, "in_channels", 0), (tuple, list)):
        pair = tuple(theirs.in_channels)
        if pair[0] != pair[1]:
            raise SpecError(f"{type(theirs).__name__}: in_channels={pair} has no counterpart in Weft")
    return TEMPLATES[type(theirs).__name__](theirs)


def _check_graph_conv(theirs: Any) -> None:
    if theirs.aggr not in ("add", "sum", "mean"):
        raise SpecError(f"GraphConv: aggr={theirs.aggr!r} has no counterpart in Weft; add and mean have")


def _check_propagation(theirs: Any) -> None:
    require(theirs, normalize=True, add_self_loops=True, dropout=0.0)
    require_sum(theirs)
    if hasattr(theirs, "_cached_x"):
        require(theirs, cached=False)


TEMPLATES: dict[str, Callable[[Any], Conv | None]] = {
    "GCNConv": gcn_from,
    "SAGEConv": sage_sized,
    "GINConv": require_sum,  # whatever network it has stays as it is
    "GATConv": attention_from,
    "GATv2Conv": attention_from,
    "GraphConv": _check_graph_conv,
    "SGConv": _check_propagation,
    "APPNP": _check_propagation,
}
