"""From which size on does patch() pay? Measures it and writes the file that patch() reads.

python -m benchmarks.thresholds [--device cuda]

Layers of every kind run stock and accelerated, in turns, over a grid of edges and features: without
gradients, and forward and backward; with the same graph again and again, and with a new edge_index
each. A limit is the number of edges from which on no layer of its kind was slower; `min_edges` of a
CPU the least from which on some layer gained. On a GPU, where all that small graphs lose is the
time of Python, `min_edges` is the limit of all kinds, taken at 128 features and a graph that is
used again; what a new graph each step costs whole models is in `gpu_batches.py`. All points go to
results/thresholds.csv (thresholds_cuda.csv).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import (
    FiLMConv,
    GATConv,
    GATv2Conv,
    GENConv,
    GINEConv,
    GraphConv,
    ResGatedGraphConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
)
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, machine, results
from pyg_accel.patching.thresholds import KINDS, SHIPPED
from pyg_accel.settings import settings

EDGES = {
    "cpu": (5_000, 10_000, 20_000, 40_000, 80_000, 200_000, 400_000, 800_000),
    "cuda": (10_000, 50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000),
}
FEATURES = (8, 32, 128)
DEGREE, RELATIONS, EDGE_FEATURES = 8, 4, 16
SLACK = 1.05  # within the noise of one round


def layers(features: int) -> dict[str, tuple[str, torch.nn.Module]]:
    """Layers of every kind."""
    f, heads = features, {"heads": 4, "out_channels": features // 4}
    with_edges = {"edge_dim": EDGE_FEATURES}
    return {
        "SAGEConv mean": ("sums", SAGEConv(f, f)),
        "GraphConv weighted": ("sums", GraphConv(f, f)),
        "SAGEConv max": ("sums", SAGEConv(f, f, aggr="max")),
        "FiLMConv": ("messages", FiLMConv(f, f)),
        "ResGatedGraphConv": ("messages", ResGatedGraphConv(f, f)),
        "GATConv": ("attention", GATConv(f, **heads)),
        "GATv2Conv": ("attention", GATv2Conv(f, **heads)),
        "GINEConv": ("edge features", GINEConv(torch.nn.Linear(f, f), **with_edges)),
        "TransformerConv edge_dim": ("edge features", TransformerConv(f, **heads, **with_edges)),
        "GENConv": ("edge features", GENConv(f, f, **with_edges)),
        "RGCNConv": ("relations", RGCNConv(f, f, RELATIONS)),
    }


def step(
    kind: str, layer: torch.nn.Module, x: Tensor, edge_index: Tensor, *, fresh: bool, train: bool
) -> Callable[[], None]:
    """Forward, and backward to train; with `fresh` on an edge_index that was never seen."""
    edges = edge_index.size(1)
    rest: list[Tensor] = []
    if isinstance(layer, GraphConv):
        rest = [x.new_ones(edges)]
    elif kind == "edge features":
        rest = [torch.randn(edges, EDGE_FEATURES, device=x.device)]
    elif kind == "relations":
        rest = [torch.randint(RELATIONS, (edges,), device=x.device)]

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = layer(x, edge_index.clone() if fresh else edge_index, *rest)
        if train:
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
    grid = list(product((False, True), (False, True), EDGES[device], FEATURES))
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
    return {
        "inference": smallest_safe([row for row in known if not row["training"]]),
        "training": smallest_safe([row for row in known if row["training"]]),
        "new": smallest_safe([row for row in mine if row["new_graph"]]),
    }


def found_on(device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the file says of a device."""
    if device == "cuda":
        rows = [row for row in rows if row["features"] == FEATURES[-1] and not row["new_graph"]]
        return {"min_edges": smallest_safe(rows)}
    gains = [row["edges"] for row in rows if row["ratio"] < 1 / SLACK]
    kinds = {kind: limits(rows, kind) for kind in KINDS}
    return {"min_edges": min(gains, default=2 * EDGES[device][-1]), "kinds": kinds}


def smallest_safe(rows: list[dict[str, Any]]) -> int:
    """The number of edges from which on nothing was slower."""
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
    devices = json.loads(SHIPPED.read_text())
    kept = {name: devices[device][name] for name in ("compiled",) if name in devices[device]}
    found = {
        **kept,  # measured by hand: compilers take minutes a case
        **found_on(device, rows),
        "measured_with": f"python -m benchmarks.thresholds --device {device}",
        "machine": machine.facts() if device == "cpu" else gpu_machine.facts(),
    }
    devices |= {device: found}
    SHIPPED.write_text(json.dumps(devices, indent=2) + "\n")
    print(json.dumps(devices, indent=2))


if __name__ == "__main__":
    main()
