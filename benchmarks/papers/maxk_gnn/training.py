"""MaxK against ReLU in training: accuracy by k, and loss by epoch (MaxK-GNN, figures 4, 9 and 10).

    python -m benchmarks.papers.maxk_gnn.training --datasets community --hidden 64 --nodes 3000
    PYG_ACCEL_DATA=DIR python -m benchmarks.papers.maxk_gnn.training [--device cuda] [--jobs 8]
    PYG_ACCEL_DATA=DIR python -m benchmarks.papers.maxk_gnn.training --curves --datasets Cora
    python -m benchmarks.papers.maxk_gnn.training --square

SAGE, GCN and GIN of 3 layers on real data and on community graphs with noisy features and labels.
A row of maxk_accuracy.csv (with the community graph of maxk_training.csv) is a training; `accuracy`
is that of the test nodes at the epoch where the validation nodes did best. With `--curves` a row of
maxk_convergence.csv is an epoch. A training that the file has is not repeated. `--square` trains
MLPs that learn y = x^2 and draws them.
"""

import functools
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module, ModuleList, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import pyg_accel
from benchmarks.papers import figures, tables
from benchmarks.tools import datasets, plot, results, tasks
from benchmarks.tools.graphs import community_task
from benchmarks.tools.timing import captured
from benchmarks.tools.variants import epoch_of
from pyg_accel.layers import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv

FOLDER = "papers/maxk_gnn"
DATASETS = ("Cora", "CiteSeer", "twitch-fr", "facebook-pages", "cornell5")
LAYERS, HIDDEN, SEEDS, EPOCHS = 3, 256, 5, 60
DROPOUT, RATE = 0.3, 0.003
CHECK_EVERY = 3  # epochs from one validation to the next
ROW_EVERY = 2  # epochs of a curve
KEY = ["dataset", "model", "k", "seed", "hidden", "epochs"]
CONVS: dict[str, Callable[[int], Module]] = {
    "SAGE": lambda hidden: SAGEConv(hidden, hidden),
    "GCN": lambda hidden: GCNConv(hidden, hidden),
    "GIN": lambda hidden: GINConv(Linear(hidden, hidden)),
}
MAXK_CONVS: dict[str, Callable[[int, int], Module]] = {
    "SAGE": lambda hidden, k: MaxKSAGEConv(hidden, hidden, k=k),
    "GCN": lambda hidden, k: MaxKGCNConv(hidden, hidden, k=k),
    "GIN": lambda hidden, k: MaxKGINConv(Linear(hidden, hidden), k=k),
}


class Network(Module):
    """The models of the MaxK-GNN paper: a linear map, layers behind a nonlinearity, a linear map.

    So every aggregation is of `hidden` columns and has a nonlinearity in front; the input features,
    however wide, are never aggregated.
    """

    def __init__(
        self, k: int, kind: str, inputs: int, hidden: int, classes: int, *, dropout: float = 0.0,
        norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.last = Linear(inputs, hidden), Linear(hidden, classes)
        self.act = torch.nn.Identity() if k else ReLU()  # MaxK layers have theirs inside
        self.convs = ModuleList(
            MAXK_CONVS[kind](hidden, k) if k else CONVS[kind](hidden) for _ in range(LAYERS)
        )
        norms = [LayerNorm(hidden) if norm else torch.nn.Identity() for _ in range(LAYERS)]
        self.norms, self.dropout = ModuleList(norms), Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(self.dropout(self.act(x)), edge_index))
        return self.last(x)


def build(k: int, *args: Any, seed: int = 0, **options: Any) -> Module:
    """A `Network`; of one seed, those of all k and that with ReLU (k = 0) begin alike."""
    torch.manual_seed(seed)
    return Network(k, *args, **options)


def load(name: str, device: str = "cpu", *, nodes: int = 20_000) -> Data:
    """A data set with its task: gender for cornell5, whose own features and classes are random.

    The community graph has 20 neighbours a node and is hard enough to be got wrong: 40% of its
    edges lead astray, a node's own features hardly tell its class, 5% of the labels are random.
    """
    if name == "community":
        data = community_task(nodes, 20 * nodes, 64, 8, inside=0.6, signal=1.25, label_noise=0.05)
        return data.to(device)
    root = os.environ.get("PYG_ACCEL_DATA")
    if root is None:
        raise SystemExit("PYG_ACCEL_DATA does not name the folder of the data sets")
    if name == "twitch-fr":
        return datasets.load_twitch_fr(root).to(device)
    data = tasks.cornell5(root) if name == "cornell5" else datasets.load_task(name, root)
    return data.to(device)


def network(data: Data, kind: str, k: int, seed: int = 0, *, hidden: int = HIDDEN) -> Module:
    sizes = (data.num_features, hidden, int(data.y.max()) + 1)
    return build(k, kind, *sizes, seed=seed, dropout=DROPOUT, norm=True).to(data.x.device)


def training_step(model: Module, data: Data, **options: Any) -> Callable[[], Tensor]:
    chosen = data.train_mask.nonzero().squeeze(1)
    return epoch_of(model, (data.x, data.edge_index), data.y, chosen, lr=RATE, **options)


def validation(model: Module, data: Data) -> Callable[[], Tensor]:
    """A function that fills a tensor with the accuracies of the validation and the test nodes."""
    parts = [mask.nonzero().squeeze(1) for mask in (data.val_mask, data.test_mask)]
    found = torch.zeros(2, device=data.x.device)

    def validate() -> Tensor:
        with torch.no_grad():
            right = (model(data.x, data.edge_index).argmax(dim=1) == data.y).float()
            found.copy_(torch.stack([right.index_select(0, part).mean() for part in parts]))
        return found

    return validate


def train(
    data: Data, kind: str, k: int, seed: int, *, hidden: int = HIDDEN, epochs: int = EPOCHS
) -> dict[str, float]:
    """One training; the accuracy of the test nodes at the epoch that validation chose.

    On a GPU, steps are CUDA graphs: these graphs are small, and Python would take most of the time.
    """
    model, on_gpu = network(data, kind, k, seed, hidden=hidden), data.x.is_cuda
    step, validate = training_step(model, data, capturable=on_gpu), validation(model, data)
    found = validate()
    if on_gpu:
        recorded = step, validate  # own the tensors that a replay works on
        step = captured(recorded[0])
        model.eval()  # of which a recording takes note as of all else
        validate = captured(recorded[1])
    best, accuracy = -1.0, 0.0
    for epoch in range(1, epochs + 1):
        model.train()
        step()
        if epoch % CHECK_EVERY and epoch != epochs:
            continue
        model.eval()
        validate()
        validated, tested = found.tolist()
        if validated > best:
            best, accuracy = validated, tested
    return {"accuracy": 100 * accuracy, "validation": 100 * best}


def curve(
    data: Data, kind: str, k: int, seed: int, *, hidden: int = HIDDEN, epochs: int = EPOCHS
) -> Iterator[dict[str, Any]]:
    """Loss of the training nodes, accuracies of the others in per cent, by epoch."""
    model = network(data, kind, k, seed, hidden=hidden)
    step, validate = training_step(model, data), validation(model, data)
    for epoch in range(1, epochs + 1):
        model.train()
        loss = float(step())
        if epoch == 1 or epoch % ROW_EVERY == 0:
            model.eval()
            validated, tested = validate().tolist()
            yield {"epoch": epoch, "loss": loss, "validation": 100 * validated,
                   "accuracy": 100 * tested}  # fmt: skip


@functools.lru_cache(maxsize=1)
def _data(name: str, device: str, nodes: int) -> Data:
    return load(name, device, nodes=nodes)


def rows_of(case: tuple[Any, ...], device: str, nodes: int, curves: bool) -> list[dict[str, Any]]:
    """The rows of a training, in whichever process."""
    name, kind, k, seed, hidden, epochs = case
    args, options = (
        (_data(name, device, nodes), kind, k, seed),
        {"hidden": hidden, "epochs": epochs},
    )
    return list(curve(*args, **options)) if curves else [train(*args, **options)]


@contextmanager
def mapping(jobs: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map`, in so many processes, under `patch()`."""
    if jobs == 1:
        with pyg_accel.patched():
            yield map
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=pyg_accel.patch) as pool:
        yield pool.map


def learn_square(steps: int = 1_500, sizes: Sequence[int] = (4, 8, 16, 32, 64)) -> pd.DataFrame:
    """Learn y = x^2 by networks of one hidden layer: a row a network and point.

    MaxK keeps a quarter of the hidden units, rounded up, as in the paper.
    """
    x, rows = torch.linspace(-1, 1, 201).unsqueeze(1), []
    for name, size in itertools.product(("ReLU", "MaxK"), sizes):
        torch.manual_seed(0)
        act: Module = ReLU() if name == "ReLU" else MaxK(math.ceil(size / 4))
        model = Sequential(Linear(1, size), act, Linear(size, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - x.square()).square().mean().backward()
            optimizer.step()
        points = zip(x.flatten().tolist(), model(x).flatten().tolist(), strict=True)
        rows += [{"act": name, "hidden": size, "x": a, "y": b} for a, b in points]
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = results.parser(
        __doc__, devices=("cpu", "cuda"), datasets=DATASETS, models=CONVS, k=(32,), hidden=HIDDEN,
        seeds=SEEDS, epochs=EPOCHS, nodes=20_000, jobs=1, curves=False, square=False,
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.square:
        folder = options.out or results.FOLDER / FOLDER
        plot.save(figures.draw_square(learn_square()), folder / "maxk_square.png")
        return
    if options.quick:
        options.datasets, options.nodes, options.hidden = ("community",), 2_000, 32
        options.k, options.seeds, options.epochs = (2, 8), 2, 10
    name = "maxk_convergence" if options.curves else (
        "maxk_training" if "community" in options.datasets else "maxk_accuracy")  # fmt: skip
    rows = results.Rows(f"{FOLDER}/{name}", options, options.device, KEY, layers=LAYERS)
    cases = rows.missing(itertools.product(
        options.datasets, options.models, (0, *options.k), range(options.seeds), (options.hidden,),
        (options.epochs,),
    ))  # fmt: skip
    with mapping(options.jobs) as run:
        work = functools.partial(rows_of, device=options.device, nodes=options.nodes,
                                 curves=options.curves)  # fmt: skip
        for case, found in zip(results.each(cases, "training"), run(work, cases), strict=True):
            head = dict(zip(KEY, case, strict=True))
            head["k"] = case[2] if options.curves else case[2] or None
            rows.add(found, **head)
    make = tables.convergence if options.curves else tables.maxk_accuracy
    print("\n".join(make(rows.done())))
    plot.beside(rows.path)


if __name__ == "__main__":
    main()
