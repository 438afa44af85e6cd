"""Sums over sampled edges against the full graph and against a graph sampled beforehand.

    python -m benchmarks.papers.es_spmm.kernels [--device cuda] [--quick] [--graphs NAME ...]

For each graph, strategy and width: `sampled_spmm` on the full graph, sampling included; the SpMM of
this package on a graph that holds the same edges, which somebody has sampled before; and on the
full graph that SpMM and cuSPARSE (MKL on a CPU). Every output is first held against float64 sums
over the sample that the definition writes out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers import tables
from benchmarks.papers.sensei import shares
from benchmarks.tools import results, timing
from pyg_accel import Graph, ops, sampling_rates
from pyg_accel.backends.sampling import STRATEGIES, Sample, Sampling, take

NAME = "papers/es_spmm/sampled_kernels"
GRAPHS = {
    "cuda": ("reddit-like", "proteins-like", "products-like", "arxiv-like", "pubmed-like"),
    "cpu": ("reddit-like@0.05", "rmat-20k", "rmat-169k"),
}
QUICK_GRAPHS = {"cuda": ("reddit-like@0.1",), "cpu": ("rmat-2.7k",)}
FEATURES = 128
WIDTHS = {"cuda": (16, 32, 64, 128, 256, 512), "cpu": (16, 64, 256)}
CHECKED = {"cuda": 2000, "cpu": 200}


class Inputs:
    """A graph and features on a device."""

    def __init__(self, name: str, device: str) -> None:
        edge_index, self.nodes = shares.load(name, device)
        self.name, size = name, (self.nodes, self.nodes)
        self.graph = Graph.from_edge_index(edge_index.int(), size)
        generator = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(self.nodes, FEATURES, device=device, generator=generator)
        self.rows = torch.randint(
            self.nodes, (CHECKED[device],), device=device, generator=generator
        )
        longest = self.graph.degree.topk(min(CHECKED[device] // 100, self.nodes)).indices
        self.rows = torch.cat([self.rows, longest])

    def truth(self, graph: Graph, x: Tensor) -> Tensor:
        """[rows, F] float64, sums over the entries of a graph."""
        starts, stops = graph.rowptr[self.rows].long(), graph.rowptr[self.rows + 1].long()
        counts = stops - starts
        local = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(local.numel(), device=x.device) - first[local] + starts[local]
        total = torch.zeros(len(counts), x.size(1), dtype=torch.float64, device=x.device)
        return total.index_add_(0, local, x[graph.col[entry].long()].double())

    def error(self, out: Tensor, graph: Graph, x: Tensor, *, allowed: float = 2e-5) -> float:
        """The largest error in units of what is allowed: relative to the sum of magnitudes."""
        scale = self.truth(graph, x.abs()) + 1e-6
        off = (out[self.rows].double() - self.truth(graph, x)).abs()
        return float((off / scale).max()) / allowed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cpu", "cuda"), graphs=None, widths=(16,))
    parser.set_defaults(widths=None)
    options = parser.parse_args(arguments)
    device = options.device
    widths = options.widths or WIDTHS[device]
    names = options.graphs or (QUICK_GRAPHS if options.quick else GRAPHS)[device]
    name = f"{NAME}{'_cuda' if device == 'cuda' else ''}"
    rows = results.Rows(name, options, device, ["graph", "width"])
    for graph in results.each(names, "graph"):
        inputs = Inputs(graph, device)
        for width in (0, *widths):
            rows.without(graph=graph, width=width)
        rows.add(measure(inputs, widths), show=True, graph=graph)
    print("\n".join(tables.sampled(rows.done())))


def time_of(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Median and quantiles of a call; on a GPU also without the launching."""
    time = timing.timed(call, device, repeats=5, budget=0.05)
    alone = time
    if device == "cuda":
        alone = timing.timed(timing.captured(call), device, budget=0.05)
    return time.columns(prefix="ms_") | {"device_ms": alone.median}


def measure(inputs: Inputs, widths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of one graph."""
    graph, x, device = inputs.graph, inputs.x, inputs.x.device.type
    facts = {"N": inputs.nodes, "E": graph.num_edges, "F": FEATURES}
    whole = {**facts, "strategy": "all", "width": 0, "storage": "fp32", "rate": 1.0}
    ones = torch.ones(graph.num_edges, device=x.device)
    matrix = torch.sparse_csr_tensor(graph.rowptr, graph.col, ones, (inputs.nodes, inputs.nodes))
    library = "cuSPARSE" if device == "cuda" else "MKL"
    calls = {library: lambda: matrix @ x, "pyg_accel spmm": lambda: ops.spmm(graph, x)}
    for backend, call in calls.items():
        check(inputs.error(call(), graph, x), backend)
        yield {**whole, "backend": backend, **time_of(call, device)}

    rates = sampling_rates(graph, widths)
    for strategy, width in itertools.product(STRATEGIES, widths):
        case = {**facts, "strategy": strategy, "width": width, "rate": rates[width]}
        for row in one_case(inputs, strategy, width):
            yield {**case, **row}


def one_case(inputs: Inputs, strategy: str, width: int) -> Iterator[dict[str, Any]]:
    """Rows of one strategy and width."""
    graph, x, device = inputs.graph, inputs.x, inputs.x.device.type
    before = sampled_graph(graph, strategy, width)
    how = {"width": width, "strategy": strategy}
    for storage, features in storages(x, strategy).items():
        ours = partial(ops.sampled_spmm, graph, features, **how)
        exact = features.dequantize() if scaled(features) else features
        allowed = 5e-3 if storage == "bf16" else 2e-5
        error = inputs.error(ours(), before, exact, allowed=allowed)
        check(error, f"{strategy} {width} {storage}")
        yield {"storage": storage, "backend": "sampled_spmm", **time_of(ours, device)}
    if device == "cpu" and strategy == "fastrand":
        sampling = partial(take, graph.csr(), Sampling(width, strategy, "none"))
        yield {"storage": "fp32", "backend": "sampling by itself, torch",
               **time_of(sampling, device)}  # fmt: skip

    sums = partial(ops.spmm, before, x)
    check(inputs.error(sums(), before, x), f"sampled before, {strategy} {width}")
    yield {"storage": "fp32", "backend": "spmm, sampled before", **time_of(sums, device)}


def storages(x: Tensor, strategy: str) -> dict[str, Any]:
    """Features as they may be stored; the narrow ones for one strategy, which does not matter."""
    if strategy != "fastrand":
        return {"fp32": x}
    return {
        "fp32": x,
        "bf16": x.bfloat16(),
        "int8": ops.quantize(x),
    }


def sampled_graph(graph: Graph, strategy: str, width: int) -> Graph:
    """A graph of the same edges, sampled before, as somebody would who keeps it: sorted."""
    sample: Sample = take(graph.csr(), Sampling(width, strategy, "none"))
    order = torch.argsort(sample.row * graph.num_cols + sample.col)
    col = sample.col[order].contiguous()
    return Graph.from_csr(sample.rowptr, col, num_cols=graph.num_cols)


def check(error: float, what: str) -> None:
    """Stop at a wrong result."""
    if not error <= 1:
        raise SystemExit(f"{what} is wrong: {error:.3g} times the allowed error")


def scaled(features: Any) -> bool:
    """Whether features are stored in 8 bits, with scales."""
    return isinstance(features, ops.Quantized)


if __name__ == "__main__":
    main()
