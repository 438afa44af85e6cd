"""Training epochs with MaxK against ReLU: stock PyG, `patched()`, MaxK layers, without edges.

    python -m benchmarks.papers.maxk_gnn.epochs --device cuda [--graphs NAME ...] [--k 16 32 64]
    python -m benchmarks.papers.maxk_gnn.epochs --device cpu --graphs cornell5
    python -m benchmarks.papers.maxk_gnn.epochs --datasets community --hidden 64   # of `training`

3 layers, 256 hidden, 40 classes, random features; an epoch is forward, backward and Adam. Two
shapes: `paper`, a linear map, three layers behind a nonlinearity, a linear map, which is what the
MaxK-GNN paper trains; and `PyG`, the stack of `torch_geometric.nn.models`, whose first layer
aggregates the input features themselves and stays dense, converted by `to_maxk`. Stock PyG gets
torch's CSR matrix, which is faster than an edge_index and runs where that is out of memory;
GCN's self-loops make it slower there, as in PyG. `ReLU, no edges` is the limit of Amdahl's law.

Before anything is timed a MaxK layer is compared with PyG's on masked features, gradients included.
A graph, model and shape is timed whole; run again, it goes on with those that the CSV lacks.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

import pyg_accel
from benchmarks.papers.maxk_gnn import training
from benchmarks.tools import graphs, plot, results, timing
from benchmarks.tools.datasets import load_cornell5
from benchmarks.tools.variants import epoch_of, must_agree
from pyg_accel.layers import MaxK, MaxKSAGEConv

LAYERS, CLASSES = 3, 40
FEATURES = {"products-like": 100, "reddit-like": 602, "flickr-like": 500, "yelp-like": 300,
            "proteins-like": 8}  # fmt: skip
STACKS = {"SAGE": GraphSAGE, "GCN": GCN, "GIN": GIN}
KEY = ["graph", "model", "shape"]
BASES = ("ReLU, torch CSR", "ReLU, patched", "ReLU, no edges")
Steps = dict[str, Callable[[], Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), graphs=("reddit-like",), datasets=None, models=STACKS,
        shapes=("paper", "PyG"), k=(16, 32, 64), hidden=256, nodes=20_000, seconds=1.0,
    )  # fmt: skip
    options = parser.parse_args(arguments)
    device, loaded = options.device, ""
    if options.datasets:
        of_datasets(options)
        return
    names = ("rmat-2.7k",) if options.quick else options.graphs
    rows = results.Rows(f"papers/maxk_gnn/maxk_epochs_{device}", options, device, [*KEY, "case"])
    cases = (*BASES, *(f"MaxK {k}" for k in options.k))
    wanted = itertools.product(names, options.models, options.shapes, cases)
    for key in results.each(dict.fromkeys(case[:3] for case in rows.missing(wanted)), "network"):
        graph, model, shape = key
        if graph != loaded:
            (edge_index, nodes), loaded = edges_of(graph, device), graph
            check(edge_index, nodes, options.k[0], options.hidden)
        head = dict(zip(KEY, key, strict=True))
        rows.without(**head)
        x = torch.randn(nodes, FEATURES.get(graph.partition("@")[0], 128)).to(device)
        y = torch.randint(CLASSES, (nodes,)).to(device)

        def make(k: int, model: str = model, shape: str = shape, x: Tensor = x) -> Module:
            if shape == "paper":
                return training.build(k, model, x.size(1), options.hidden, CLASSES)
            torch.manual_seed(0)
            stack = STACKS[model](x.size(1), options.hidden, LAYERS, CLASSES)
            return pyg_accel.to_maxk(stack, k) if k else stack

        given = matrix(edge_index, nodes), edge_index, edge_index[:, :0].contiguous()
        edges = dict(zip(BASES, given, strict=True))
        found = measure(make, edges, x, y, None, options.k, options.seconds)
        rows.add(found, **head, N=nodes, E=edge_index.size(1))
    table = rows.done().pivot_table("epoch_ms", KEY, "case", sort=False)
    print(table.rdiv(table[BASES[1]], axis=0).round(2).to_string())
    plot.beside(rows.path)


def of_datasets(options: Any) -> None:
    """Epochs of the networks and data of `training`, beside stock PyG on the edge_index."""
    rows = results.Rows("papers/maxk_gnn/maxk_training_epochs", options, options.device,
                        hidden=options.hidden, layers=LAYERS)  # fmt: skip
    for name in options.datasets:
        data = training.load(name, options.device, nodes=options.nodes)
        none = data.edge_index[:, :0]
        edges = {"ReLU, stock": data.edge_index, BASES[1]: data.edge_index, BASES[2]: none}
        mask = data.train_mask.nonzero().squeeze(1)
        for kind in options.models:

            def make(k: int, data: Any = data, kind: str = kind) -> Module:
                return training.network(data, kind, k, hidden=options.hidden)

            rows.add(measure(make, edges, data.x, data.y, mask, options.k, options.seconds),
                     dataset=name, model=kind)  # fmt: skip
    rows.done()


def measure(
    make: Callable[[int], Module], edges: dict[str, Any], x: Tensor, y: Tensor,
    mask: Tensor | None, ks: Sequence[int], seconds: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a case; the first is stock PyG."""
    steps: Steps = {}
    stock, patched, _ = edges
    cases = {name: (0, given) for name, given in edges.items()}
    cases |= {f"MaxK {k}": (k, edges[patched]) for k in ks}
    for name, (k, given) in cases.items():
        model = make(k).to(x.device)
        if name != stock:
            pyg_accel.patch(model)  # this one alone, so that cases can take turns
        steps[name] = epoch_of(model, (x, given), y, mask)
    for name, took in times(steps, x.device.type, seconds):
        yield {"case": name, "k": cases[name][0] or None, **took}
    pyg_accel.unpatch()


def times(steps: Steps, device: str, seconds: float) -> Iterator[tuple[str, dict[str, float]]]:
    if device == "cpu":
        for name, took in timing.in_turns(steps, device, rounds=5).items():
            yield name, took.columns("epoch_ms")
        return
    for name, step in steps.items():
        step()
        torch.cuda.empty_cache()
        peak = timing.peak_memory(step)
        took = timing.timed(step, device, budget=seconds)
        yield name, took.columns("epoch_ms") | {"peak_mib": peak}


def check(edge_index: Tensor, nodes: int, k: int, hidden: int) -> None:
    """End the run if a MaxK layer is not PyG's on masked features."""
    torch.manual_seed(0)
    ours, stock = MaxKSAGEConv(hidden, 8, k=k), SAGEConv(hidden, 8)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(nodes, hidden).to(edge_index.device).requires_grad_()
    found = []
    with pyg_accel.patched():
        for conv, given in ((stock, MaxK(k)(x)), (ours, x)):
            out = conv.to(x.device)(given, edge_index)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            found.append([out.detach(), grad])
    must_agree(found[1], found[0], 1e-4, "MaxKSAGEConv and SAGEConv on masked features")


def edges_of(graph: str, device: str) -> tuple[Tensor, int]:
    """An edge_index in no order, and the number of nodes."""
    if graph != "cornell5":
        csr = graphs.load(graph, device=device)
        return graphs.edge_list(csr, shuffled=True), csr[0].numel() - 1
    edge_index, nodes = load_cornell5(os.environ.get("PYG_ACCEL_DATA", "."))
    return edge_index[:, torch.randperm(edge_index.size(1))].contiguous().to(device), nodes


def matrix(edge_index: Tensor, nodes: int) -> Tensor:
    ones = torch.ones(edge_index.size(1), device=edge_index.device)
    adj = torch.sparse_coo_tensor(edge_index.flip(0), ones, (nodes, nodes))
    return adj.coalesce().to_sparse_csr()


if __name__ == "__main__":
    main()
