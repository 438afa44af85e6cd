"""Graphs of different structures, and sizes of each primitive, to measure."""

import random
from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops, to_undirected

from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.workload import operand_bytes

__all__ = ["ProfileGraph", "calls", "graph_cases"]

WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 100, 128, 160, 192, 256, 300, 384, 512, 602, 768,
          1024, 1433, 2048)  # fmt: skip
HEADS = ((1, 1), (4, 1), (8, 1), (4, 8), (8, 8), (4, 32), (2, 64), (4, 64), (8, 32), (4, 128),
         (8, 128))  # and features per head  # fmt: skip
MAXK = ((64, 8), (128, 8), (128, 16), (256, 8), (256, 16), (256, 32), (256, 64), (512, 32),
        (1024, 64))  # features, and k  # fmt: skip
SAMPLES = (8, 16, 32, 64, 128, 256)  # entries per row
EACH = 6  # calls of each primitive per graph
MOST_WORK = {"cpu": 2e10, "cuda": 6e12}  # multiplications of a product
MOST_BYTES = {"cpu": 1.2e9, "cuda": 50e9}  # of the operands

# Number of graphs; the range of their nodes, as powers of ten; the most entries.
SIZES = {"cpu": (30, 3.0, 5.6, 3e6), "cuda": (48, 4.0, 6.5, 1e8)}
# R-MAT: the shares of edges in three quadrants of the matrix, and recursively in their quadrants;
# the fourth has the remaining edges. Nodes are shuffled, except in "ordered".
QUADRANTS = {"skewed": (0.57, 0.19, 0.19), "uniform": (0.25, 0.25, 0.25),
             "communities": (0.5, 0.04, 0.04), "ordered": (0.5, 0.04, 0.04)}  # fmt: skip
STRUCTURES = (*QUADRANTS, "roads", "batched")


class ProfileGraph(NamedTuple):
    """A graph to measure on: structure, nodes, and about how many entries it has.

    It is symmetric, has no self-loops, and is the same in every run on one kind of device.
    """

    structure: str
    nodes: int
    entries: int

    def __str__(self) -> str:
        """Return its name in the CSV file."""
        return f"{self.structure} {self.nodes} {self.entries}"

    def make(self, device: torch.device) -> Graph:
        """Draw the graph."""
        edges, _ = remove_self_loops(self._edges(torch.Generator(device).manual_seed(0)))
        row, col = to_undirected(edges, num_nodes=self.nodes)
        rowptr = torch.searchsorted(row, torch.arange(self.nodes + 1, device=device))
        return Graph.from_csr(rowptr.int(), col.int(), num_cols=self.nodes)

    def _edges(self, generator: torch.Generator) -> Tensor:
        nodes, count, device = self.nodes, self.entries // 2, generator.device

        def below(most: int) -> Tensor:
            return torch.randint(most, (count,), generator=generator, device=device)

        if self.structure not in QUADRANTS:  # a grid with missing edges, or a batch of small graphs
            source, size = below(nodes), 12 + nodes % 50
            road = self.structure == "roads"
            step = isqrt(nodes) ** below(2) if road else below(size) - source % size
            return torch.stack([source, (source + step).clamp_(max=nodes - 1)])
        a, b, c = QUADRANTS[self.structure]
        edges = torch.zeros(2, count, dtype=torch.int64, device=device)
        levels = (nodes - 1).bit_length()
        for _ in range(levels):
            u = torch.rand(count, generator=generator, device=device)
            edges = 2 * edges + torch.stack([u >= a + b, (u >= a) & (u < a + b) | (u >= a + b + c)])
        edges = edges * nodes >> levels
        shuffled = torch.randperm(nodes, generator=generator, device=device)
        return edges if self.structure == "ordered" else shuffled[edges]


def graph_cases(kind: str) -> list[ProfileGraph]:
    """Return the graphs for a kind of device, small ones first, so that partial runs are useful.

    They have every structure, and sizes smaller and larger than caches. They are not graphs of the
    benchmarks.
    """
    number, fewest, most, entries = SIZES[kind]
    draw, cases = random.Random(0), []
    for i in range(number):
        structure = STRUCTURES[i % len(STRUCTURES)]
        nodes, degree = int(10 ** draw.uniform(fewest, most)), 10 ** draw.uniform(0.6, 2.3)
        degree = degree if structure in QUADRANTS else 2.4
        cases.append(ProfileGraph(structure, nodes, int(min(nodes * degree, entries))))
    return sorted(cases, key=lambda case: case.nodes + case.entries)


def calls(kind: str, case: ProfileGraph) -> Iterator[Primitive]:
    """Yield the calls to time for one graph: some of every primitive, the same in every run.

    Dense calls have as many rows as the graph. Sparse calls only have its sizes.
    """
    draw = random.Random(str(case))
    drawn = [p for _ in range(EACH) for p in _one_of_each(case, draw)]
    for p in dict.fromkeys(drawn):
        work = p.rows * p.inner * p.cols if p.name in ("gemm", "gemm_tn") else 0
        if work <= MOST_WORK[kind] and operand_bytes(p) <= MOST_BYTES[kind]:
            yield p


def _one_of_each(case: ProfileGraph, draw: random.Random) -> list[Primitive]:
    n, g = case.nodes, GraphFeatures(case.nodes, case.nodes, case.entries)
    width, inner = draw.choice(WIDTHS), draw.choice(WIDTHS)
    heads, cols = draw.choice(HEADS) if draw.random() < 0.5 else (1, width)
    permuted = draw.random() < 0.4
    shared = heads > 1 and not permuted and draw.random() < 0.4
    wide, k = draw.choice(MAXK)
    return [
        Primitive("gemm", n, inner, width),
        Primitive("gemm_tn", inner, n, width),
        Primitive("scale_rows", n, 0, width),
        Primitive("elementwise", n, 0, width),
        Primitive("maxk", n, k, wide),
        Primitive("spmm", n, 0, width, graph=g),
        Primitive("spmm_weighted", n, 0, heads * cols, heads, g, permuted, shared),
        Primitive("sddmm", n, 0, heads * cols, heads, g),
        Primitive("scale_edges", n, 0, heads, heads, g, permuted),
        Primitive("edge_softmax", n, 0, heads, heads, g, permuted),
        Primitive("cbsr_spmm", n, k, wide, graph=g),
        Primitive("sspmm", n, k, wide, graph=g),
        Primitive("sampled_spmm", n, draw.choice(SAMPLES), width, graph=g),
    ]
