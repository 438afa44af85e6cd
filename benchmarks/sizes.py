"""Training steps at every size: molecules, sampled batches, citation graphs, up to 2 million edges.

    python -m benchmarks.sizes [--device cuda] [--quick] [--models GCN GAT ...] [--variants ...]

Each workload is run in two ways: `fixed`, one graph whose edge_index is the same in every step, and
`new`, where every step gets an edge_index that it has never seen. Variants take turns, some steps
each a round; before the clock starts, outputs and gradients are compared with stock PyG's.

`wall_ms` is the median time of a step from start to synchronisation, `device_ms` the sum of the
times of its kernels. Losing cases are rows like others.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.functional import relu
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, machine
from benchmarks.machine import quantiles
from pyg_accel.settings import settings

NAME = "sizes"
VARIANTS = ("stock", "patched", "always", "compiled", "patched compiled")
POOL = 8  # different graphs of a workload
TOLERANCE = 5e-3  # of the largest element: fp32 sums in another order, through several layers


@dataclass(frozen=True)
class Workload:
    """Graphs of one size.

    Attributes:
        nodes: of a graph.
        edges: of a graph.
        features: of a node.
        hidden: width of the layers.
        layers: of a model.
        seeds: nodes of a sampled batch whose neighbours were drawn; 0 for other graphs.
        molecules: of a batch; 0 for other graphs.
    """

    nodes: int
    edges: int
    features: int
    hidden: int
    layers: int
    seeds: int = 0
    molecules: int = 0


WORKLOADS = {
    "molecules 2 x 64": Workload(3_000, 6_500, 64, 64, 2, molecules=128),
    "molecules 5 x 256": Workload(3_000, 6_500, 256, 256, 5, molecules=128),
    "256 seeds": Workload(30_000, 40_000, 100, 256, 2, seeds=256),
    "1024 seeds": Workload(110_000, 160_000, 100, 256, 2, seeds=1024),
    "4096 seeds": Workload(380_000, 640_000, 100, 256, 2, seeds=4096),
    "Cora-size": Workload(2_708, 10_556, 1433, 16, 2),
    "Pubmed-size": Workload(19_717, 88_648, 500, 256, 3),
    "Flickr-size": Workload(89_250, 899_756, 500, 256, 3),
    "arxiv-like": Workload(169_343, 2_332_486, 128, 256, 3),
}
QUICK = ("molecules 2 x 64", "256 seeds", "Cora-size")


class Net(nn.Module):
    """Layers of one kind with a relu between them."""

    def __init__(self, kind: str, work: Workload) -> None:
        super().__init__()
        widths = [work.features] + [work.hidden] * work.layers
        self.convs = nn.ModuleList(LAYERS[kind](a, b) for a, b in itertools.pairwise(widths))
        self.edges = kind == "GINE"

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for conv in self.convs:
            x = relu(conv(x, edge_index, edge_attr) if self.edges else conv(x, edge_index))
        return x


def _pna(a: int, b: int) -> nn.Module:
    return pyg.PNAConv(a, b, ["mean", "max", "min", "std"], ["identity", "amplification"],
                       torch.tensor([1, 5, 10, 10, 5, 1]), towers=1)  # fmt: skip


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": pyg.GCNConv,
    "SAGE": pyg.SAGEConv,
    "GIN": lambda a, b: pyg.GINConv(nn.Linear(a, b)),
    "GINE": lambda a, b: pyg.GINEConv(nn.Linear(a, b), edge_dim=16),
    "GAT": lambda a, b: pyg.GATConv(a, b // 4, heads=4),
    "GATv2": lambda a, b: pyg.GATv2Conv(a, b // 4, heads=4),
    "Transformer": lambda a, b: pyg.TransformerConv(a, b // 4, heads=4),
    "PNA": _pna,
}


def graphs_of(work: Workload, device: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Features, edge_index and edge attributes of different graphs of a size."""
    made = []
    for seed in range(POOL):
        random = torch.Generator().manual_seed(seed)
        n, e = work.nodes, work.edges
        if work.molecules:
            size = n // work.molecules
            first = torch.arange(e) * work.molecules // e * size
            edge_index = first + torch.randint(size, (2, e), generator=random)
        elif work.seeds:  # two hops: a target draws some sources, as NeighborLoader does
            inner = work.seeds * 15
            targets = torch.cat(
                [
                    torch.arange(work.seeds).repeat_interleave(15),
                    work.seeds + torch.arange(e - inner) * inner // (e - inner),
                ]
            )
            sources = torch.cat([work.seeds + torch.arange(inner),
                                 torch.randint(n, (e - inner,), generator=random)])  # fmt: skip
            edge_index = torch.stack([sources, targets % n])
        else:  # in-degrees of a power law
            hubs = torch.rand(e, generator=random).pow(2).mul(n).long()
            edge_index = torch.stack([torch.randint(n, (e,), generator=random), hubs])
        x = torch.randn(n, work.features, generator=random)
        made.append((x.to(device), edge_index.to(device), torch.randn(e, 16).to(device)))
    return made


class Training:
    """A model in training, by one variant.

    Args:
        model: of the variant's own, with the weights of all.
        data: the graphs.
        fixed: always the first of them, as it is.
    """

    def __init__(self, model: nn.Module, data: list[Any], *, fixed: bool) -> None:
        self.model, self.data, self.fixed = model, data, fixed
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        self.step_number = 0

    def step(self) -> Tensor:
        x, edge_index, edge_attr = self.data[0 if self.fixed else self.step_number % POOL]
        if not self.fixed:
            edge_index = edge_index.clone()
        self.step_number += 1
        self.optimizer.zero_grad()
        out = self.model(x, edge_index, edge_attr)
        out.square().mean().backward()
        self.optimizer.step()
        return out.detach()


def mode_of(variant: str) -> AbstractContextManager[Any]:
    settings.always = variant == "always"
    stock = variant in ("stock", "compiled")
    return nullcontext() if stock else pyg_accel.patched()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def laps(run: Training, device: str, count: int) -> Iterator[float]:
    """Seconds of each of some steps."""
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        run.step()
        synchronize(device)
        yield time.perf_counter() - start


def device_ms(run: Training, device: str, steps: int = 4) -> float:
    """The sum of the times of the kernels of a step."""
    if device != "cuda":
        return float("nan")
    kind = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(steps):
            run.step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / steps / 1e3


def measure(
    kind: str, work: Workload, device: str, variants: Sequence[str], rounds: int, *, fixed: bool
) -> list[dict[str, Any]]:
    """Rows of all variants of a case."""
    data, runs, rows, wanted = graphs_of(work, device), {}, [], None
    for variant in variants:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Net(kind, work).to(device)
        called = torch.compile(model, dynamic=True) if variant.endswith("compiled") else model
        run, error = Training(called, data, fixed=fixed), ""
        try:
            with mode_of(variant):
                outs = [run.step() for _ in range(3)]
                wanted = outs if wanted is None else wanted
                off = max(float((a - b).abs().max() / b.abs().max())
                          for a, b in zip(outs, wanted, strict=True))  # fmt: skip
                if off > TOLERANCE:
                    raise AssertionError(f"{kind} {variant}: off by {off:.2g}")
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as problem:
            error = type(problem).__name__
        rows.append({"variant": variant, "error": error})
        if not error:
            runs[variant] = run
    seconds: dict[str, list[float]] = {variant: [] for variant in runs}
    for _, (variant, run) in itertools.product(range(rounds), runs.items()):
        with mode_of(variant):
            seconds[variant] += laps(run, device, 4)
    for row in rows:
        if row["variant"] in runs:
            took = quantiles(seconds[row["variant"]])
            with mode_of(row["variant"]):
                on_device = device_ms(runs[row["variant"]], device)
            row |= {"wall_ms": took.median, "p20": took.p20, "p80": took.p80,
                    "device_ms": on_device}  # fmt: skip
    settings.always = None
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="three small workloads")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=[*LAYERS])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS[:2]])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder of the CSV")
    options = parser.parse_args(arguments)
    folder = options.out or Path(__file__).with_name("results")
    facts = gpu_machine.facts() if options.device == "cuda" else machine.facts()
    names = options.workloads or (QUICK if options.quick else [*WORKLOADS])
    cases = list(itertools.product(names, options.models, (True, False)))
    rows = []
    for name, kind, fixed in tqdm(cases, unit="case"):
        found = measure(kind, WORKLOADS[name], options.device, options.variants, options.rounds,
                        fixed=fixed)  # fmt: skip
        graph = "fixed" if fixed else "new"
        rows += [{"workload": name, "model": kind, "graph": graph, **row, **facts} for row in found]
        frame = pd.DataFrame(rows)
        frame.to_csv(folder / f"{NAME}_{options.device}.csv", index=False, float_format="%.5g")
    wall = frame.pivot_table("wall_ms", ["workload", "model", "graph"], "variant", sort=False)
    for variant in options.variants[1:]:
        if variant in wall:
            wall[f"stock / {variant}"] = wall["stock"] / wall[variant]
    print(wall.round(3).to_string())


if __name__ == "__main__":
    main()
