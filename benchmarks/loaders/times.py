"""Batches, and training on those of NeighborLoader, the loader's time included: stock and patched.

    OMP_NUM_THREADS=1 python -m benchmarks.loaders [--graph NAME] [--batches N] [--quick]

First 128 molecules are put into a batch. Then a GraphSAGE with a layer a hop, fan-outs 15, 10 and 5
from 1,024 seeds, is trained. `sampler` is the time of `NeighborSampler` alone; `share` is what the
loader takes of an epoch. Stock PyG needs pyg-lib or torch-sparse; without them its rows are left
out. Workers are processes, which have cores of their own only where there are as many. Epochs
are timed by the clock on the wall, with workers or without; collation and the sampler, in one
thread, by that of the processor.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from benchmarks.loaders.collation import collation
from benchmarks.tools import graphs, results, timing
from benchmarks.tools.variants import patched

NAME = "loaders/loaders"
FAN_OUTS = [15, 10, 5]
SEEDS, FEATURES, HIDDEN, CLASSES = 1024, 100, 256, 40


def epoch(data: Data, seeds: Tensor, workers: int) -> dict[str, float]:
    """Seconds of training on all seeds, and of them those that the step waited for the loader."""
    torch.manual_seed(0)
    model = GraphSAGE(FEATURES, HIDDEN, len(FAN_OUTS), CLASSES)
    optimizer = torch.optim.Adam(model.parameters())
    loader = NeighborLoader(data, FAN_OUTS, input_nodes=seeds, batch_size=SEEDS,
                            num_workers=workers, is_sorted=True)  # fmt: skip
    waited, began = 0.0, time.perf_counter()
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        cross_entropy(out, batch.y[: batch.batch_size]).backward()
        optimizer.step()
    total = time.perf_counter() - began
    return {"seconds": total, "loader_s": waited, "share": waited / total}


def sampling(data: Data, seeds: Tensor, variants: dict[str, bool]) -> dict[str, timing.Quantiles]:
    """Milliseconds a batch of the sampler alone, in turns."""
    samplers = {}
    for name, on in variants.items():
        with patched(on):
            samplers[name] = NeighborLoader(data, FAN_OUTS, is_sorted=True).node_sampler
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    clock = timing.clock_of("cpu")
    for ids in seeds.split(SEEDS):
        for name, on in variants.items():
            with patched(on):
                began = clock()
                samplers[name]._sample(ids)
                seconds[name].append(clock() - began)
    return {name: timing.quantiles(found) for name, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(__doc__, graph="rmat-held-1m", batches=8, workers=(0, 2))
    options = parser.parse_args(arguments)
    csr = graphs.load("rmat-20k" if options.quick else options.graph)
    num_nodes = csr[0].numel() - 1
    data = Data(edge_index=graphs.edge_list(csr), x=torch.randn(num_nodes, FEATURES),
                y=torch.randint(CLASSES, (num_nodes,)))  # fmt: skip
    seeds = torch.randperm(num_nodes)[: SEEDS * (2 if options.quick else options.batches)]
    variants = {"stock": False, "patched": True}
    if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        del variants["stock"]
    rows = results.Rows(NAME, options, fan_outs=" ".join(map(str, FAN_OUTS)))
    shape: dict[str, Any] = {"graph": options.graph, "N": num_nodes, "E": data.num_edges}
    for what, name, took in collation():
        rows.add([took.columns()], show=True, graph="128 molecules", what=what, backend=name,
                 workers=0)  # fmt: skip
    for name, took in sampling(data, seeds, variants).items():
        rows.add([took.columns()], show=True, **shape, what="sampler", backend=name, workers=0)
    for workers in results.each(options.workers):
        for name, on in variants.items():
            with patched(on):
                rows.add([epoch(data, seeds, workers)], show=True, **shape, what="epoch",
                         backend=name, workers=workers)  # fmt: skip
    rows.done()


if __name__ == "__main__":
    main()
