"""Benchmarks of pyg_accel: synthetic graphs, real data sets, peers, timing and plots."""
