"""The name by which `python -m pyg_accel bench` finds :mod:`benchmarks.epochs.gpu`."""

from benchmarks.epochs.gpu import main

__all__ = ["main"]
