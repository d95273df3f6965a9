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

_PLACES = {
    "BatchNorm": "weft.nn.epilogue",
    "Dropout": "weft.nn.epilogue",
    "Epilogue": "weft.nn.epilogue",
    "GAT": "weft.nn.models",
    "GATConv": "weft.nn.gat",
    "GATv2": "weft.nn.models",
    "GATv2Conv": "weft.nn.gat",
    "GCN": "weft.nn.models",
    "GCNConv": "weft.nn.gcn",
    "GIN": "weft.nn.models",
    "GINConv": "weft.nn.gin",
    "GNN": "weft.nn.models",
    "LayerNorm": "weft.nn.epilogue",
    "ModelTraits": "weft.core.models",
    "RGCN": "weft.nn.models",
    "RGCNConv": "weft.nn.rgcn",
    "SAGE": "weft.nn.models",
    "SAGEConv": "weft.nn.sage",
    "assign_sites": "weft.nn.epilogue",
    "build": "weft.nn.models",
    "from_pyg": "weft.nn.pyg.convert",
    "register_model": "weft.nn.models",
    "reset_parameters": "weft.nn.initial",
    "to_pyg": "weft.nn.pyg.convert",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
