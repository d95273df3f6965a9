"""Layers and models over Weft's operators, and their conversion from and to PyG."""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.core.models import ModelTraits
    from weft.nn.epilogue import BatchNorm, Dropout, Epilogue, LayerNorm, assign_sites
    from weft.nn.gat import GATConv, GATv2Conv
    from weft.nn.gcn import GCNConv
    from weft.nn.gin import GINConv
    from weft.nn.initial import reset_parameters
    from weft.nn.models import GAT, GCN, GIN, GNN, RGCN, SAGE, GATv2, build, register_model
    from weft.nn.pyg.convert import from_pyg, to_pyg
    from weft.nn.rgcn import RGCNConv
    from weft.nn.sage import SAGEConv

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "GNN",
    "RGCN",
    "SAGE",
    "BatchNorm",
    "Dropout",
    "Epilogue",
    "GATConv",
    "GATv2",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "LayerNorm",
    "ModelTraits",
    "RGCNConv",
    "SAGEConv",
    "assign_sites",
    "build",
    "from_pyg",
    "register_model",
    "reset_parameters",
    "to_pyg",
]

_MODULES = {
    "weft.core.models": ("ModelTraits",),
    "weft.nn.epilogue": ("BatchNorm", "Dropout", "Epilogue", "LayerNorm", "assign_sites"),
    "weft.nn.gat": ("GATConv", "GATv2Conv"),
    "weft.nn.gcn": ("GCNConv",),
    "weft.nn.gin": ("GINConv",),
    "weft.nn.initial": ("reset_parameters",),
    "weft.nn.models": ("GAT", "GCN", "GIN", "GNN", "RGCN", "SAGE", "GATv2", "build", "register_model"),
    "weft.nn.pyg.convert": ("from_pyg", "to_pyg"),
    "weft.nn.rgcn": ("RGCNConv",),
    "weft.nn.sage": ("SAGEConv",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
