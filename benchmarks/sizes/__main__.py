"""`python -m benchmarks.sizes`: see :mod:`benchmarks.sizes.times`."""

from benchmarks.sizes.times import main

if __name__ == "__main__":
    main()
