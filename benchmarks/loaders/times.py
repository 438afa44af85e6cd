"""Batches, and training on those of NeighborLoader, the loader's time included: stock and patched.

    OMP_NUM_THREADS=1 python -m benchmarks.loaders [--graph NAME] [--batches N] [--quick]
    python -m benchmarks.loaders --device cuda

128 molecules are put into a batch first; on a GPU a GIN, 5 layers of 256, is trained on such
batches. Then a GraphSAGE with a layer a hop, fan-outs 15, 10 and 5 from 1,024 seeds, is trained.
`sampler` is the time of `NeighborSampler` alone, `batch` that of a batch with its features; `share`
is what the loader takes of an epoch. Stock PyG needs pyg-lib or torch-sparse; without them its rows
are left out. Workers are processes, which have cores of their own only where there are as many. On
a GPU batches are sampled on the CPU and copied, or sampled there (`gpu`), with features in pinned
host memory or steps from CUDA graphs as well. Epochs are timed by the clock on the wall, with
workers or without; on a CPU collation and the sampler, in one thread, by that of the processor.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import pyg_accel
from benchmarks.loaders.collation import collation
from benchmarks.loaders.molecules import epochs as trained
from benchmarks.tools import graphs, results, timing

NAME = "loaders/loaders"
FAN_OUTS = [15, 10, 5]
SEEDS, FEATURES, HIDDEN, CLASSES = 1024, 100, 256, 40
GRAPHS = {"cpu": ("rmat-held-1m", 8), "cuda": ("products-like", 50)}  # and batches of an epoch


class Variant(NamedTuple):
    """How batches are made.

    Attributes:
        on: whether anything is patched.
        loader: device of the loader's batches.
        pinned: the features lie in pinned host memory.
        graphed: steps run from CUDA graphs.
    """

    on: bool = False
    loader: str | None = None
    pinned: bool = False
    graphed: bool = False

    def patched(self) -> AbstractContextManager[Any]:
        """`patch()` or nothing."""
        return pyg_accel.patched(loader=self.loader) if self.on else nullcontext()


VARIANTS = {"stock": Variant(), "patched": Variant(on=True), "gpu": Variant(on=True, loader="cuda"),
            "gpu, pinned": Variant(on=True, loader="cuda", pinned=True),
            "gpu, graphed": Variant(on=True, loader="cuda", graphed=True)}  # fmt: skip


def loader_of(data: Data, seeds: Tensor, **options: Any) -> NeighborLoader:
    """Batches of the seeds, from a graph whose edges are sorted."""
    return NeighborLoader(data, FAN_OUTS, input_nodes=seeds, batch_size=SEEDS, is_sorted=True,
                          **options)  # fmt: skip


def step_of(device: str, *, graphed: bool) -> Callable[[Data], None]:
    """A step of training on a batch, of a new model."""
    torch.manual_seed(0)
    model = GraphSAGE(FEATURES, HIDDEN, len(FAN_OUTS), CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), capturable=graphed)

    def step(x: Tensor, edge_index: Tensor, y: Tensor, batch_size: int) -> None:
        optimizer.zero_grad()
        cross_entropy(model(x, edge_index)[:batch_size], y[:batch_size]).backward()
        optimizer.step()

    run: Any = pyg_accel.graphed_step(step, modules=[model], dynamic=True) if graphed else step
    return lambda batch: run(batch.x, batch.edge_index, batch.y, batch.batch_size)


def waiting(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def epoch(loader: Any, step: Callable[[Any], None], device: str) -> dict[str, float]:
    """Seconds of training on all batches, and of them those that the step waited for the loader."""
    waiting(device)
    waited, began = 0.0, time.perf_counter()
    batches = iter(loader)
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is not None:
            batch = batch.to(device)
        waited += time.perf_counter() - asked
        if batch is None:
            break
        step(batch)
    waiting(device)
    total = time.perf_counter() - began
    return {"seconds": total, "loader_s": waited, "share": waited / total}


def sampling(
    data: dict[bool, Data], seeds: Tensor, names: Sequence[str], device: str
) -> dict[tuple[str, str], timing.Quantiles]:
    """Milliseconds of the sampler alone, and of a batch on the device, in turns."""
    loaders = {}
    for name in names:
        with VARIANTS[name].patched():
            loaders[name] = loader_of(data[VARIANTS[name].pinned], seeds)
    seconds: dict[tuple[str, str], list[float]] = {}
    clock = timing.clock_of(device)
    for ids in [torch.arange(SEEDS), *torch.arange(seeds.numel()).split(SEEDS)]:  # one to warm up
        for name in names:
            loader = loaders[name]
            with VARIANTS[name].patched():
                for what, run in (
                    ("sampler", lambda: loader.node_sampler._sample(seeds[ids])),  # noqa: B023
                    ("batch", lambda: loader(ids).to(device)),  # noqa: B023
                ):
                    waiting(device)
                    began = clock()
                    run()
                    waiting(device)
                    seconds.setdefault((what, name), []).append(clock() - began)
    return {case: timing.quantiles(found[1:]) for case, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), graph="", batches=8, workers=(0, 2, 4)
    )
    options = parser.parse_args(arguments)
    device = options.device
    graph, batches = ("rmat-20k", 2) if options.quick else GRAPHS[device]
    graph, batches = options.graph or graph, options.batches or batches
    csr = graphs.load(graph, device=device)
    num_nodes = csr[0].numel() - 1
    data = Data(edge_index=graphs.edge_list(csr).cpu(), x=torch.randn(num_nodes, FEATURES),
                y=torch.randint(CLASSES, (num_nodes,)))  # fmt: skip
    del csr
    held = {False: data}
    if device == "cuda":
        held[True] = copy.copy(data)
        held[True].x = data.x.pin_memory()
    seeds = torch.randperm(num_nodes)[: SEEDS * batches]
    there = WITH_PYG_LIB or WITH_TORCH_SPARSE
    names = [name for name, variant in VARIANTS.items()
             if (variant.on or there) and (device == "cuda" or not variant.loader)]  # fmt: skip
    rows = results.Rows(NAME if device == "cpu" else f"{NAME}_{device}", options, device,
                        fan_outs=" ".join(map(str, FAN_OUTS)))  # fmt: skip
    shape: dict[str, Any] = {"graph": graph, "N": num_nodes, "E": data.num_edges}
    molecules: dict[str, Any] = {"graph": "128 molecules", "workers": 0}
    for what, name, took in collation(device):
        rows.add([took.columns()], show=True, **molecules, what=what, backend=name)
    for name, found in trained(device, 4 * batches, epoch) if device == "cuda" else ():
        rows.add([found], show=True, **molecules, what="epoch", backend=name)
    alone = [name for name in names if not VARIANTS[name].graphed]
    for (what, name), took in sampling(held, seeds, alone, device).items():
        rows.add([took.columns()], show=True, **shape, what=what, backend=name, workers=0)
    for name in names:
        variant = VARIANTS[name]
        for workers in (0,) if variant.loader else options.workers:
            with variant.patched():
                loader = loader_of(held[variant.pinned], seeds, num_workers=workers,
                                   persistent_workers=workers > 0)  # fmt: skip
                step = step_of(device, graphed=variant.graphed)
                for _ in range(2):  # kernels are chosen, and graphs captured, in the first
                    found = epoch(loader, step, device)
            rows.add([found], show=True, **shape, what="epoch", backend=name, workers=workers)
    rows.done()


if __name__ == "__main__":
    main()
