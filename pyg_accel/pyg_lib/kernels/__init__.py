"""What runs on a GPU: nearest points in CUDA, farthest-point sampling in Triton."""

from pyg_accel.pyg_lib.kernels.search import farthest_points, fits, nearest_points, samples

__all__ = ["farthest_points", "fits", "nearest_points", "samples"]
