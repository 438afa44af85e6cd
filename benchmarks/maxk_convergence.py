"""Loss and accuracy of MaxK and ReLU, epoch by epoch (MaxK-GNN, figure 10).

    python -m benchmarks.maxk_convergence [--datasets NAME ...] [--device cuda] [--seeds 3]

The networks and the training are those of `maxk_training`, the data those of `maxk_accuracy`: real,
from the folder that PYG_ACCEL_DATA names. Accuracies are in evaluation mode, after the epoch. A row
of results/maxk_convergence.csv is an epoch; a training that the file has is not made again.
"""

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, results
from benchmarks.maxk_accuracy import DATASETS, load
from benchmarks.maxk_models import CONVS
from benchmarks.maxk_training import HIDDEN, Setting, network, training_step, validation

NAME = "maxk_convergence"
KS = (64, 32, 8)  # the paper's
EPOCHS, SEEDS = 120, 3
EVERY = 2  # epochs from one row to the next
NEAR = 0.99  # of the best accuracy of the validation nodes: converged
KEY = ["dataset", "model", "k", "seed"]


def curve(data: Data, setting: Setting, seed: int, epochs: int) -> Iterator[dict[str, Any]]:
    """Loss of the training nodes, accuracies of the others in per cent."""
    model = network(data, setting, hidden=HIDDEN, seed=seed)
    step, validate = training_step(model, data), validation(model, data)
    for epoch in range(1, epochs + 1):
        model.train()
        loss = float(step())
        if epoch == 1 or epoch % EVERY == 0:
            model.eval()
            validated, tested = validate().tolist()
            yield {"epoch": epoch, "loss": loss, "validation": 100 * validated,
                   "accuracy": 100 * tested}  # fmt: skip


def table(frame: pd.DataFrame) -> list[str]:
    """A row a setting, means over the seeds: how far it gets, and after how many epochs."""
    lines = ["| data set | model | nonlinearity | seeds | epochs to 99% of its best validation | "
             "loss at the end | test accuracy at the best validation |",
             "|---|---|---|--:|--:|--:|--:|"]  # fmt: skip
    for (dataset, model, k), group in frame.groupby(KEY[:3], sort=False):
        runs = [run.reset_index(drop=True) for _, run in group.groupby("seed")]
        near = [run.loc[run["validation"] >= NEAR * run["validation"].max(), "epoch"].iloc[0]
                for run in runs]  # fmt: skip
        loss = pd.Series([run["loss"].iloc[-1] for run in runs]).mean()
        right = pd.Series([run.loc[run["validation"].idxmax(), "accuracy"] for run in runs])
        shown = [dataset, model, f"MaxK {k}" if k else "ReLU", str(len(runs)),
                 f"{sum(near) / len(near):.0f}", f"{loss:.3g}", f"{right.mean():.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=["Cora"])
    parser.add_argument("--models", nargs="+", choices=CONVS, default=["SAGE"])
    parser.add_argument("--k", nargs="+", type=int, default=list(KS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    options = parser.parse_args(arguments)
    root = os.environ.get("PYG_ACCEL_DATA")
    if root is None:
        raise SystemExit("PYG_ACCEL_DATA does not name the folder of the data sets")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{NAME}.csv"
    rows: list[dict[str, Any]] = results.read(path).to_dict("records") if path.exists() else []
    done = {tuple(row[key] for key in KEY) for row in rows}
    plan = itertools.product(
        options.datasets, options.models, (0, *options.k), range(options.seeds)
    )
    facts = gpu_machine.facts_of(options.device)
    data, loaded = Data(), ""
    with pyg_accel.patched():
        for case in (progress := tqdm([c for c in plan if c not in done], unit="training")):
            name, kind, k, seed = case
            progress.set_postfix_str(f"{name}, {kind}, {f'k={k}' if k else 'ReLU'}")
            if name != loaded:
                data, loaded = load(name, root).to(options.device), name
            found = list(curve(data, (kind, k or None), seed, options.epochs))
            rows += [dict(zip(KEY, case, strict=True)) | row | facts for row in found]
            pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
    print("\n".join(table(results.read(path))))


if __name__ == "__main__":
    main()
