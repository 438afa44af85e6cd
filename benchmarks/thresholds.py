"""From which size on does patch() pay? Measures it and writes the file that patch() reads.

python -m benchmarks.thresholds [--device cuda]

Layers of every kind run stock and accelerated, in turns, over a grid of edges and features: without
gradients, and forward and backward; with the same graph again and again, and with a new edge_index
each. A limit is the number of edges, or of edges times features (`elements`), from which on no
layer of its kind was slower; `min_edges` of a CPU the least from which on some layer gained. On a
GPU, where all that small graphs lose is the time of Python, `min_edges` is the limit of all kinds,
taken at 128 features and a graph that is used again; what a new graph each step costs whole models
is in `gpu_batches.py`. All points go to results/thresholds.csv (thresholds_cuda.csv).
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, machine, results
from pyg_accel.patching.thresholds import KINDS, SHIPPED
from pyg_accel.tuning.cases import DEGREE, in_patch, layers, step
from pyg_accel.tuning.limits import SIZES, SLACK, never_by_size, not_measured

FEATURES = (8, 32, 128)


def measure(device: str) -> list[dict[str, Any]]:
    """One row per layer, size and kind of graph."""
    rows: list[dict[str, Any]] = []
    facts = gpu_machine.facts_of(device)
    grid = list(product((False, True), (False, True), SIZES[device], FEATURES))
    for fresh, train, edges, features in tqdm(grid, desc="thresholds"):
        torch.manual_seed(0)
        nodes = max(edges // DEGREE, 2)
        edge_index = torch.randint(nodes, (2, edges), device=device)
        for name, (kind, layer) in layers(features).items():
            x = torch.randn(nodes, features, device=device, requires_grad=True)
            run = step(kind, layer.to(device), x, edge_index, fresh=fresh, train=train)
            times = machine.side_by_side({"stock": run, "patched": in_patch(run)}, rounds=7)
            ratio = times["patched"].median / times["stock"].median
            rows.append({"layer": name, "kind": kind, "edges": edges, "features": features,
                         "new_graph": fresh, "training": train,
                         "stock_ms": times["stock"].median, "patched_ms": times["patched"].median,
                         "ratio": ratio, **facts})  # fmt: skip
    return rows


def limits(rows: list[dict[str, Any]], kind: str) -> dict[str, int]:
    """The limits of a kind of call, as :class:`~pyg_accel.patching.thresholds.Limits` has them."""
    mine = [row for row in rows if row["kind"] == kind]
    known = [row for row in mine if not row["new_graph"]]
    elements = [{**row, "edges": row["edges"] * row["features"]} for row in mine]
    return {
        "inference": smallest_safe([row for row in known if not row["training"]]),
        "training": smallest_safe([row for row in known if row["training"]]),
        "new": smallest_safe([row for row in mine if row["new_graph"]]),
        "elements": smallest_safe(elements),
    }


def found_on(device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the file says of a device."""
    if device == "cuda":
        rows = [row for row in rows if row["features"] == FEATURES[-1] and not row["new_graph"]]
        return {"min_edges": smallest_safe(rows)}
    gains = [row["edges"] for row in rows if row["ratio"] < 1 / SLACK]
    kinds = {kind: limits(rows, kind) for kind in KINDS}
    return {"min_edges": min(gains, default=2 * SIZES[device][-1]), "kinds": kinds}


def smallest_safe(rows: list[dict[str, Any]]) -> int:
    """The least of the values of "edges" from which on nothing was slower."""
    slower = [row["edges"] for row in rows if row["ratio"] > SLACK]
    sizes = sorted({row["edges"] for row in rows})
    return min((edges for edges in sizes if edges > max(slower, default=0)), default=2 * sizes[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=SIZES, default="cpu")
    device = parser.parse_args(arguments).device
    with never_by_size(device), pyg_accel.patched():
        rows = measure(device)
    results.write(rows, "thresholds" if device == "cpu" else "thresholds_cuda", quick=False)
    found = {
        **not_measured(device),
        **found_on(device, rows),
        "measured_with": f"python -m benchmarks.thresholds --device {device}",
        "machine": gpu_machine.facts_of(device),
    }
    devices = json.loads(SHIPPED.read_text()) | {device: found}
    SHIPPED.write_text(json.dumps(devices, indent=2) + "\n")
    print(json.dumps(devices, indent=2))


if __name__ == "__main__":
    main()
