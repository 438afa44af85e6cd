"""RGCNConv, and HeteroConv of SAGEConv or GATConv, over many relations: a training step.

    python -m benchmarks.relations [--device cpu] [--quick] [--out FOLDER]

Forward and backward of one layer, 64 features in and out; relations are drawn with a long tail.
HeteroConv has them as edge types of one type of nodes.
Stock and patched; outputs are compared with PyG's before anything is timed.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GATConv, HeteroConv, RGCNConv, SAGEConv

import pyg_accel
from benchmarks import gpu_machine, graphs, machine

NAME = "relations"
WIDTH = 64
CASES = [("arxiv-like", 10), ("arxiv-like", 100), ("amazon0505-like", 100)]
QUICK = [("arxiv-like@0.1", 100)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small graph")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = gpu_machine.facts_of(options.device)
    rows = []
    for graph, relations in QUICK if options.quick else CASES:
        rows += [{**row, **facts} for row in measure(graph, relations, options.device)]
    frame = pd.DataFrame(rows)
    suffix = "_quick" if options.quick else ""
    path = options.out / f"{NAME}_{options.device}{suffix}.csv"
    frame.to_csv(path, index=False, float_format="%.5g")
    print(frame.drop(columns=list(facts)).round(3).to_string(index=False))


def measure(name: str, relations: int, device: str) -> list[dict[str, Any]]:
    rowptr, col = graphs.load(name, device=device)
    nodes = rowptr.numel() - 1
    edge_index = graphs.edge_list((rowptr, col))
    edge_type = (relations * torch.rand(col.numel(), device=device) ** 2).long()
    x = torch.randn(nodes, WIDTH, device=device)
    edges = {("node", f"to{r}", "node"): edge_index[:, edge_type == r] for r in range(relations)}
    torch.manual_seed(0)
    layers: dict[str, tuple[Module, Callable[[Module], Tensor]]] = {
        "RGCNConv": (RGCNConv(WIDTH, WIDTH, relations), lambda m: m(x, edge_index, edge_type)),
        "HeteroConv": (HeteroConv({key: SAGEConv(WIDTH, WIDTH) for key in edges}),
                       lambda m: m({"node": x}, edges)["node"]),
        "HeteroConv, GAT": (HeteroConv({key: attention() for key in edges}),
                            lambda m: m({"node": x}, edges)["node"]),
    }  # fmt: skip
    rows = []
    for kind, (layer, call) in layers.items():
        layer.to(device)
        expected = call(layer).detach()
        for backend in ("stock", "patched"):
            with pyg_accel.patched() if backend == "patched" else nullcontext():
                error = float((call(layer).detach() - expected).abs().max() / expected.abs().max())
                if error > 1e-3:
                    raise SystemExit(f"{kind}, {backend} on {name}: outputs differ by {error:.3g}")

                def step(layer: Module = layer, call: Callable[[Module], Tensor] = call) -> None:
                    layer.zero_grad()
                    call(layer).square().mean().backward()

                rows.append({"graph": name, "layer": kind, "relations": relations,
                             "backend": backend, "step_ms": median(step, device),
                             "error": error})  # fmt: skip
    return rows


def attention() -> GATConv:
    return GATConv(WIDTH, WIDTH // 4, heads=4, add_self_loops=False)


def median(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        return gpu_machine.timed(step, budget=0.5).median
    return machine.timed(step, repeats=3).median


if __name__ == "__main__":
    main()
