"""Layers of our own: MaxK-GNN (ASPLOS 2024) for PyG, and relations all at once.

The MaxK layers are sparse on both sides of their aggregation: each is the layer of PyG of that name
with one argument more, ``k``, and MaxK in front.
"""

from pyg_accel.layers.activation import MaxK, maxk
from pyg_accel.layers.convert import to_maxk
from pyg_accel.layers.maxk_gcn_conv import MaxKGCNConv
from pyg_accel.layers.maxk_gin_conv import MaxKGINConv
from pyg_accel.layers.maxk_sage_conv import MaxKSAGEConv
from pyg_accel.layers.rgcn_conv import RGCNConv

__all__ = ["MaxK", "MaxKGCNConv", "MaxKGINConv", "MaxKSAGEConv", "RGCNConv", "maxk", "to_maxk"]
