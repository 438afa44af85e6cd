"""`python -m benchmarks.papers.sensei --table N`, see :mod:`benchmarks.papers.common`."""

from benchmarks.papers.common import main
from benchmarks.papers.sensei import PAPER

if __name__ == "__main__":
    main(PAPER)
