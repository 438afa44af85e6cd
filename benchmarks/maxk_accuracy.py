"""Accuracy of MaxK with k = 32 of 256 against ReLU on five real data sets.

    python -m benchmarks.maxk_accuracy [--datasets NAME ...] [--models SAGE ...] [--k 32]

The networks and the training are those of `maxk_training`. Data are read from the folder that
PYG_ACCEL_DATA names. A row is a training; it is written when that is over, and what
maxk_accuracy.csv has already is not trained again.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_accel
from benchmarks import machine, results, tasks
from benchmarks.datasets import load_task, load_twitch_fr
from benchmarks.maxk_models import CONVS
from benchmarks.maxk_training import HIDDEN, LAYERS, SEEDS, train

NAME = "maxk_accuracy"
DATASETS = ("Cora", "CiteSeer", "twitch-fr", "facebook-pages", "cornell5")
EPOCHS = 60
KEY = ["dataset", "model", "k", "seed", "hidden", "epochs"]


def load(name: str, root: str) -> Data:
    """A data set with its task: gender for cornell5, whose own features and classes are random."""
    if name == "twitch-fr":
        return load_twitch_fr(root)
    return tasks.cornell5(root) if name == "cornell5" else load_task(name, root)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--models", nargs="+", choices=CONVS, default=["SAGE"])
    parser.add_argument("--k", nargs="+", type=int, default=[32])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    options = parser.parse_args(arguments)
    root = os.environ.get("PYG_ACCEL_DATA")
    if root is None:
        raise SystemExit("PYG_ACCEL_DATA does not name the folder of the data sets")
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{NAME}.csv"
    rows = results.read(file).to_dict("records") if file.exists() else []
    done = {tuple(0 if pd.isna(row[name]) else row[name] for name in KEY) for row in rows}
    plan = itertools.product(
        options.datasets, options.models, (0, *options.k), range(options.seeds),
        (options.hidden,), (options.epochs,),
    )  # fmt: skip
    missing = [case for case in plan if case not in done]
    facts = machine.facts() | {"layers": LAYERS}
    data, loaded = Data(), ""
    with pyg_accel.patched():
        for case in (progress := tqdm(missing, unit="training")):
            name, kind, k, seed, hidden, epochs = case
            progress.set_postfix_str(f"{name}, {kind}, {f'k={k}' if k else 'ReLU'}")
            if name != loaded:
                data, loaded = load(name, root), name
            found = train(data, (kind, k or None), seed, hidden=hidden, epochs=epochs)
            rows.append(dict(zip(KEY, (name, kind, k or None, seed, hidden, epochs), strict=True))
                        | found | facts)  # fmt: skip
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.5g")
    print(results.read(file).groupby(["dataset", "model", "k"], dropna=False, sort=False)
          ["accuracy"].agg(["mean", "std", "count"]).round(2).to_string())  # fmt: skip


if __name__ == "__main__":
    main()
