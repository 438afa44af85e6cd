"""Networks on every edge and readouts: time beside stock PyG, and peak memory.

    python -m benchmarks.edge_networks [--quick] [--cases EdgeConv NNConv]

Stock and patched calls alternate in one process, which gives the ratio of their medians; each
variant's peak memory is that of a process of its own, above what holds the model and its input.
Results must agree before anything is timed. Rows that a size limit leaves to PyG are rows too.
"""

import argparse
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

import pyg_accel
from benchmarks import fresh, machine, results

NAME = "edge_networks"
_nn: Any = torch_geometric.nn
Step = Callable[[], Tensor]


class Size(NamedTuple):
    """Nodes (rows of a readout) and edges (groups)."""

    nodes: int
    edges: int


def mlp(*sizes: int) -> torch.nn.Module:
    first, hidden, last = sizes
    return torch.nn.Sequential(
        torch.nn.Linear(first, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, last)
    )


# Of arxiv's size, in and out degrees as skewed; and of the numbers that the cases are known by.
CASES: dict[str, Size] = {
    "EdgeConv": Size(169_000, 2_300_000),
    "EdgeConv, half": Size(84_500, 1_150_000),
    "PointNetConv": Size(50_000, 800_000),
    "NNConv": Size(20_000, 200_000),
    "NNConv molecules": Size(100_000, 200_000),
    "global_mean_pool": Size(1_000_000, 40_000),
    "global_max_pool": Size(1_000_000, 40_000),
}


def skewed(nodes: int, edges: int) -> Tensor:
    weights = torch.arange(1, nodes + 1).float() ** -0.5
    ends = [torch.multinomial(weights, edges, replacement=True) for _ in range(2)]
    return torch.stack([torch.randperm(nodes)[ids] for ids in ends])


def make(case: str, size: Size) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return a model and what it is called with; the first tensor has a gradient."""
    torch.manual_seed(0)
    nodes, edges = size
    if case.startswith("global"):
        batch = torch.randint(0, edges, (nodes,)).sort()[0]
        return Readout(getattr(_nn, case)), (torch.randn(nodes, 64, requires_grad=True), batch)
    even = torch.randint(0, nodes, (2, edges))
    if case.startswith("EdgeConv"):
        x = torch.randn(nodes, 64, requires_grad=True)
        return _nn.EdgeConv(mlp(128, 64, 64)), (x, skewed(nodes, edges))
    if case == "PointNetConv":
        x, pos = torch.randn(nodes, 64, requires_grad=True), torch.randn(nodes, 3)
        return _nn.PointNetConv(mlp(67, 64, 64), add_self_loops=False), (x, pos, even)
    x, e = torch.randn(nodes, 16, requires_grad=True), torch.randn(edges, 8)
    return _nn.NNConv(16, 32, mlp(8, 32, 512)), (x, even, e)


class Readout(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return self.function(x, batch)


def step_of(model: torch.nn.Module, args: tuple[Any, ...], *, train: bool) -> Step:
    def run() -> Tensor:
        with torch.set_grad_enabled(train):
            out: Tensor = model(*args)
        if train:
            model.zero_grad()
            args[0].grad = None
            out.sum().backward()
        return out

    return run


def switched(run: Step) -> Step:
    """The same call with ``patch()`` on; the patch that keeps graphs is made outside of it."""

    def patched() -> Tensor:
        with pyg_accel.patched():
            return run()

    return patched


def memory(case: str, size: Size, variant: str, *, train: bool) -> float:
    """The peak of two steps in MiB."""
    model, args = make(case, size)
    run = step_of(model, args, train=train)
    handle = pyg_accel.patch() if variant == "patched" else None
    with fresh.PeakMemory() as peak:
        run()
        run()
    if handle is not None:
        handle.remove()
    return peak.mib


def rows_of(case: str, size: Size, *, train: bool) -> list[dict[str, Any]]:
    model, args = make(case, size)
    run = step_of(model, args, train=train)
    ours = copy.deepcopy(model)
    # Graphs are forgotten with the last patch: this one, of a layer that nobody calls, is it.
    with pyg_accel.patched(_nn.SAGEConv(1, 1)):
        steps = {"stock": run, "patched": switched(step_of(ours, args, train=train))}
        torch.testing.assert_close(steps["patched"](), steps["stock"](), rtol=1e-3, atol=1e-3)
        pyg_accel.reset_report()
        times = machine.side_by_side(steps, rounds=3, min_time=0.0, budget=1.0)
        with open(os.devnull, "w") as nowhere:
            report = pyg_accel.report(nowhere).rows
    found = "; ".join(dict.fromkeys(row.formula or row.reason for row in report))
    peaks = {name: fresh.in_fresh_process(memory, case, size, name, train=train) for name in steps}
    return [
        {"model": case, "nodes": size.nodes, "edges": size.edges,
         "pass": "training" if train else "inference", "variant": name,
         "ms": time.median, "time_ratio": times["stock"].median / time.median,
         "peak_mib": peaks[name], "memory_ratio": peaks["stock"] / max(peaks[name], 1.0),
         "formula": found if name == "patched" else ""}
        for name, time in times.items()
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the sizes")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--passes", nargs="*", default=["training", "inference"])
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    facts = machine.facts()
    for case in given.cases:
        size = CASES[case]
        if given.quick:
            size = Size(size.nodes // 20, size.edges // 20)
        for name in given.passes:
            rows += [row | facts for row in rows_of(case, size, train=name == "training")]
            print({k: v for k, v in rows[-1].items() if k not in facts}, flush=True)
    results.write(rows, NAME, quick=given.quick)


if __name__ == "__main__":
    main()
