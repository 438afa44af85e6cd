"""The name by which `python -m pyg_accel bench` finds :mod:`benchmarks.epochs.batches`."""

from benchmarks.epochs.batches import main

__all__ = ["main"]
