"""`python -m benchmarks.distributed`: see :mod:`benchmarks.distributed.epochs`."""

from benchmarks.distributed.epochs import main

if __name__ == "__main__":
    main()
