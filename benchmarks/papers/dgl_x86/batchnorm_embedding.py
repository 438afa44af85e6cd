"""BatchNorm and Embedding on a CPU: does torch still lose what the DGL paper repairs?

    python -m benchmarks.papers.dgl_x86.batchnorm_embedding [--quick]

The paper (section 3.4) vectorises BatchNorm and gives Embedding's backward pass to its sparse
kernels. Here torch's own BatchNorm1d is held against the traffic that it cannot avoid (a copy of
the same bytes), forward and backward, and the dense backward pass of torch's Embedding, a scatter
of rows, against a sum over the entries of a graph whose rows are the words, built in each call, as
the words are new in each batch. `graph kept` leaves out the building. `step` is a whole one,
look-up and backward pass through autograd, on ids that are new in each; in `step, by a graph` its
gradient is that sum. All gradients are checked against float64 before they are timed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.papers import tables
from benchmarks.tools import results, timing
from pyg_accel import Graph, ops

NAME = "papers/dgl_x86/cpu_batchnorm_embedding"
BATCHNORM = ((10_000, 64), (10_000, 256), (100_000, 64), (100_000, 256))
EMBEDDING = (  # words, width, ids of a batch, how they are drawn
    (1_000, 64, 100_000, "uniform"), (1_000, 64, 100_000, "skewed"),
    (30_000, 64, 30_000, "uniform"), (30_000, 128, 200_000, "uniform"),
    (30_000, 128, 200_000, "skewed"), (30_000, 256, 20_000, "skewed"),
    (170_000, 128, 170_000, "each once"), (170_000, 128, 20_000, "uniform"),
    (500_000, 64, 100_000, "skewed"),
    (100, 256, 200_000, "uniform"), (28, 128, 60_000, "skewed"),
    (1_000, 32, 300, "uniform"), (1_000, 32, 1_000, "uniform"), (1_000, 64, 1_000, "uniform"),
    (1_000, 64, 3_000, "uniform"), (5_000, 128, 1_000, "uniform"), (5_000, 32, 10_000, "skewed"),
    (20_000, 64, 2_000, "uniform"), (20_000, 16, 20_000, "uniform"), (100, 8, 20_000, "skewed"),
    (50_000, 64, 5_000, "each once"), (200_000, 32, 5_000, "uniform"),
)  # fmt: skip


def batchnorm(nodes: int, width: int) -> dict[str, Callable[[], Any]]:
    x = torch.randn(nodes, width, requires_grad=True)
    layer = torch.nn.BatchNorm1d(width)
    seed, copy = torch.randn(nodes, width), torch.empty(nodes, width)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        x.grad = None
        layer(x).backward(seed)

    def bound() -> None:  # forward reads x twice and writes, backward reads 4 times and writes
        for _ in range(4):
            copy.copy_(seed)

    return {"torch forward": forward, "torch": both, "copies of the same bytes": bound}


def ids_of(words: int, count: int, drawn: str) -> Tensor:
    if drawn == "each once":
        return torch.randperm(words)[:count]
    if drawn == "uniform":
        return torch.randint(words, (count,))
    return (words * torch.rand(count) ** 4).long().clamp_(max=words - 1)


class _ByGraph(torch.autograd.Function):
    """A look-up whose gradient is a sum over a graph from places to words."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.ids, ctx.words = ids, weight.size(0)
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        edges = torch.stack([torch.arange(ctx.ids.numel()), ctx.ids])
        graph = Graph.from_edge_index(edges, size=(ctx.ids.numel(), ctx.words))
        return ops.spmm(graph, grad), None


def embedding(words: int, width: int, count: int, drawn: str) -> dict[str, Callable[[], Any]]:
    ids = ids_of(words, count, drawn)
    table, grad = torch.zeros(words, width), torch.randn(count, width)
    place = torch.arange(count)

    def stock() -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, ids, words, -1, False)

    def graph() -> Graph:
        return Graph.from_edge_index(torch.stack([place, ids]), size=(count, words))

    def ours() -> Tensor:
        return ops.spmm(graph(), grad)

    kept = graph()

    def again() -> Tensor:
        return ops.spmm(kept, grad)

    def index_add() -> Tensor:
        return torch.zeros_like(table).index_add_(0, ids, grad)

    truth = torch.zeros(words, width, dtype=torch.float64).index_add_(0, ids, grad.double())
    size = torch.zeros(words, width).index_add_(0, ids, grad.abs()).double()
    for run in (stock, ours, again, index_add):
        if not bool(((run().double() - truth).abs() <= 2e-5 * size + 1e-6).all()):
            raise SystemExit(f"{run.__name__} is wrong for {words} words, {count} ids")
    weight = torch.nn.Parameter(table)

    def step(lookup: Callable[[Tensor], Tensor]) -> Tensor:
        weight.grad = None
        lookup(ids.clone()).backward(grad)
        assert weight.grad is not None
        return weight.grad

    steps = {
        "step": lambda: step(lambda new: functional.embedding(new, weight)),
        "step, by a graph": lambda: step(lambda new: _ByGraph.apply(weight, new)),
    }
    for run in steps.values():
        if not bool(((run().double() - truth).abs() <= 2e-5 * size + 1e-6).all()):
            raise SystemExit(f"a step is wrong for {words} words, {count} ids")
    return {
        "torch": stock,
        "ours": ours,
        "ours, graph kept": again,
        "index_add": index_add,
        "forward": lambda: functional.embedding(ids, table),
    } | steps


def main(arguments: Sequence[str] | None = None) -> None:
    options = results.parser(__doc__).parse_args(arguments)
    rows = results.Rows(NAME, options)
    norms = [(("BatchNorm1d", *size, 0, ""), batchnorm, size) for size in BATCHNORM]
    lookups = [(("Embedding backward", *case), embedding, case) for case in EMBEDDING]
    few = 2 if options.quick else None
    for key, make, args in results.each([*norms[:few], *lookups[:few]]):
        times = timing.side_by_side(make(*args), rounds=5, min_time=0.005, budget=0.1)
        case = dict(zip(("op", "rows", "width", "ids", "drawn"), key, strict=True))
        rows.add(({"backend": name, **found.columns()} for name, found in times.items()), **case)
    print("\n".join(tables.batchnorm_embedding(rows.done())))


if __name__ == "__main__":
    main()
