"""MaxK against ReLU in training: accuracy and epoch time by k, as in the MaxK-GNN paper.

    python -m benchmarks.maxk_training [--quick] [--device cuda] [--datasets NAME ...]
    python -m benchmarks.maxk_training --only timings [--device cpu]    # or trainings
    python -m benchmarks.maxk_training --plot      # draw the CSV files once more

SAGE, GCN and GIN of 3 layers, 256 hidden, on Cora and Facebook pages (from the folder that
PYG_ACCEL_DATA names) and on community graphs with noisy features and labels; 5 seeds. Writes
maxk_training.csv (a row a training), maxk_training_epochs.csv (a row a setting) and two pictures:
accuracy and speed-up by k (figure 9 of the paper) and MLPs that learn y = x^2 (figure 4).

`accuracy` is that of the test nodes at the epoch where the validation nodes did best. Speed-ups are
over the same network with ReLU under `patched()`. Their limit, by Amdahl's law, is what an
aggregation that costs nothing would give: the same network on the graph without its edges. On a CPU
MaxK may pass it, since its matrix products take less time too. What is trained on one machine may
be timed on another: the tables name both.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_accel
from benchmarks import machine, results
from benchmarks.datasets import load_task
from benchmarks.graphs import community_task
from benchmarks.maxk_models import CONVS, build

NAME = "maxk_training"
DATASETS = ("Cora", "facebook-pages", "community")
KS = (2, 4, 8, 16, 32, 64, 128)  # of 256
LAYERS, HIDDEN, SEEDS, EPOCHS = 3, 256, 5, 120
DROPOUT, RATE = 0.3, 0.003
CHECK_EVERY = 3  # epochs from one validation to the next
ROUNDS = 5  # of epochs that are timed in turns
Setting = tuple[str, int | None]  # kind of layer; k, or None for ReLU


def load(name: str, device: str = "cpu", *, nodes: int = 20_000) -> Data:
    """A data set, or the community graph: 20 neighbours a node, and hard enough to be got wrong.

    40% of its edges lead astray, a node's own features hardly tell its class, and 5% of the labels
    are random.
    """
    if name == "community":
        data = community_task(nodes, 20 * nodes, 64, 8, inside=0.6, signal=1.25, label_noise=0.05)
    else:
        data = load_task(name, os.environ.get("PYG_ACCEL_DATA"))
    return data.to(device)


def available(names: Sequence[str], tell: Callable[[str], None] = print) -> list[str]:
    """Those data sets whose files are there; the others are named."""
    found = []
    for name in names:
        try:
            load(name, nodes=100)
        except FileNotFoundError as missing:
            tell(f"{name} is left out: {missing}")
        else:
            found.append(name)
    return found


def network(
    data: Data, setting: Setting, *, hidden: int = HIDDEN, seed: int = 0
) -> torch.nn.Module:
    kind, k = setting
    sizes = (data.num_features, hidden, LAYERS, int(data.y.max()) + 1)
    return build(k, kind, *sizes, seed=seed, dropout=DROPOUT, norm=True).to(data.x.device)


def training_step(
    model: torch.nn.Module, data: Data, *, capturable: bool = False
) -> Callable[[], Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, capturable=capturable)
    x, edge_index, chosen = data.x, data.edge_index, data.train_mask.nonzero().squeeze(1)
    y = data.y[chosen]

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x, edge_index).index_select(0, chosen), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def validation(model: torch.nn.Module, data: Data) -> Callable[[], torch.Tensor]:
    """A function that fills a tensor with the accuracies of the validation and the test nodes."""
    parts = [mask.nonzero().squeeze(1) for mask in (data.val_mask, data.test_mask)]
    found = torch.zeros(2, device=data.x.device)

    def validate() -> torch.Tensor:
        with torch.no_grad():
            right = (model(data.x, data.edge_index).argmax(dim=1) == data.y).float()
            found.copy_(torch.stack([right.index_select(0, part).mean() for part in parts]))
        return found

    return validate


def train(data: Data, setting: Setting, seed: int, *, hidden: int, epochs: int) -> dict[str, float]:
    """One training; the accuracy of the test nodes at the epoch that validation chose.

    On a GPU, steps are CUDA graphs: these graphs are small, and Python would take most of the time.
    """
    model = network(data, setting, hidden=hidden, seed=seed)
    on_gpu = data.x.is_cuda
    step, validate = training_step(model, data, capturable=on_gpu), validation(model, data)
    found = validate()
    if on_gpu:
        from benchmarks.gpu_machine import captured

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


def time_epochs(data: Data, kind: str, ks: Sequence[int], *, hidden: int, rounds: int = ROUNDS,
                ) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Epochs of stock PyG with ReLU, `patched()` with ReLU, that without edges, and MaxK."""
    edgeless = data.clone()
    edgeless.edge_index = data.edge_index[:, :0]
    cases: dict[str, tuple[Data, int | None, bool]] = {
        "ReLU, stock": (data, None, False),
        "ReLU, patched": (data, None, True),
        "ReLU, no edges": (edgeless, None, True),
    } | {f"MaxK {k}": (data, k, True) for k in ks}
    steps = {}
    for name, (graph, k, patched) in cases.items():
        model = network(graph, (kind, k), hidden=hidden)
        if patched:
            pyg_accel.patch(model)  # this one alone, so that cases can take turns
        steps[name] = training_step(model, graph)
    for name, epoch_ms in _times(steps, rounds, on_gpu=data.x.is_cuda).items():
        yield {"case": name, "k": cases[name][1], "epoch_ms": epoch_ms}
    pyg_accel.unpatch()


def _times(steps: dict[str, Callable[[], Any]], rounds: int, *, on_gpu: bool) -> dict[str, float]:
    if on_gpu:
        from benchmarks.gpu_machine import timed

        return {name: timed(step).median for name, step in steps.items()}
    took: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds + 2):  # two to warm up
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if done > 1:
                took[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(each) for name, each in took.items()}


def experiment(
    datasets: dict[str, Data], kinds: Sequence[str], ks: Sequence[int], *, hidden: int = HIDDEN,
    seeds: int = SEEDS, epochs: int = EPOCHS,
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """All trainings, a row each; and epoch times, a row a setting."""
    trainings = train_all(datasets, kinds, ks, hidden=hidden, seeds=seeds, epochs=epochs)
    return trainings, time_all(datasets, kinds, ks, hidden=hidden)


def train_all(
    datasets: dict[str, Data], kinds: Sequence[str], ks: Sequence[int], *, hidden: int, seeds: int,
    epochs: int,
) -> pd.DataFrame:  # fmt: skip
    """A row a training."""
    plan = list(itertools.product(datasets, kinds, (None, *ks), range(seeds)))
    rows = []
    with pyg_accel.patched():
        for name, kind, k, seed in (progress := tqdm(plan, unit="training")):
            progress.set_postfix_str(f"{name}, {kind}, {'ReLU' if k is None else f'k={k}'}")
            found = train(datasets[name], (kind, k), seed, hidden=hidden, epochs=epochs)
            rows.append({"dataset": name, "model": kind, "k": k, "seed": seed, **found})
    return pd.DataFrame(rows)


def time_all(
    datasets: dict[str, Data], kinds: Sequence[str], ks: Sequence[int], *, hidden: int
) -> pd.DataFrame:
    """A row a setting that was timed."""
    rows = []
    plan = list(itertools.product(datasets, kinds))
    for name, kind in (progress := tqdm(plan, unit="timing")):
        progress.set_postfix_str(f"{name}, {kind}")
        for row in time_epochs(datasets[name], kind, ks, hidden=hidden):
            rows.append({"dataset": name, "model": kind, **row})
    return pd.DataFrame(rows)


def table(trainings: pd.DataFrame, timings: pd.DataFrame) -> pd.DataFrame:
    """A row a setting: accuracy as mean and standard deviation, epoch, speed-ups, and who wins.

    `loses` marks accuracies below ReLU's by more than the two standard deviations together, and
    epochs that are not shorter.
    """
    rows = []
    for (dataset, model), group in trainings.groupby(["dataset", "model"], sort=False):
        times = timings[(timings["dataset"] == dataset) & (timings["model"] == model)]
        epoch = times.set_index("case")["epoch_ms"]
        dense, limit = epoch["ReLU, patched"], epoch["ReLU, patched"] / epoch["ReLU, no edges"]
        found = group.groupby("k", dropna=False)["accuracy"].agg(["mean", "std"]).fillna(0.0)
        relu = found[found.index.isna()].iloc[0]
        for k, (mean, std) in found.sort_index(na_position="first").iterrows():
            ours = dense if pd.isna(k) else epoch[f"MaxK {int(k)}"]
            stock = epoch["ReLU, stock"]
            worse = mean < relu["mean"] - relu["std"] - std
            slower = not pd.isna(k) and ours >= dense
            rows.append({
                "dataset": dataset, "model": model, "k": "ReLU" if pd.isna(k) else int(k),
                "accuracy %": f"{mean:.1f} ± {std:.1f}", "epoch ms": round(ours, 2),
                "over patched": round(dense / ours, 2), "over stock": round(stock / ours, 2),
                "limit": round(limit, 2),
                "loses": ", ".join(["accuracy"] * int(worse) + ["time"] * int(slower)),
            })  # fmt: skip
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, to see that all of it works")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--models", nargs="+", choices=CONVS, default=list(CONVS))
    parser.add_argument("--k", nargs="+", type=int, default=list(KS))
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--nodes", type=int, default=20_000, help="of the community graph")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--only", choices=("trainings", "timings"), help="measure no more")
    parser.add_argument("--plot", action="store_true", help="draw the CSV files that are there")
    parser.add_argument("--csv-only", action="store_true", help="draw nothing")
    options = parser.parse_args(arguments)
    hidden, nodes = options.hidden, options.nodes
    if options.quick:
        hidden, nodes, options.k, options.seeds, options.epochs = 32, 2_000, [2, 8], 2, 10
        options.out = options.out / "quick"
    options.out.mkdir(parents=True, exist_ok=True)
    files = [options.out / f"{NAME}.csv", options.out / f"{NAME}_epochs.csv"]
    if not options.plot:
        names = available(options.datasets)
        datasets = {name: load(name, options.device, nodes=nodes) for name in names}
        what = datasets, options.models, options.k
        facts = _facts(options.device) | {"hidden": hidden, "layers": LAYERS}
        if options.only != "timings":
            found = train_all(*what, hidden=hidden, seeds=options.seeds, epochs=options.epochs)
            _write(found.assign(**facts), files[0])
        if options.only != "trainings":
            _write(time_all(*what, hidden=hidden).assign(**facts), files[1])
    if not all(file.exists() for file in files):
        return
    trainings, timings = (results.read(file) for file in files)
    print(table(trainings, timings).to_string(index=False))
    if options.csv_only:
        return
    from benchmarks import maxk_plot  # matplotlib is not on every machine that measures

    maxk_plot.save(maxk_plot.draw_by_k(trainings, timings), options.out / f"{NAME}.png")
    maxk_plot.save(maxk_plot.draw_square(maxk_plot.learn_square()), options.out / "maxk_square.png")


def _write(frame: pd.DataFrame, file: Path) -> None:
    frame.to_csv(file, index=False, float_format="%.5g")
    print(f"written: {file}")


def _facts(device: str) -> dict[str, Any]:
    if device != "cuda":
        return machine.facts()
    from benchmarks import gpu_machine

    return gpu_machine.facts()


if __name__ == "__main__":
    main()
