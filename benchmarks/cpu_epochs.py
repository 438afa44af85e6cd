"""The name by which `python -m pyg_accel bench` finds :mod:`benchmarks.epochs.cpu`."""

from benchmarks.epochs.cpu import main

__all__ = ["main"]
