"""Layers and models over Weft's operators, and their conversion from and to PyG."""

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.core.models import ModelTraits as ModelTraits
    from weft.nn.epilogue import BatchNorm as BatchNorm
    from weft.nn.epilogue import Dropout as Dropout
    from weft.nn.epilogue import Epilogue as Epilogue
    from weft.nn.epilogue import LayerNorm as LayerNorm
    from weft.nn.epilogue import assign_sites as assign_sites
    from weft.nn.gat import GATConv as GATConv
    from weft.nn.gat import GATv2Conv as GATv2Conv
    from weft.nn.gcn import GCNConv as GCNConv
    from weft.nn.gin import GINConv as GINConv
    from weft.nn.initial import reset_parameters as reset_parameters
    from weft.nn.models import GAT as GAT
    from weft.nn.models import GCN as GCN
    from weft.nn.models import GIN as GIN
    from weft.nn.models import GNN as GNN
    from weft.nn.models import RGCN as RGCN
    from weft.nn.models import SAGE as SAGE
    from weft.nn.models import GATv2 as GATv2
    from weft.nn.models import build as build
    from weft.nn.models import register_model as register_model
    from weft.nn.pyg.convert import from_pyg as from_pyg
    from weft.nn.pyg.convert import to_pyg as to_pyg
    from weft.nn.rgcn import RGCNConv as RGCNConv
    from weft.nn.sage import SAGEConv as SAGEConv

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
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
