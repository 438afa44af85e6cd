"""Operators on graphs, registered with torch.library under ``pyg_accel``."""

from pyg_accel.ops.attention import attention
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.ops.sddmm import sddmm
from pyg_accel.ops.softmax import edge_softmax
from pyg_accel.ops.spmm import spmm

__all__ = ["attention", "edge_softmax", "gspmm", "sddmm", "spmm"]
