"""Layers and models over Weft's operators, and their conversion from and to PyG."""

from weft.nn.build import build
from weft.nn.dropout import Dropout, assign_sites
from weft.nn.epilogue import Epilogue
from weft.nn.gat_conv import GATConv
from weft.nn.gatv2_conv import GATv2Conv
from weft.nn.gcn_conv import GCNConv
from weft.nn.gin_conv import GINConv
from weft.nn.initial import reset_parameters
from weft.nn.models import GAT, GCN, GIN, SAGE, GATv2
from weft.nn.norm import BatchNorm, LayerNorm
from weft.nn.pyg import from_pyg, to_pyg
from weft.nn.sage_conv import SAGEConv

__all__ = [
    "GAT",
    "GCN",
    "GIN",
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
    "SAGEConv",
    "assign_sites",
    "build",
    "from_pyg",
    "reset_parameters",
    "to_pyg",
]
