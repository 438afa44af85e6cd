"""Batches: neighbour sampling, and the collation of many small graphs."""
