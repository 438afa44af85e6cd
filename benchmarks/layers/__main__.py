"""`python -m benchmarks.layers`: see :mod:`benchmarks.layers.times`."""

from benchmarks.layers.times import main

if __name__ == "__main__":
    main()
