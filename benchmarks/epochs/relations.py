"""RGCNConv, and HeteroConv of SAGEConv, over many relations: a training step.

    python -m benchmarks.epochs.relations [--device cpu] [--quick] [--out FOLDER]

Forward and backward of one layer, 64 features in and out; relations are drawn with a long tail.
HeteroConv has them as edge types of one type of nodes. Stock and patched; outputs are compared with
PyG's before anything is timed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import HeteroConv, RGCNConv, SAGEConv

from benchmarks.tools import graphs, results, timing
from benchmarks.tools.variants import must_agree, patched

NAME, WIDTH = "epochs/relations", 64
CASES = [("arxiv-like", 10), ("arxiv-like", 100), ("amazon0505-like", 100)]
QUICK = [("arxiv-like@0.1", 100)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__, devices=("cuda", "cpu")).parse_args(arguments)
    rows = results.Rows(f"{NAME}_{options.device}", options, options.device)
    for graph, relations in QUICK if options.quick else CASES:
        rows.add(measure(graph, relations, options.device), show=True, graph=graph,
                 relations=relations)  # fmt: skip
    rows.done()


def measure(name: str, relations: int, device: str) -> Iterator[dict[str, Any]]:
    rowptr, col = graphs.load(name, device=device)
    edge_index = graphs.edge_list((rowptr, col))
    edge_type = (relations * torch.rand(col.numel(), device=device) ** 2).long()
    x = torch.randn(rowptr.numel() - 1, WIDTH, device=device)
    edges = {("node", f"to{r}", "node"): edge_index[:, edge_type == r] for r in range(relations)}
    torch.manual_seed(0)

    layers = {
        "RGCNConv": (RGCNConv(WIDTH, WIDTH, relations), lambda m: m(x, edge_index, edge_type)),
        "HeteroConv": (
            HeteroConv({key: SAGEConv(WIDTH, WIDTH) for key in edges}),
            lambda m: m({"node": x}, edges)["node"],
        ),
    }
    for kind, (layer, call) in layers.items():
        layer.to(device)
        expected = call(layer).detach()
        for backend in ("stock", "patched"):
            with patched(backend == "patched"):
                what = f"{kind}, {backend} on {name}"
                error = must_agree([call(layer).detach()], [expected], 1e-3, what)

                def step(layer: Module = layer, call: Callable[[Module], Tensor] = call) -> None:
                    layer.zero_grad()
                    call(layer).square().mean().backward()

                took = timing.timed(step, device, repeats=3, budget=0.5)
            yield {"layer": kind, "backend": backend, "step_ms": took.median, "error": error}


if __name__ == "__main__":
    main()
