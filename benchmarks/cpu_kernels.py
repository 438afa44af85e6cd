"""The name by which `python -m pyg_accel bench` finds :mod:`benchmarks.kernels.cpu`."""

from benchmarks.kernels.cpu import main

__all__ = ["main"]
