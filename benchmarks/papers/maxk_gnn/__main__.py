"""`python -m benchmarks.papers.maxk_gnn --table N`, see :mod:`benchmarks.papers.common`."""

from benchmarks.papers.common import main
from benchmarks.papers.maxk_gnn import PAPER

if __name__ == "__main__":
    main(PAPER)
