"""The name by which `python -m pyg_accel bench` finds :mod:`benchmarks.kernels.gpu`."""

from benchmarks.kernels.gpu import main

__all__ = ["main"]
