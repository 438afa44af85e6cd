"""The public interface of pyg-lib 0.9, which ``patch()`` gives PyG where pyg-lib is missing.

Names, arguments, shapes, dtypes, gradients and errors are those of
https://github.com/pyg-team/pyg-lib; where results may differ, the function says so.
"""

from pyg_accel.pyg_lib import ops, partition, sampler

__all__ = ["__version__", "cuda_version", "ops", "partition", "sampler"]

__version__ = "0.9.0"  # the version of pyg-lib whose interface this is


def cuda_version() -> int:
    """Return the version of CUDA that the kernels need: none, they are Triton's."""
    return -1
