"""Layers whose aggregation is sparse on both sides: MaxK-GNN (ASPLOS 2024) for PyG.

Each is a layer of PyG with MaxK in front, and an argument ``k``.
"""

from pyg_accel.layers.activation import MaxK, maxk
from pyg_accel.layers.convert import to_maxk
from pyg_accel.layers.maxk_gcn_conv import MaxKGCNConv
from pyg_accel.layers.maxk_gin_conv import MaxKGINConv
from pyg_accel.layers.maxk_sage_conv import MaxKSAGEConv

__all__ = ["MaxK", "MaxKGCNConv", "MaxKGINConv", "MaxKSAGEConv", "maxk", "to_maxk"]
