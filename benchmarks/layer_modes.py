"""`python -m benchmarks.layer_modes`: see :mod:`benchmarks.layers.modes`."""

from benchmarks.layers.modes import main

if __name__ == "__main__":
    main()
