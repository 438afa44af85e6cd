"""The public interface of pyg-lib 0.9, which ``patch()`` gives PyG if pyg-lib is missing.

Names, arguments, shapes, dtypes, gradients and errors follow https://github.com/pyg-team/pyg-lib;
functions with other results say so.
"""

from pyg_accel.pyg_lib import ops, partition, sampler

__all__ = ["__version__", "cuda_version", "ops", "partition", "sampler"]

__version__ = "0.9.0"  # the version of pyg-lib whose interface this is


def cuda_version() -> int:
    """Return -1: the kernels are not compiled for a version of CUDA."""
    return -1
