"""Training epochs with MaxK against ReLU on large graphs: stock PyG, `patched()`, MaxK layers.

    python -m benchmarks.maxk_epochs --device cuda [--graphs NAME ...] [--models SAGE ...] [--k 32]
    python -m benchmarks.maxk_epochs --device cpu --graphs cornell5

3 layers, 256 hidden, 40 classes, random features; an epoch is forward, backward and Adam. Two
shapes: `paper`, a linear map, three layers behind a nonlinearity, a linear map, which is what the
MaxK-GNN paper trains; and `PyG`, the stack of `torch_geometric.nn.models`, whose first layer
aggregates the input features themselves and stays dense. Both are converted by `to_maxk`. Stock PyG
gets torch's CSR matrix, which is faster than an edge_index and runs where that is out of memory;
GCN's self-loops make it slower there, as in PyG. `ReLU, no edges` is the limit of Amdahl's law.

Before anything is timed a MaxK layer is compared with PyG's on masked features, gradients included.
A graph, model and shape is timed whole; run again, it goes on with those that the CSV lacks.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GCN, GIN, GraphSAGE
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, graphs, machine, results
from benchmarks.datasets import load_cornell5
from benchmarks.maxk_models import build
from pyg_accel.layers import MaxK, MaxKSAGEConv

NAME = "maxk_epochs"
HIDDEN, LAYERS, CLASSES = 256, 3, 40
FEATURES = {"products-like": 100, "reddit-like": 602, "flickr-like": 500, "yelp-like": 300,
            "proteins-like": 8}  # fmt: skip
STACKS = {"SAGE": GraphSAGE, "GCN": GCN, "GIN": GIN}
ALLOWED = 1e-4  # of the largest element: fp32 sums in another order
CPU_ROUNDS = 5
KEY = ["graph", "model", "shape"]
BASES = ("ReLU, torch CSR", "ReLU, patched", "ReLU, no edges")
Steps = dict[str, Callable[[], Any]]
Times = Iterator[tuple[str, dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--graphs", nargs="+", default=["reddit-like"])
    parser.add_argument("--models", nargs="+", choices=STACKS, default=["SAGE"])
    parser.add_argument("--shapes", nargs="+", choices=("paper", "PyG"), default=["paper", "PyG"])
    parser.add_argument("--k", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--seconds", type=float, default=1.0, help="per case, on a GPU")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{NAME}_{options.device}.csv"
    rows: list[dict[str, Any]] = results.read(file).to_dict("records") if file.exists() else []
    done = {(*(row[key] for key in KEY), row["case"]) for row in rows}
    facts, loaded = gpu_machine.facts_of(options.device), ""
    plan = [
        key
        for key in itertools.product(options.graphs, options.models, options.shapes)
        if not {(*key, case) for case in (*BASES, *(f"MaxK {k}" for k in options.k))} <= done
    ]
    for key in (progress := tqdm(plan, unit="network")):
        progress.set_postfix_str(", ".join(key))
        graph, model, shape = key
        if graph != loaded:
            (edge_index, nodes), loaded = _edges(graph, options.device), graph
            check(edge_index, nodes, options.k[0])
        times = _times_cpu if options.device == "cpu" else partial(_times_cuda, options.seconds)
        found = measure(graph, edge_index, nodes, model, shape, options.k, times)
        rows = [row for row in rows if tuple(row[name] for name in KEY) != key]
        rows += [dict(zip(KEY, key, strict=True)) | row | facts for row in found]
        pd.DataFrame(rows).to_csv(file, index=False, float_format="%.5g")
    print(summary(pd.DataFrame(rows)).to_string(float_format="%.4g"))


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per graph, model, shape and case, with its speed-ups."""
    table = frame.set_index([*KEY, "case"])[["epoch_ms"]].copy()
    for case in BASES[:2]:
        base = frame[frame["case"] == case].set_index(KEY)["epoch_ms"]
        table[f"over {case}"] = base / table["epoch_ms"]
    return table


def check(edge_index: Tensor, nodes: int, k: int) -> None:
    """End the run if a MaxK layer is not PyG's on masked features."""
    torch.manual_seed(0)
    ours, stock = MaxKSAGEConv(HIDDEN, 8, k=k), SAGEConv(HIDDEN, 8)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(nodes, HIDDEN).to(edge_index.device).requires_grad_()
    truth, found = [], []
    with pyg_accel.patched():
        for conv, given, into in ((stock, MaxK(k)(x), truth), (ours, x, found)):
            out = conv.to(x.device)(given, edge_index)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            into += [out.detach(), grad]
    for ours_is, is_right in zip(found, truth, strict=True):
        error = float((ours_is - is_right).abs().max() / is_right.abs().max())
        if not error <= ALLOWED:
            raise SystemExit(
                f"MaxKSAGEConv differs from SAGEConv on masked features by {error:.3g}"
            )


def measure(
    graph: str, edge_index: Tensor, nodes: int, kind: str, shape: str, ks: Sequence[int],
    times: Callable[[Steps], Times],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a case."""
    device = edge_index.device
    x = torch.randn(nodes, FEATURES.get(graph.partition("@")[0], 128)).to(device)
    y = torch.randint(CLASSES, (nodes,)).to(device)
    steps: Steps = {}
    given = _matrix(edge_index, nodes), edge_index, edge_index[:, :0].contiguous()
    cases: dict[str, tuple[int | None, Any]] = {
        case: (None, edges) for case, edges in zip(BASES, given, strict=True)
    } | {f"MaxK {k}": (k, edge_index) for k in ks}
    for name, (k, edges) in cases.items():
        model = _model(kind, shape, x.size(1), k).to(device)
        if name != BASES[0]:
            pyg_accel.patch(model)  # this one alone, so that cases can take turns
        steps[name] = _step(model, x, y, edges)
    for name, took in times(steps):
        yield {"case": name, "k": cases[name][0], "N": nodes, "E": edge_index.size(1), **took}
    pyg_accel.unpatch()


def _model(kind: str, shape: str, inputs: int, k: int | None) -> Module:
    if shape == "paper":
        return build(k, kind, inputs, HIDDEN, LAYERS, CLASSES)
    torch.manual_seed(0)
    model = STACKS[kind](inputs, HIDDEN, LAYERS, CLASSES)
    return model if k is None else pyg_accel.to_maxk(model, k)


def _step(model: Module, x: Tensor, y: Tensor, given: Any) -> Callable[[], Any]:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x, given), y).backward()
        optimizer.step()

    return step


def _times_cuda(seconds: float, steps: Steps) -> Times:
    for name, step in steps.items():
        step()
        torch.cuda.empty_cache()
        peak = gpu_machine.peak_memory(step)
        took = gpu_machine.timed(step, budget=seconds)
        yield name, {"epoch_ms": took.median, "p20": took.p20, "p80": took.p80, "peak_mib": peak}


def _times_cpu(steps: Steps) -> Times:
    took: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(CPU_ROUNDS + 1):  # in turns, the first to warm up
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if done:
                took[name].append(time.perf_counter() - started)
    for name, seconds in took.items():
        found = machine.quantiles(seconds)
        yield name, {"epoch_ms": found.median, "p20": found.p20, "p80": found.p80}


def _edges(graph: str, device: str) -> tuple[Tensor, int]:
    """An edge_index in no order, and the number of nodes."""
    if graph != "cornell5":
        csr = graphs.load(graph, device=device)
        return graphs.edge_list(csr, shuffled=True), csr[0].numel() - 1
    edge_index, nodes = load_cornell5(os.environ.get("PYG_ACCEL_DATA", "."))
    order = torch.randperm(edge_index.size(1), device=edge_index.device)
    return edge_index[:, order].contiguous().to(device), nodes


def _matrix(edge_index: Tensor, nodes: int) -> Tensor:
    ones = torch.ones(edge_index.size(1), device=edge_index.device)
    adj = torch.sparse_coo_tensor(edge_index.flip(0), ones, (nodes, nodes))
    return adj.coalesce().to_sparse_csr()


if __name__ == "__main__":
    main()
