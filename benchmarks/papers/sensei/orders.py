"""The cheapest order of products against the others, graph by graph and size by size.

    python -m benchmarks.papers.sensei.orders [--device cuda] [--quick] [--models ...] [--minutes 5]

One layer, as in the paper (SENSEi, section 6), forward or forward and backward, with our kernels
under every order: what is compared is the choice alone. In training the features have gradients,
as those of a hidden layer do. Each tree's output is checked against that of PyG's order first.
A row of results/association_DEVICE.csv is one tree: its first call, which computes what a graph
needs once, its median call, and whether it is PyG's order, a family's, or what `optimize()` chose.
`overhead_ms` is what choosing took, the median of three: reading the layer, features of the graph,
predictions; the trees of layers that compute the same are enumerated once in a process. Figures
for 100 iterations are made of these; `laps` says how many were measured. What runs out of memory
is left empty, as in the paper. With OMP_NUM_THREADS=1 the clock is that of the processor.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv, SGConv, TAGConv

from benchmarks.papers.sensei.gaan import DotAttention
from benchmarks.tools import graphs, plot, results
from benchmarks.tools.timing import seconds_of
from benchmarks.tools.variants import must_agree
from pyg_accel.graph import Graph, derived
from pyg_accel.rewrite.cost import cost_model
from pyg_accel.rewrite.optimized import OptimizedModel, rewritten_layers
from pyg_accel.rewrite.select import Options, make_decision

ALLOWED = 2e-3  # of the largest output: fp32 sums in another order
HELD_OUT = ("rmat-held-12k", "rmat-held-90k", "rmat-held-1m")
GRAPHS_OF = {
    "cpu": ("mycielskian13", "rmat-held-12k", "roads-like@0.05", "molecules-like@0.1",
            "arxiv-like@0.3", "reddit-like@0.01", "products-like@0.01"),
    "cuda": ("arxiv-like", "roads-like", "molecules-like", *HELD_OUT, "mycielskian17",
             "reddit-like", "products-like"),
}  # fmt: skip
GROWING = ((32, 256), (32, 1024), (64, 512), (256, 1024), (1024, 2048))
SIZES = {
    "GCN": ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32), (32, 1024), (512, 1024),
            (1024, 2048)),
    "GAT": GROWING,
    "SGC": ((32, 32), (32, 256), (256, 32), (1024, 256)),
    "TAGCN": ((32, 32), (32, 256), (256, 32), (1024, 256)),
    "GATv2": ((32, 256), (256, 1024)),
    "GaAN": ((32, 256), (256, 1024)),
    "GraphSAGE": ((32, 256), (256, 32), (602, 256), (1024, 32)),
}  # fmt: skip
CASE = ["graph", "model", "in", "out", "mode"]
CPU_WIDEST = 1024  # of a size: two cores take minutes for what is wider


@dataclass(frozen=True)
class Model:
    """A layer and the orders that it is known by; each is a tree for sizes (in, out).

    `default` is what PyG does; the first of the two families is what DGL does, where it has the
    layer, with products ordered by size; the second is the paper's alternative.
    """

    make: Callable[[int, int], Module]
    default: Callable[[int, int], str]
    families: dict[str, Callable[[int, int], str]]


def _by_size(aggregate_first: str, project_first: str) -> Callable[[int, int], str]:
    return lambda n_in, n_out: project_first if n_in > n_out else aggregate_first


def _always(tree: str) -> Callable[[int, int], str]:
    return lambda n_in, n_out: tree


_N = "(D·A·D)"
_S = "softmax(A, (X·W))"
_K = "softmax(A, ((X·W0) + (eN·w)), ((X·W1) + (eN·w1)))"
_T = "softmax(A, ((X·V) + (eN·w1)), ((X·W) + (eN·w)))"
MODELS = {
    "GCN": Model(
        GCNConv,
        _always(f"(({_N}·(X·W)) + b)"),
        {
            "dynamic": _by_size("(((D·(A·(D·X)))·W) + b)", "((D·(A·(D·(X·W)))) + b)"),
            "precompute": _by_size(f"((({_N}·X)·W) + b)", f"(({_N}·(X·W)) + b)"),
        },
    ),
    "GAT": Model(
        GATConv,
        _always(f"(concat(({_S}·(X·W))) + b)"),
        {
            "reuse": _always(f"(concat(({_S}·(X·W))) + b)"),
            "recompute": _always(f"(concat((({_S}·X)·W)) + b)"),
        },
    ),
    "SGC": Model(
        lambda n_in, n_out: SGConv(n_in, n_out, K=2),
        _always(f"((({_N}·({_N}·X))·W) + b)"),
        {
            "dynamic": _by_size("(((D·(A·(D²·(A·(D·X)))))·W) + b)",
                                "((D·(A·(D²·(A·(D·(X·W)))))) + b)"),
            "precompute": _by_size(f"((({_N}·({_N}·X))·W) + b)", f"(({_N}·({_N}·(X·W))) + b)"),
        },
    ),
    "TAGCN": Model(
        lambda n_in, n_out: TAGConv(n_in, n_out, K=2),
        _always(f"((X·W0) + (({_N}·X)·W1) + (({_N}·({_N}·X))·W2) + b)"),
        {
            "dynamic": _by_size(
                "((X·W0) + ((D·(A·(D·X)))·W1) + ((D·(A·(D²·(A·(D·X)))))·W2) + b)",
                "((X·W0) + (D·(A·(D·((X·W1) + (D·(A·(D·(X·W2)))))))) + b)",
            ),
            "precompute": _by_size(
                f"((X·W0) + (({_N}·X)·W1) + (({_N}·({_N}·X))·W2) + b)",
                f"((X·W0) + ({_N}·((X·W1) + ({_N}·(X·W2)))) + b)",
            ),
        },
    ),
    "GATv2": Model(
        GATv2Conv,
        _always(f"(concat(({_T}·((X·W) + (eN·w)))) + b)"),
        {
            "reuse": _always(f"(concat(({_T}·((X·W) + (eN·w)))) + b)"),
            "recompute": _always(f"(concat(((({_T}·X)·W) + (({_T}·eN)·w))) + b)"),
        },
    ),
    "GaAN": Model(  # its attention: gates come behind, whatever the order
        DotAttention,
        _always(f"concat(({_K}·(X·W2)))"),
        {
            "reuse": _always(f"concat(({_K}·(X·W2)))"),
            "recompute": _always(f"concat((({_K}·X)·W2))"),
        },
    ),
    "GraphSAGE": Model(
        SAGEConv,
        _always("((mean(A·X)·W) + (X·V) + b)"),
        {
            "aggregate": _always("((mean(A·X)·W) + (X·V) + b)"),
            "project": _always("(mean(A·(X·W)) + (X·V) + b)"),
        },
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=tuple(GRAPHS_OF), quick="two small graphs, few sizes",
                            graphs=None, models=MODELS, minutes=60.0)  # fmt: skip
    options = parser.parse_args(arguments)
    device = options.device
    names = options.graphs or (("arxiv-like@0.05", "rmat-held-12k") if options.quick
                               else GRAPHS_OF[device])  # fmt: skip
    rows = results.Rows(f"papers/sensei/association_{device}", options, device, CASE)
    deadline = time.monotonic() + 60 * options.minutes
    for name in results.each(names, "graph"):
        todo = rows.missing(
            (name, model, *sizes, mode) for model in options.models
            for sizes in SIZES[model][: 2 if options.quick else None]
            for mode in ("inference", "training")
            if device == "cuda" or max(sizes) <= CPU_WIDEST
        )  # fmt: skip
        edge_index, nodes = load(name, device) if todo else (torch.empty(0), 0)
        for case in todo:
            if time.monotonic() > deadline:
                print(f"out of time before {case}; run again to go on")
                break
            _, model, n_in, n_out, mode = case
            head = dict(zip(CASE, case, strict=True)) | {"N": nodes, "E": edge_index.size(1)}
            found = measure(model, n_in, n_out, mode == "training", edge_index, nodes)
            rows.add(found, **head)
    rows.done()
    if not (options.quick or options.out):
        plot.orders()


def load(name: str, device: str) -> tuple[Tensor, int]:
    """The edge list [2, E] of a graph, sorted by target, and its number of nodes."""
    csr = graphs.load(name, device=device)
    return graphs.edge_list(csr), csr[0].numel() - 1


def measure(
    name: str, n_in: int, n_out: int, train: bool, edge_index: Tensor, nodes: int, *,
    also: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a tree; of `also` even what nothing would choose."""
    model, device = MODELS[name], edge_index.device.type
    torch.manual_seed(0)
    conv = model.make(n_in, n_out).to(device)
    try:
        x = torch.randn(nodes, n_in, device=device, requires_grad=train)
        seed = torch.randn(nodes, n_out, device=device) if train else None
    except torch.OutOfMemoryError:
        return
    overhead, chosen, predicted = decide(conv, (x, edge_index), train)
    families = {tree(n_in, n_out): family for family, tree in model.families.items()}
    default = model.default(n_in, n_out)
    trees = dict.fromkeys([default, *families, *predicted, chosen, *also])
    runs: dict[str, Callable[[], Tensor]] = {}
    rows: dict[str, dict[str, Any]] = {}
    truth: Tensor | None = None
    for tree in trees:
        layer = OptimizedModel(conv, Options(train=train, choose=tree))
        run = step(layer, x, edge_index, seed)
        rows[tree] = {
            "tree": tree, "default": tree == default, "chosen": tree == chosen,
            "family": families.get(tree, ""), "first_ms": float("nan"), "ms": float("nan"),
            "laps": 0, "predicted_ms": predicted.get(tree, float("nan")), "overhead_ms": overhead,
            "source": cost_model(device).source,
        }  # fmt: skip
        try:
            out = run()  # graphs, kernels
            truth = out if truth is None else truth
            error = must_agree([out], [truth], ALLOWED, f"{tree} on {nodes} nodes")
            del out
            layer = OptimizedModel(conv, Options(train=train, choose=tree))
            layer(x, edge_index)  # records; what is computed once a graph is the next call's
            run = step(layer, x, edge_index, seed)
            rows[tree] |= {"error": error, "first_ms": lap(run, device)}
            runs[tree] = run
        except torch.OutOfMemoryError:
            rows[tree]["note"] = "out of memory"
            torch.cuda.empty_cache()
    del truth
    for tree, (milliseconds, laps) in laps_of(runs, device).items():
        rows[tree] |= {"ms": milliseconds, "laps": laps}
    yield from rows.values()
    del runs
    if device == "cuda":
        torch.cuda.empty_cache()


def decide(
    conv: Module, inputs: tuple[Tensor, Tensor], train: bool
) -> tuple[float, str, dict[str, float]]:
    """Milliseconds that choosing takes for a graph never seen, the tree, and all predictions."""
    layer, laps = OptimizedModel(conv, Options(train=train)), []
    layer(*inputs)  # loads the models, builds the graph and its transpose
    found = rewritten_layers(layer)[""].decisions[-1]
    measured = [graph for graph in derived.values() if isinstance(graph, Graph)]
    for _ in range(3):
        for graph in measured:  # forget their features
            graph.csr().cache.pop("features", None)
            graph.transposed().cache.pop("features", None)
        graphs = dict.fromkeys(found.region.graphs, measured[-1])
        again = partial(make_decision, found.region, found.assumed, Options(train=train), graphs)
        laps.append(lap(again, inputs[0].device.type))
    predicted = {str(tree): 1e3 * seconds for tree, seconds in found.choice.seconds.items()}
    return sorted(laps)[1], str(found.choice.tree), predicted


def step(layer: Module, x: Tensor, edge_index: Tensor, seed: Tensor | None) -> Callable[[], Tensor]:
    """One iteration."""

    def inference() -> Tensor:
        with torch.no_grad():
            return layer(x, edge_index)

    def training() -> Tensor:
        x.grad = None
        layer.zero_grad()
        out = layer(x, edge_index)
        out.backward(seed)
        return out.detach()

    return inference if seed is None else training


def lap(run: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call."""
    return 1e3 * seconds_of(run, device)


def laps_of(runs: dict[str, Callable[[], Any]], device: str) -> dict[str, tuple[float, int]]:
    """The median of calls in milliseconds, and of how many; the trees in turns.

    A tree that has used up its share of the time drops out once it has three laps, so that a slow
    one does not leave the others with as few; so does one for which there is no memory beside what
    the others keep.
    """
    share = (150 if device == "cuda" else 300) / max(len(runs), 1)
    for tree, run in list(runs.items()):  # once more behind what ran last
        try:
            lap(run, device)
        except torch.OutOfMemoryError:
            del runs[tree]
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {tree: [] for tree in runs}
    for _ in range(100):
        for tree, run in runs.items():
            if len(times[tree]) < 3 or sum(times[tree]) < share:
                times[tree].append(lap(run, device))
    return {tree: (sorted(found)[len(found) // 2], len(found)) for tree, found in times.items()}


if __name__ == "__main__":
    main()
