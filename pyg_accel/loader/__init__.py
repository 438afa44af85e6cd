"""Mini-batches: the neighbour sampler that ``patch()`` gives to PyG's loaders."""

from pyg_accel.loader.neighbors import sample

__all__ = ["sample"]
