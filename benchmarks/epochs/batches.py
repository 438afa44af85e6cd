"""Training on sampled batches on a GPU, a new graph each step: stock PyG against `patched()`.

    python -m benchmarks.epochs.batches [--graph NAME] [--quick] [--out FOLDER]

2 layers, 256 hidden, fan-outs 15 and 10 from batches of seeds, drawn by PyG's `NeighborLoader`
before the clock starts; every step gets an edge_index that it has never seen. `trimmed`: each layer
is given only the nodes and edges that the seeds still need (PyG's `trim_to_layer`).

`NeighborLoader` needs pyg-lib or torch-sparse. Without them batches are drawn here, on the GPU, as
it draws them: each node once, edges in no order.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from benchmarks.tools import graphs, results, timing
from benchmarks.tools.variants import patched
from pyg_accel.settings import settings

NAME = "epochs/gpu_batches"
FAN_OUTS = (15, 10)
SEEDS = (256, 1024, 4096, 16384)
FEATURES, HIDDEN, CLASSES = 100, 256, 40
BATCHES, WARM_UP = 24, 4
MODELS = {"GraphSAGE": GraphSAGE, "GCN": GCN}


class Batch(NamedTuple):
    """A sampled graph: the seeds come first.

    Attributes:
        num_nodes: of the batch.
        edge_index: between places in the batch.
        hops: numbers of sampled nodes and edges a hop as a model takes them, or nothing.
    """

    num_nodes: int
    edge_index: Tensor
    hops: dict[str, list[int]]


def of_loader(data: Data, seeds: Tensor) -> Batch:
    """What NeighborLoader draws for these seeds, moved to the GPU; the data are on the CPU."""
    (batch,) = NeighborLoader(data, list(FAN_OUTS), input_nodes=seeds, batch_size=seeds.numel(),
                              is_sorted=True)  # fmt: skip
    hops = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes,
            "num_sampled_edges_per_hop": batch.num_sampled_edges}  # fmt: skip
    return Batch(batch.num_nodes, batch.edge_index.to("cuda"), hops)


def sample(rowptr: Tensor, col: Tensor, seeds: Tensor) -> Batch:
    """Draw one batch without NeighborLoader."""
    nodes, frontier, sources, targets = seeds, seeds, [], []
    for fan_out in FAN_OUTS:
        degree = (rowptr[frontier + 1] - rowptr[frontier]).unsqueeze(1)
        draw = (torch.rand(frontier.numel(), fan_out, device="cuda") * degree).long()
        found = degree.expand_as(draw) > 0
        source = col[(rowptr[frontier].unsqueeze(1) + draw)[found]]
        target = frontier.unsqueeze(1).expand_as(draw)[found]
        source, target = torch.unique(torch.stack([source, target]), dim=1)
        sources.append(source)
        targets.append(target)
        frontier = torch.unique(source[~torch.isin(source, nodes)])
        nodes = torch.cat([nodes, frontier])
    place = torch.full((rowptr.numel() - 1,), -1, device="cuda")
    place[nodes] = torch.arange(nodes.numel(), device="cuda")
    edges = torch.stack([place[torch.cat(sources)], place[torch.cat(targets)]])
    return Batch(nodes.numel(), edges[:, torch.randperm(edges.size(1), device="cuda")], {})


def measure(name: str, batches: list[Batch], seeds: int, *, trimmed: bool) -> dict[str, Any]:
    """Milliseconds a step of one model on batches of this many seeds."""
    torch.manual_seed(0)
    model = MODELS[name](FEATURES, HIDDEN, 2, CLASSES).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = [torch.randn(batch.num_nodes, FEATURES, device="cuda") for batch in batches]
    y = torch.randint(CLASSES, (seeds,), device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    loss = torch.zeros(())
    torch.cuda.synchronize()
    events[0].record()
    for k, batch in enumerate(batches):
        optimizer.zero_grad()
        # A copy, so that no graph is known from a run before.
        out = model(x[k], batch.edge_index.clone(), **(batch.hops if trimmed else {}))
        loss = cross_entropy(out[:seeds], y)
        loss.backward()
        optimizer.step()
        events[k + 1].record()
    torch.cuda.synchronize()
    steps = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return {**timing.quantiles(steps[WARM_UP:]).columns("step_ms"), "loss": float(loss)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, devices=("cuda",), graph="products-like")
    options = parser.parse_args(arguments)
    graph = "products-like@0.05" if options.quick else options.graph
    csr = graphs.load(graph, device="cuda")
    num_nodes, with_loader = csr[0].numel() - 1, WITH_PYG_LIB or WITH_TORCH_SPARSE
    data = Data(edge_index=graphs.edge_list(csr).cpu(), num_nodes=num_nodes)
    rows = results.Rows(NAME, options, "cuda", drawn_by="NeighborLoader" if with_loader else
                        "benchmark")  # fmt: skip
    for wanted in results.each(SEEDS[: 1 if options.quick else None], "batch size"):
        ids = [torch.randint(num_nodes, (wanted,)).unique() for _ in range(BATCHES)]
        batches = [of_loader(data, some) if with_loader else sample(*csr, some.cuda())
                   for some in ids]  # fmt: skip
        seeds = min(some.numel() for some in ids)
        shape = {"seeds": seeds, "N": sum(b.num_nodes for b in batches) // BATCHES,
                 "E": sum(b.edge_index.size(1) for b in batches) // BATCHES}  # fmt: skip
        for name, trimmed in itertools.product(MODELS, (False, True) if with_loader else (False,)):
            for backend in ("stock", "patched", "patched, always"):
                settings.always = backend.endswith("always")
                with patched(backend != "stock"):
                    run = measure(name, batches, seeds, trimmed=trimmed)
                rows.add([run], show=True, graph=graph, model=name, trimmed=trimmed,
                         backend=backend, **shape)  # fmt: skip
    settings.always = None
    losses = rows.done().pivot_table("loss", ["model", "trimmed", "seeds"], "backend")
    print("losses agree to", float((losses["stock"] - losses["patched, always"]).abs().max()))


if __name__ == "__main__":
    main()
