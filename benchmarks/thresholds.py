"""From which size on does patch() pay? Measures it and writes the file that patch() reads.

python -m benchmarks.thresholds

Layers of every family run forward and backward, stock and accelerated, in turns, over a grid of
edges and features; once with the same graph again and again, once with a new edge_index each time.
The threshold is the number of edges from which on no layer of the grid was slower. All points go to
results/thresholds.csv.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GraphConv, SAGEConv
from tqdm import tqdm

import pyg_accel
from benchmarks import machine, results
from pyg_accel.patching import thresholds
from pyg_accel.settings import settings

EDGES = (1_000, 3_000, 5_000, 7_000, 10_000, 20_000, 50_000, 200_000)
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
        out = layer(x, edges, torch.ones(edges.size(1))) if weighted else layer(x, edges)
        out.sum().backward()

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


def measure() -> list[dict[str, Any]]:
    """One row a layer, size and kind of graph."""
    rows: list[dict[str, Any]] = []
    grid = [(e, f, fresh) for fresh in (False, True) for e in EDGES for f in FEATURES]
    for edges, features, fresh in tqdm(grid, desc="thresholds"):
        torch.manual_seed(0)
        nodes = max(edges // DEGREE, 2)
        edge_index = torch.randint(nodes, (2, edges))
        for name, layer in layers(features).items():
            x = torch.randn(nodes, features, requires_grad=True)
            run = step(layer, x, edge_index, fresh)
            times = machine.side_by_side({"stock": run, "patched": in_patch(run)}, rounds=7)
            ratio = times["patched"].median / times["stock"].median
            rows.append({"layer": name, "edges": edges, "features": features, "new_graph": fresh,
                         "stock_ms": times["stock"].median, "patched_ms": times["patched"].median,
                         "ratio": ratio, **machine.facts()})  # fmt: skip
    return rows


def smallest_safe(rows: list[dict[str, Any]]) -> int:
    """The number of edges from which on nothing was slower."""
    slower = [row["edges"] for row in rows if row["ratio"] > SLACK]
    return min((edges for edges in EDGES if edges > max(slower, default=0)), default=2 * EDGES[-1])


def main() -> None:
    # Thresholds beyond every size: without `always` each call is PyG's own.
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"min_edges": 2**62}, file)
        file.flush()
        settings.thresholds = file.name
        with pyg_accel.patched():
            rows = measure()
    results.write(rows, "thresholds", quick=False)
    found = {
        "min_edges": smallest_safe(rows),
        "measured_with": "python -m benchmarks.thresholds",
        "machine": machine.facts(),
    }
    path = Path(thresholds.__file__).with_name("thresholds.json")
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
