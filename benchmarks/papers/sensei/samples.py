"""One choice for a graph, or one for each sample of it (SENSEi, figure 9).

    python -m benchmarks.papers.sensei.samples [--device cuda] [--sampling neighbours] [--quick]

Decides the order of a layer's products on the whole graph, and on every sample; times all orders
on the samples, as `orders.py` does, whose models and checks these are. The paper
says "random neighborhood samples of sizes 1000, 100, and 10", and five more sizes from 5000 to 5.
That may be read in two ways: `nodes` takes the subgraph of so many nodes that a random node
reaches, `neighbours` leaves each node of the graph so many of its neighbours.

A row of results/association_samples_DEVICE.csv is an order on a sample; `whole` marks what is
chosen on the whole graph, `chosen` what is chosen on the sample. Run again, it goes on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.papers.sensei.orders import MODELS, decide, measure
from benchmarks.tools import graphs, plot, results

NAME = "papers/sensei/association_samples"
SIZES = {"GCN": (32, 256), "GAT": (1024, 2048)}
SAMPLES = {"nodes": (5000, 2000, 1000, 500, 100, 50, 10, 5), "neighbours": (1000, 100, 10)}
REPEATS = 10
CASE = ["graph", "sampling", "size", "sample", "model", "in", "out"]


def reached(csr: graphs.Csr, size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The subgraph of a random node and of nodes that are reached from it, `size` in all."""
    rowptr, col = csr
    total = rowptr.numel() - 1
    taken = torch.randint(total, (1,), generator=generator, device=col.device)
    while taken.numel() < size:
        near = col[_entries(rowptr, taken)].unique()
        fresh = near[~torch.isin(near, taken)]
        if not fresh.numel():  # a component is exhausted: another one
            fresh = torch.randint(total, (1,), generator=generator, device=col.device)
        order = torch.randperm(fresh.numel(), generator=generator, device=col.device)
        taken = torch.cat([taken, fresh[order[: size - taken.numel()]]]).unique()
    counts = rowptr[taken + 1] - rowptr[taken]
    row = torch.arange(size, device=col.device).repeat_interleave(counts)
    ends = col[_entries(rowptr, taken)]
    place = torch.searchsorted(taken, ends).clamp(max=size - 1)
    inside = taken[place] == ends
    return torch.stack([place[inside], row[inside]]), size


def thinned(csr: graphs.Csr, size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """The graph with at most `size` random neighbours of each node."""
    rowptr, col = csr
    counts = rowptr.diff()
    row = torch.arange(counts.numel(), device=col.device).repeat_interleave(counts)
    place = torch.rand(col.numel(), generator=generator, device=col.device)
    order = (row + place.double()).argsort()  # rows stay together, each in a random order
    kept = order[torch.arange(col.numel(), device=col.device) - rowptr[row] < size].sort().values
    return torch.stack([col[kept], row[kept]]), counts.numel()


def _entries(rowptr: Tensor, nodes: Tensor) -> Tensor:
    """Where the entries of some rows lie."""
    counts = rowptr[nodes + 1] - rowptr[nodes]
    within = torch.arange(int(counts.sum()), device=rowptr.device)
    return within + (rowptr[nodes] - counts.cumsum(0) + counts).repeat_interleave(counts)


TAKE = {"nodes": reached, "neighbours": thinned}


def whole_choices(csr: graphs.Csr) -> dict[str, str]:
    """The order that each model gets on the whole graph."""
    edge_index, found = graphs.edge_list(csr), {}
    for name, (n_in, n_out) in SIZES.items():
        conv = MODELS[name].make(n_in, n_out).to(edge_index.device)
        x = torch.empty(csr[0].numel() - 1, n_in, device=edge_index.device)
        found[name] = decide(conv, (x, edge_index), False)[1]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), quick="a small graph, two samples", graph="mycielskian17",
        sampling="nodes", sizes=tuple(SAMPLES["nodes"]), samples=REPEATS, models=SIZES,
    )  # fmt: skip
    parser.set_defaults(sizes=None)
    options = parser.parse_args(arguments)
    device, sampling = options.device, options.sampling
    graph, samples, sizes = options.graph, options.samples, options.sizes or SAMPLES[sampling]
    if options.quick:
        graph, samples, sizes = "mycielskian9", 2, (100, 10)
    rows = results.Rows(f"{NAME}_{device}", options, device, CASE)
    todo = rows.missing(
        (graph, sampling, size, sample, model, *SIZES[model])
        for size in sizes for sample in range(samples) for model in options.models
    )  # fmt: skip
    csr = graphs.load(graph, device=device) if todo else None
    whole = whole_choices(csr) if csr else {}
    for case in results.each(todo):
        _, _, size, sample, model, n_in, n_out = case
        generator = torch.Generator(device).manual_seed(sample)
        edge_index, nodes = TAKE[sampling](csr, size, generator)
        found = measure(model, n_in, n_out, False, edge_index, nodes, also=(whole[model],))
        rows.add(({"whole": row["tree"] == whole[model], **row} for row in found),
                 **dict(zip(CASE, case, strict=True)), N=nodes, E=edge_index.size(1))  # fmt: skip
    rows.done()
    plot.beside(rows.path)


if __name__ == "__main__":
    main()
