"""A prediction of epochs on more GPUs than were measured: what the traffic of halos costs.

    python -m benchmarks.distributed.model

It is a model, not a measurement. What one GPU takes is that of distributed.csv on an H200, and for
papers100M-size that of products-near for each edge. An epoch on P ranks is that of one rank divided
by P, with `IMBALANCE` more for the largest part, and for every exchange 2 h F b bytes (there and
back) over the link of a GPU, and `PASSES` over own and halo rows in its memory. The
background edges of a graph lead to random nodes, so that the halo h of a rank is the number of
distinct ones among them. Where they lead to near communities, a rank has those that its two
boundaries sever instead: as many as were counted for products-near, assumed for papers100M-size.
"""

import math
from typing import NamedTuple

IMBALANCE = 1.02
PASSES = 4  # own and halo rows are put together, and their gradients taken apart
MEMORY = 4e12  # bytes a second
LATENCY = 50e-6  # seconds of a small collective, measured on four GPUs of one host
BYTES = 4


class Workload(NamedTuple):
    """A graph, a model on it, and what one GPU takes for an epoch."""

    name: str
    nodes: float
    edges: float
    background: float  # share of edges that lead to random nodes
    severed: float  # edges of a rank that lead across its boundaries
    widths: tuple[int, ...]  # columns of each exchange that goes both ways
    alone: float  # seconds of an epoch on one GPU


class Machine(NamedTuple):
    """GPUs and the link of each to the others."""

    name: str
    ranks: int
    bytes_a_second: float


WORKLOADS = (
    Workload("reddit-like GCN", 233e3, 115e6, 0.3, 0.0, (256, 256, 40), 62.6e-3),
    Workload("products-like GCN", 2.45e6, 124e6, 0.2, 0.0, (256, 256, 40), 0.1056),
    Workload("products-near GCN", 2.45e6, 124e6, 0.0, 56e3, (256, 256, 40), 0.109),
    Workload("papers100M-size, near", 111e6, 3.2e9, 0.0, 1.5e6, (256, 256, 172), 2.8),
)
MACHINES = (
    Machine("2 GPUs, NVLink", 2, 290e9),
    Machine("4 GPUs, NVLink", 4, 290e9),
    Machine("8 GPUs, NVLink", 8, 290e9),
    Machine("100 hosts of 8 GPUs, 400 Gb/s each", 800, 40e9),
)


def halo(work: Workload, ranks: int) -> float:
    """Distinct nodes of other ranks that a rank's edges read."""
    others = work.nodes * (1 - 1 / ranks)
    remote = work.background * (1 - 1 / ranks) * work.edges / ranks + work.severed
    return others * (1 - math.exp(-remote / others))


def epoch(work: Workload, machine: Machine) -> float:
    """Seconds of an epoch."""
    remote, row = halo(work, machine.ranks), sum(work.widths) * BYTES
    moved = 2 * remote * row / machine.bytes_a_second
    copied = PASSES * (work.nodes / machine.ranks + remote) * row / MEMORY
    calls = 2 * len(work.widths) + 2
    return work.alone / machine.ranks * IMBALANCE + moved + copied + calls * LATENCY


def main() -> None:
    print("| workload | one GPU, ms |", " | ".join(m.name for m in MACHINES), "|")
    print("|---|--:|" + "--:|" * len(MACHINES))
    for work in WORKLOADS:
        cells = []
        for machine in MACHINES:
            took = epoch(work, machine)
            efficiency = work.alone / took / machine.ranks
            cells.append(f"{1e3 * took:.3g} ms, {100 * efficiency:.0f}%")
        print(f"| {work.name} | {1e3 * work.alone:.0f} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
