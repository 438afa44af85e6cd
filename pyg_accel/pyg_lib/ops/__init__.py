"""``pyg_lib.ops``: the functions of each file, under the names of pyg-lib."""

from pyg_accel.pyg_lib.ops.cluster import edge_sample, fps, graclus_cluster, grid_cluster
from pyg_accel.pyg_lib.ops.composite import (
    scatter_log_softmax,
    scatter_logsumexp,
    scatter_softmax,
    scatter_std,
)
from pyg_accel.pyg_lib.ops.dense import (
    grouped_matmul,
    index_sort,
    sampled_add,
    sampled_div,
    sampled_mul,
    sampled_sub,
    segment_matmul,
    softmax_csr,
)
from pyg_accel.pyg_lib.ops.points import knn, nearest, radius
from pyg_accel.pyg_lib.ops.scatter import (
    scatter,
    scatter_add,
    scatter_max,
    scatter_mean,
    scatter_min,
    scatter_mul,
    scatter_sum,
)
from pyg_accel.pyg_lib.ops.segment import (
    gather_coo,
    gather_csr,
    segment_add_coo,
    segment_add_csr,
    segment_coo,
    segment_csr,
    segment_max_coo,
    segment_max_csr,
    segment_mean_coo,
    segment_mean_csr,
    segment_min_coo,
    segment_min_csr,
    segment_sum_coo,
    segment_sum_csr,
)
from pyg_accel.pyg_lib.ops.spline import spline_basis, spline_weighting

__all__ = [
    "edge_sample", "fps", "gather_coo", "gather_csr", "graclus_cluster", "grid_cluster",
    "grouped_matmul", "index_sort", "knn", "nearest", "radius", "sampled_add", "sampled_div",
    "sampled_mul", "sampled_sub", "scatter", "scatter_add", "scatter_log_softmax",
    "scatter_logsumexp", "scatter_max", "scatter_mean", "scatter_min", "scatter_mul",
    "scatter_softmax", "scatter_std", "scatter_sum", "segment_add_coo", "segment_add_csr",
    "segment_coo", "segment_csr", "segment_matmul", "segment_max_coo", "segment_max_csr",
    "segment_mean_coo", "segment_mean_csr", "segment_min_coo", "segment_min_csr",
    "segment_sum_coo", "segment_sum_csr", "softmax_csr", "spline_basis", "spline_weighting",
]  # fmt: skip
