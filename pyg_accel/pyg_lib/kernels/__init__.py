"""The GPU kernels, in Triton: nearest points, and farthest-point sampling."""

from pyg_accel.pyg_lib.kernels.search import farthest_points, fits, nearest_points

__all__ = ["farthest_points", "fits", "nearest_points"]
