"""Training steps at every size: molecules, sampled batches, citation graphs, up to 2 million edges.

    python -m benchmarks.sizes [--device cpu] [--quick] [--models GCN GAT ...] [--variants ...]

Each workload is run in inference and in training, and in two ways: `fixed`, one graph whose
edge_index is the same in every step, and `new`, where every step gets an edge_index that it has
never seen. Variants take turns, some steps each a round; before the clock starts, outputs and
trained weights are compared with stock PyG's. Stock PyG runs without the wrappers of patch().
`graphed` replays models from CUDA graphs, `step` whole training steps (`graphed_step`).

`least_ms` is the least time of a step from start to synchronisation, `wall_ms` the median,
`device_ms` the sum of the times of its kernels. With OMP_NUM_THREADS=1 on a CPU, `clock` is that of
the processor, for machines that others use. Losing cases are rows like others, and listed.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn.functional import relu

import pyg_accel
from benchmarks.tools import frames, plot, results, timing
from benchmarks.tools.variants import relative_error, stock_pyg
from pyg_accel.settings import settings

NAME = "sizes/sizes"
VARIANTS = ("stock", "patched", "always", "compiled", "patched compiled", "graphed", "step")
POOL = 8  # different graphs of a workload
LAP = 0.1  # seconds of a variant before it is another's turn; one step at least
TOLERANCE = 5e-3  # of the largest element: fp32 sums in another order, through several layers


class Workload(NamedTuple):
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
    # what a CPU trains in seconds
    "sampled 5K": Workload(3_700, 5_000, 100, 128, 2, seeds=30),
    "sampled 20K": Workload(15_000, 20_000, 100, 128, 2, seeds=120),
    "sampled 100K": Workload(73_000, 100_000, 100, 128, 2, seeds=600),
    "500K edges": Workload(60_000, 500_000, 100, 64, 2),
}
GRAPHS = ("molecules 2 x 64", "molecules 5 x 256", "Cora-size", "Pubmed-size")
GRIDS = {
    "cpu": (*GRAPHS, "sampled 5K", "sampled 20K", "sampled 100K", "500K edges"),
    "cuda": (*GRAPHS, "256 seeds", "1024 seeds", "4096 seeds", "Flickr-size", "arxiv-like"),
}
QUICK = {"cpu": ("molecules 2 x 64", "sampled 5K", "Cora-size"),
         "cuda": ("molecules 2 x 64", "256 seeds", "Cora-size")}  # fmt: skip


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
            outer = work.seeds + torch.arange(e - inner) * inner // (e - inner)
            targets = torch.cat([torch.arange(work.seeds).repeat_interleave(15), outer])
            sources = torch.cat([work.seeds + torch.arange(inner),
                                 torch.randint(n, (e - inner,), generator=random)])  # fmt: skip
            edge_index = torch.stack([sources, targets % n])
        else:  # in-degrees of a power law
            hubs = torch.rand(e, generator=random).pow(2).mul(n).long()
            edge_index = torch.stack([torch.randint(n, (e,), generator=random), hubs])
        x = torch.randn(n, work.features, generator=random)
        made.append((x.to(device), edge_index.to(device), torch.randn(e, 16).to(device)))
    return made


class Run:
    """A model at work, by one variant.

    Args:
        variant: of `VARIANTS`.
        model: of the variant's own, with the weights of all.
        data: the graphs.
        fixed: always the first of them, as it is.
        train: with gradients and an optimiser's step.
    """

    def __init__(
        self, variant: str, model: nn.Module, data: list[Any], *, fixed: bool, train: bool
    ) -> None:
        self.model, self.data, self.fixed, self.train = model.train(train), data, fixed, train
        self.called: Any = model
        if variant.endswith("compiled"):
            self.called = torch.compile(model, dynamic=True)
        elif variant == "graphed":
            self.called = pyg_accel.graphed(model)
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        self.number, self.run = 0, self.once
        if variant == "step" and train:
            self.run = pyg_accel.graphed_step(
                lambda x, edge_index, edge_attr: self.once(x, edge_index, edge_attr),
                modules=[model],
            )

    def once(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.train):
            out = self.called(x, edge_index, edge_attr)
        if self.train:
            self.optimizer.zero_grad()
            out.square().mean().backward()
            self.optimizer.step()
        return out.detach()

    def step(self) -> Tensor:
        x, edge_index, edge_attr = self.data[0 if self.fixed else self.number % POOL]
        self.number += 1
        return self.run(x, edge_index if self.fixed else edge_index.clone(), edge_attr)

    def trained(self) -> list[Tensor]:
        """What a few steps lead to: outputs, and weights of which gradients are a part."""
        outs = [self.step().clone() for _ in range(6)]  # the last of a graphed one are replayed
        return [*outs, *(p.detach().clone() for p in self.model.parameters())]


def mode_of(variant: str) -> AbstractContextManager[None]:
    settings.always = variant == "always"
    return stock_pyg() if variant in ("stock", "compiled") else nullcontext()


def device_ms(run: Run, device: str, steps: int = 4) -> float:
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
    kind: str, work: Workload, device: str, variants: Sequence[str], rounds: int, *, fixed: bool,
    train: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of all variants of a case."""
    data, runs, rows, wanted = graphs_of(work, device), {}, [], None
    torch._dynamo.reset()
    for variant in variants:
        torch.manual_seed(0)
        with mode_of(variant):
            model = Net(kind, work).to(device)
            run, error = Run(variant, model, data, fixed=fixed, train=train), ""
            try:
                found = run.trained()
                wanted = found if wanted is None else wanted
                off = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
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
            seconds[variant] += timing.laps(run.step, device, LAP)
    for row in (row for row in rows if row["variant"] in runs):
        with mode_of(row["variant"]):
            on_device = device_ms(runs[row["variant"]], device)
        took = seconds[row["variant"]]
        row |= {"least_ms": 1e3 * min(took), **timing.quantiles(took).columns("wall_ms"),
                "device_ms": on_device, "clock": timing.clock_of(device).__name__}  # fmt: skip
    settings.always = None
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=tuple(GRIDS), quick="three small workloads", models=LAYERS,
        workloads=None, graphs=("fixed", "new"), modes=("inference", "training"), rounds=12,
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS[:2])
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    rows = results.Rows(f"{NAME}_{options.device}", options, options.device)
    names = options.workloads or (QUICK if options.quick else GRIDS)[options.device]
    with pyg_accel.patched():
        for case in results.each(
            list(itertools.product(names, options.models, options.graphs, options.modes))
        ):
            name, kind, graph, mode = case
            found = measure(kind, WORKLOADS[name], options.device, options.variants, options.rounds,
                            fixed=graph == "fixed", train=mode == "training")  # fmt: skip
            rows.add(found, workload=name, model=kind, graph=graph, mode=mode)
    shares = frames.size_ratios(rows.done())
    print(shares.unstack("workload").round(2).to_string())
    for variant, column in shares.items():
        lost = column[column < frames.NOISE].sort_values()
        mean = results.geometric_mean(column)
        print(f"{variant}: geometric mean {mean:.2f}, {len(lost)} of {len(column)} lost")
        for case, share in lost.items():
            print(f"  {share:.2f}  {', '.join(case)}")
    plot.beside(rows.path)


if __name__ == "__main__":
    main()
