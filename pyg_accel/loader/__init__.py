"""Batches: neighbour sampling, and the collation of many small graphs."""

from pyg_accel.loader.dataloader import DataLoader

__all__ = ["DataLoader"]
