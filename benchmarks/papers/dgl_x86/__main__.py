"""`python -m benchmarks.papers.dgl_x86 --table N`, see :mod:`benchmarks.papers.common`."""

from benchmarks.papers.common import main
from benchmarks.papers.dgl_x86 import PAPER

if __name__ == "__main__":
    main(PAPER)
