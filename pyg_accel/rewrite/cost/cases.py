"""What is measured: graphs of every structure that matters, and sizes for each primitive."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pyg_accel.rewrite.cost import synthetic
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.synthetic import CommunityShape
from pyg_accel.rewrite.cost.workload import operand_bytes

__all__ = ["ProfileGraph", "dense_cases", "graph_cases", "sparse_cases"]

WIDTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 100, 128, 160, 192, 256, 300, 384, 512, 602, 768,
          1024, 1433, 2048)  # fmt: skip
KEPT = (
    (64, 8),
    (128, 8),
    (128, 16),
    (256, 8),
    (256, 16),
    (256, 32),
    (256, 64),
    (512, 32),
    (1024, 64),
)  # features and how many of them MaxK keeps
SAMPLES = (8, 16, 32, 64, 128, 256)  # entries of a row
HEADS = ((4, 8), (8, 8), (4, 32), (2, 64), (4, 64), (8, 32), (4, 128), (8, 128))  # heads, features
DENSE_PER_DEVICE = {"cpu": 130, "cuda": 260}
# Sizes of a product stay below these: multiplications, and elements of the largest operand.
MOST_WORK = {"cpu": 2e10, "cuda": 6e12}
MOST_ELEMENTS = {"cpu": 6e7, "cuda": 3e9}
MOST_BYTES = {"cpu": 1.2e9, "cuda": 50e9}  # of the operands of a call


@dataclass(frozen=True)
class ProfileGraph:
    """A graph to measure on: its name in the CSV, about how large it is, and how to make it."""

    name: str
    nodes: int
    entries: float
    make: Callable[..., tuple[Tensor, Tensor]]


def _rmat(nodes: int, entries: int, seed: int) -> ProfileGraph:
    make = partial(synthetic.rmat, nodes, entries, seed)
    return ProfileGraph(f"rmat {nodes} {entries}", nodes, entries, make)


def _community(nodes: int, entries: int, communities: int, inside: float, exponent: float,
               *, ordered: bool = False) -> ProfileGraph:  # fmt: skip
    shape = CommunityShape(nodes, entries, communities, inside, exponent)
    make = partial(synthetic.community_graph, shape, ordered=ordered, seed=7)
    kind = "ordered" if ordered else "community" if exponent else "uniform"
    name = f"{kind} {nodes} {entries} {communities} {inside} {exponent}"
    return ProfileGraph(name, nodes, entries, make)


def _roads(nodes: int, kept: float) -> ProfileGraph:
    make = partial(synthetic.roads, nodes, kept)
    return ProfileGraph(f"roads {nodes} {kept}", nodes, 4 * nodes * kept, make)


def _batched(count: int, size: int) -> ProfileGraph:
    make = partial(synthetic.batched, count, size)
    return ProfileGraph(f"batched {count} {size}", count * size, 2.4 * count * size, make)


def _mycielskian(order: int) -> ProfileGraph:
    nodes, entries = 3 << (order - 2), 100_245_742 * 3.0 ** (order - 17)
    make = partial(synthetic.mycielskian, order)
    return ProfileGraph(f"mycielskian {order}", nodes, entries, make)


# Of every structure, from what fits a cache to what no cache holds. None of them is a graph that
# the benchmarks use.
GRAPHS = {
    "cpu": (
        _rmat(3_000, 20_000, 1), _rmat(4_000, 100_000, 2), _rmat(12_000, 250_000, 3),
        _rmat(30_000, 300_000, 4), _rmat(9_000, 800_000, 5), _rmat(60_000, 900_000, 6),
        _rmat(150_000, 1_200_000, 7), _rmat(30_000, 2_500_000, 8), _rmat(250_000, 3_000_000, 9),
        _community(3_000, 12_000, 7, 0.8, 0.0), _community(20_000, 160_000, 50, 0.7, 0.6),
        _community(60_000, 400_000, 200, 0.8, 0.4), _community(14_000, 1_500_000, 30, 0.6, 0.5),
        _community(120_000, 1_800_000, 500, 0.7, 0.7),
        _community(60_000, 500_000, 300, 0.8, 0.4, ordered=True),
        _community(200_000, 2_000_000, 2_000, 0.9, 0.5, ordered=True),
        _community(20_000, 1_000_000, 40, 0.8, 0.5, ordered=True),
        _community(40_000, 200_000, 2, 0.5, 0.0), _community(300_000, 900_000, 2, 0.5, 0.0),
        _community(25_000, 1_200_000, 2, 0.5, 0.0),
        _roads(9_000, 0.65), _roads(90_000, 0.7), _roads(400_000, 0.6),
        _batched(200, 24), _batched(3_000, 20), _batched(15_000, 26), _batched(4_000, 60),
        _mycielskian(9), _mycielskian(10), _mycielskian(11), _mycielskian(12),
    ),
    "cuda": (
        _rmat(20_000, 400_000, 1), _rmat(50_000, 1_000_000, 2), _rmat(10_000, 2_000_000, 3),
        _rmat(200_000, 4_000_000, 4), _rmat(30_000, 6_000_000, 5), _rmat(500_000, 15_000_000, 6),
        _rmat(90_000, 40_000_000, 7), _rmat(1_200_000, 40_000_000, 8),
        _rmat(2_500_000, 100_000_000, 9),
        _community(100_000, 1_500_000, 200, 0.6, 0.5),
        _community(350_000, 8_000_000, 900, 0.8, 0.4),
        _community(60_000, 30_000_000, 60, 0.6, 0.5),
        _community(1_500_000, 60_000_000, 3_000, 0.8, 0.5),
        _community(200_000, 95_000_000, 60, 0.7, 0.5),
        _community(150_000, 2_000_000, 400, 0.8, 0.6, ordered=True),
        _community(800_000, 20_000_000, 4_000, 0.9, 0.4, ordered=True),
        _community(180_000, 60_000_000, 50, 0.7, 0.5, ordered=True),
        _rmat(70_000, 700_000, 10), _rmat(300_000, 2_000_000, 11), _rmat(25_000, 3_000_000, 12),
        _rmat(700_000, 9_000_000, 13), _rmat(160_000, 20_000_000, 14),
        _rmat(1_800_000, 30_000_000, 15), _rmat(400_000, 70_000_000, 16),
        _community(250_000, 3_000_000, 300, 0.7, 0.7),
        _community(700_000, 25_000_000, 80, 0.6, 0.6),
        _community(130_000, 50_000_000, 500, 0.8, 0.4),
        _community(2_800_000, 90_000_000, 9_000, 0.9, 0.3),
        _community(90_000, 9_000_000, 150, 0.8, 0.5, ordered=True),
        _community(2_000_000, 80_000_000, 6_000, 0.8, 0.5, ordered=True),
        _community(900_000, 5_000_000, 2, 0.5, 0.0), _community(150_000, 25_000_000, 2, 0.5, 0.0),
        _community(1_200_000, 50_000_000, 2, 0.5, 0.0),
        _roads(1_100_000, 0.9), _batched(60_000, 14), _mycielskian(13),
        _community(400_000, 12_000_000, 2, 0.5, 0.0), _community(2_000_000, 8_000_000, 2, 0.5, 0.0),
        _community(60_000, 3_000_000, 2, 0.5, 0.0),
        _roads(400_000, 0.65), _roads(3_000_000, 0.7), _roads(9_000_000, 0.6),
        _batched(20_000, 24), _batched(150_000, 20), _batched(50_000, 60), _batched(600_000, 26),
        _mycielskian(12), _mycielskian(14), _mycielskian(15), _mycielskian(16),
    ),
}  # fmt: skip


def graph_cases(kind: str) -> tuple[ProfileGraph, ...]:
    """Return the graphs for a kind of device, small ones first: half a run is of use, too."""
    return tuple(sorted(GRAPHS[kind], key=lambda case: case.entries))


def sparse_cases(
    kind: str, case: ProfileGraph, features: GraphFeatures | None = None
) -> Iterator[Primitive]:
    """Yield the calls to time on one graph: sizes that are its own, the same in every run.

    Args:
        kind: of the device.
        case: the graph.
        features: those of the graph; without them the sizes of the case stand in, which is enough
            to know which calls there will be.
    """
    about = GraphFeatures(case.nodes, case.nodes, int(case.entries))
    graph = features or about
    for name, cols, heads, permuted, shared, *inner in _drawn(random.Random(case.name)):
        like = Primitive(name, case.nodes, 0, cols, heads, about)
        if operand_bytes(like) <= MOST_BYTES[kind]:
            read = inner[0] if inner else 0
            yield Primitive(name, graph.num_rows, read, cols, heads, graph, permuted, shared)


def _drawn(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    """Name, columns, heads, whether permuted and shared, and how much of each row is read."""
    for width in sorted(draw.sample(WIDTHS, 9)):
        yield "spmm", width, 1, False, False
    for width in sorted(draw.sample(WIDTHS, 7)):
        yield "spmm_weighted", width, 1, draw.random() < 0.4, False
    for heads, width in draw.sample(HEADS, 4):
        yield "spmm_weighted", heads * width, heads, draw.random() < 0.4, False
    for heads, width in draw.sample(HEADS, 2):
        yield "spmm_weighted", heads * width, heads, False, True
    for width in sorted(draw.sample(WIDTHS, 4)):
        yield "sddmm", width, 1, False, False
    for heads, width in draw.sample(HEADS, 3):
        yield "sddmm", heads * width, heads, False, False
    yield "sddmm", 1, 1, False, False  # scores of attention: a number per edge and head
    yield "sddmm", 8, 8, False, False
    for name in ("scale_edges", "edge_softmax"):
        for heads in sorted({1, draw.choice((2, 4, 8))}):
            for permuted in (False, True):
                yield name, heads, heads, permuted, False
    for name in ("cbsr_spmm", "sspmm"):
        for width, kept in sorted(draw.sample(KEPT, 3)):
            yield name, width, 1, False, False, kept
    for width in sorted(draw.sample(WIDTHS, 3)):
        yield "sampled_spmm", width, 1, False, False, draw.choice(SAMPLES)


def dense_cases(kind: str) -> Iterator[Primitive]:
    """Yield the dense calls to time."""
    draw = random.Random(0)
    for name in ("gemm", "gemm_tn", "scale_rows", "elementwise", "maxk"):
        product = name.startswith("gemm")
        left = DENSE_PER_DEVICE[kind] if product else DENSE_PER_DEVICE[kind] // 2
        while left:
            nodes = int(10 ** draw.uniform(3, 6.5 if kind == "cuda" else 5.7))
            wide, narrow = draw.choice(WIDTHS), draw.choice(WIDTHS)
            if name == "maxk":
                wide, narrow = draw.choice(KEPT)
            work = nodes * wide * (narrow if product else 1)
            if work > MOST_WORK[kind] or nodes * max(wide, narrow) > MOST_ELEMENTS[kind]:
                continue
            left -= 1
            if name == "gemm":
                yield Primitive(name, nodes, wide, narrow)
            elif name == "gemm_tn":
                yield Primitive(name, wide, nodes, narrow)
            elif name == "maxk":
                yield Primitive(name, nodes, narrow, wide)
            else:
                yield Primitive(name, nodes, 0, wide)
