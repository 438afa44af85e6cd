"""`python -m benchmarks.loaders`: see :mod:`benchmarks.loaders.times`."""

from benchmarks.loaders.times import main

if __name__ == "__main__":
    main()
