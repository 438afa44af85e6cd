"""`python -m benchmarks.papers.es_spmm --table N`, see :mod:`benchmarks.papers.common`."""

from benchmarks.papers.common import main
from benchmarks.papers.es_spmm import PAPER

if __name__ == "__main__":
    main(PAPER)
