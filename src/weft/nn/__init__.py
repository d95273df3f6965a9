"""Layers and models over Weft's operators, and their conversion from and to PyG."""

from weft.core.models import ModelTraits
from weft.nn.build import build, register_model
from weft.nn.conv.gat import GATConv
from weft.nn.conv.gatv2 import GATv2Conv
from weft.nn.conv.gcn import GCNConv
from weft.nn.conv.gin import GINConv
from weft.nn.conv.rgcn import RGCNConv
from weft.nn.conv.sage import SAGEConv
from weft.nn.dropout import Dropout, assign_sites
from weft.nn.epilogue import Epilogue
from weft.nn.initial import reset_parameters
from weft.nn.models import GAT, GCN, GIN, GNN, RGCN, SAGE, GATv2
from weft.nn.norm import BatchNorm, LayerNorm
from weft.nn.pyg.models import from_pyg, to_pyg

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
