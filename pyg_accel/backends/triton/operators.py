"""The functions of all operators under their names, for a table that does not import Triton."""

from pyg_accel.backends.triton.attention import bind as bind_attention
from pyg_accel.backends.triton.attention import bind_backward as bind_attention_backward
from pyg_accel.backends.triton.attention import bind_several as bind_gspmm_several
from pyg_accel.backends.triton.attention import run_backward as attention_backward
from pyg_accel.backends.triton.cbsr import dot as cbsr_dot
from pyg_accel.backends.triton.cbsr import spmm as cbsr_spmm
from pyg_accel.backends.triton.cbsr import sspmm
from pyg_accel.backends.triton.edges import bind as bind_edge_passes
from pyg_accel.backends.triton.edges import run as edge_passes
from pyg_accel.backends.triton.gspmm import bind as bind_gspmm
from pyg_accel.backends.triton.gspmm import run as gspmm
from pyg_accel.backends.triton.maxk import run as maxk
from pyg_accel.backends.triton.sampled import run as sampled_spmm
from pyg_accel.backends.triton.scatter import run as scatter_arg
from pyg_accel.backends.triton.segments import matmul as segment_matmul
from pyg_accel.backends.triton.segments import outer as segment_outer
from pyg_accel.backends.triton.softmax import run as edge_softmax

__all__ = [
    "attention_backward", "bind_attention", "bind_attention_backward",
    "bind_edge_passes", "bind_gspmm", "bind_gspmm_several", "cbsr_dot", "cbsr_spmm", "edge_passes",
    "edge_softmax", "gspmm", "maxk", "sampled_spmm", "scatter_arg",
    "segment_matmul", "segment_outer", "sspmm",
]  # fmt: skip
