"""From which size on does patch() pay? Measures it and writes the file that patch() reads.

python -m benchmarks.sizes.thresholds [--device cuda]

Layers of every kind run stock and accelerated, in turns, over a grid of edges and features: without
gradients, and forward and backward; with the same graph again and again, and with a new edge_index
each. A limit is the number of edges, or of edges times features (`elements`), from which on no
layer of its kind was slower; `min_edges` of a CPU the least from which on some layer gained. On a
GPU, where all that small graphs lose is the time of Python, `min_edges` is the limit of all kinds,
taken at 128 features and a graph that is used again; what a new graph each step costs whole models
is in `epochs/batches.py`. All points go to results/thresholds.csv (thresholds_cuda.csv).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

import pyg_accel
from benchmarks.tools import results, timing
from pyg_accel.patching.thresholds import KINDS, SHIPPED
from pyg_accel.tuning.cases import DEGREE, in_patch, layers, step
from pyg_accel.tuning.limits import SIZES, SLACK, never_by_size, not_measured

FEATURES = (8, 32, 128)


def measure(device: str) -> Iterator[dict[str, Any]]:
    """One row per layer, size and kind of graph."""
    grid = product((False, True), (False, True), SIZES[device], FEATURES)
    for fresh, train, edges, features in results.each(grid):
        torch.manual_seed(0)
        nodes = max(edges // DEGREE, 2)
        edge_index = torch.randint(nodes, (2, edges), device=device)
        for name, (kind, layer) in layers(features).items():
            x = torch.randn(nodes, features, device=device, requires_grad=True)
            run = step(kind, layer.to(device), x, edge_index, fresh=fresh, train=train)
            times = timing.side_by_side({"stock": run, "patched": in_patch(run)}, rounds=7)
            stock, ours = times["stock"].median, times["patched"].median
            yield {"layer": name, "kind": kind, "edges": edges, "features": features,
                   "new_graph": fresh, "training": train, "stock_ms": stock, "patched_ms": ours,
                   "ratio": ours / stock}  # fmt: skip


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
    options = results.parser(__doc__, devices=tuple(SIZES)).parse_args(arguments)
    device = options.device
    rows = results.Rows(f"sizes/thresholds{'_cuda' if device == 'cuda' else ''}", options, device)
    with never_by_size(device), pyg_accel.patched():
        rows.add(measure(device))
    rows.done()
    if options.quick:
        return
    found = {
        **not_measured(device),
        **found_on(device, rows.rows),
        "measured_with": f"python -m benchmarks.sizes.thresholds --device {device}",
        "machine": rows.facts,
    }
    devices = json.loads(SHIPPED.read_text()) | {device: found}
    SHIPPED.write_text(json.dumps(devices, indent=2) + "\n")
    print(json.dumps(devices, indent=2))


if __name__ == "__main__":
    main()
