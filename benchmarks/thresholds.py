"""From which size on does patch() pay? Measures it and writes the file that patch() reads.

python -m benchmarks.thresholds [--device cuda]

Layers of every family run forward and backward, stock and accelerated, in turns, over a grid of
edges and features; once with the same graph again and again, once with a new edge_index each.
The threshold is the number of edges from which on no layer of the grid was slower. On a GPU, where
all that small graphs lose is the time of Python, it is taken at 128 features and a graph that is
used again; what a new graph each step costs whole models is in `gpu_batches.py`. All points go to
results/thresholds.csv (thresholds_cuda.csv).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GraphConv, SAGEConv
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, machine, results
from pyg_accel.patching.thresholds import SHIPPED
from pyg_accel.settings import settings

EDGES = {
    "cpu": (1_000, 3_000, 5_000, 7_000, 10_000, 20_000, 50_000, 200_000),
    "cuda": (10_000, 50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000),
}
FEATURES = (8, 32, 128)
DEGREE = 8
SLACK = 1.05  # within the noise of one round


def layers(features: int) -> dict[str, torch.nn.Module]:
    """One layer a family: copy-reduce, weighted, maximum, attention."""
    return {
        "SAGEConv mean": SAGEConv(features, features),
        "GraphConv weighted": GraphConv(features, features),
        "SAGEConv max": SAGEConv(features, features, aggr="max"),
        "GATConv": GATConv(features, features // 4, heads=4),
    }


def step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor, fresh: bool) -> Callable[[], None]:
    """Forward and backward; with `fresh` on an edge_index that was never seen."""
    weighted = isinstance(layer, GraphConv)

    def run() -> None:
        edges = edge_index.clone() if fresh else edge_index
        out = layer(x, edges, x.new_ones(edges.size(1))) if weighted else layer(x, edges)
        out.sum().backward()
        if out.is_cuda:
            torch.cuda.synchronize()

    return run


def in_patch(run: Callable[[], None]) -> Callable[[], None]:
    """The same under patch(), whatever its size.

    patch() is on for the whole measurement, so the stock runs pass through its wrappers too: what
    is compared is the choice that the threshold makes.
    """

    def patched() -> None:
        settings.always = True
        run()
        settings.always = False

    return patched


def measure(device: str) -> list[dict[str, Any]]:
    """One row a layer, size and kind of graph."""
    rows: list[dict[str, Any]] = []
    facts = machine.facts() if device == "cpu" else gpu_machine.facts()
    grid = [(e, f, fresh) for fresh in (False, True) for e in EDGES[device] for f in FEATURES]
    for edges, features, fresh in tqdm(grid, desc="thresholds"):
        torch.manual_seed(0)
        nodes = max(edges // DEGREE, 2)
        edge_index = torch.randint(nodes, (2, edges), device=device)
        for name, layer in layers(features).items():
            x = torch.randn(nodes, features, device=device, requires_grad=True)
            run = step(layer.to(device), x, edge_index, fresh)
            times = machine.side_by_side({"stock": run, "patched": in_patch(run)}, rounds=7)
            ratio = times["patched"].median / times["stock"].median
            rows.append({"layer": name, "edges": edges, "features": features, "new_graph": fresh,
                         "stock_ms": times["stock"].median, "patched_ms": times["patched"].median,
                         "ratio": ratio, **facts})  # fmt: skip
    return rows


def smallest_safe(rows: list[dict[str, Any]], device: str) -> int:
    """The number of edges from which on nothing was slower."""
    if device == "cuda":
        rows = [row for row in rows if row["features"] == FEATURES[-1] and not row["new_graph"]]
    slower = [row["edges"] for row in rows if row["ratio"] > SLACK]
    sizes = sorted({row["edges"] for row in rows})
    return min((edges for edges in sizes if edges > max(slower, default=0)), default=2 * sizes[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=EDGES, default="cpu")
    device = parser.parse_args(arguments).device
    # Thresholds beyond every size: without `always` each call is PyG's own.
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({device: {"min_edges": 2**62}}, file)
        file.flush()
        settings.thresholds = file.name
        with pyg_accel.patched():
            rows = measure(device)
    results.write(rows, "thresholds" if device == "cpu" else "thresholds_cuda", quick=False)
    found = {
        "min_edges": smallest_safe(rows, device),
        "measured_with": f"python -m benchmarks.thresholds --device {device}",
        "machine": machine.facts() if device == "cpu" else gpu_machine.facts(),
    }
    devices = json.loads(SHIPPED.read_text()) | {device: found}
    SHIPPED.write_text(json.dumps(devices, indent=2) + "\n")
    print(json.dumps(devices, indent=2))


if __name__ == "__main__":
    main()
