"""Training on mini-batches, the loader included: see :mod:`benchmarks.loaders.times`."""
