"""Operators on graphs, registered with torch.library under ``pyg_accel``."""

from pyg_accel.ops.attention import attention
from pyg_accel.ops.cbsr import cbsr_spmm
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.ops.maxk import maxk
from pyg_accel.ops.quantized import Quantized, quantize
from pyg_accel.ops.sampled import sampled_spmm, sampling_rates
from pyg_accel.ops.sddmm import sddmm
from pyg_accel.ops.segment_matmul import segment_matmul
from pyg_accel.ops.sgt import sgt
from pyg_accel.ops.softmax import edge_softmax
from pyg_accel.ops.spmm import spmm

__all__ = [
    "Quantized",
    "attention",
    "cbsr_spmm",
    "edge_softmax",
    "gspmm",
    "maxk",
    "quantize",
    "sampled_spmm",
    "sampling_rates",
    "sddmm",
    "segment_matmul",
    "sgt",
    "spmm",
]
