"""Accuracy of MaxK, k of 256, against ReLU on five real data sets.

    python -m benchmarks.maxk_accuracy [--datasets NAME ...] [--models SAGE ...] [--k 32]
    python -m benchmarks.maxk_accuracy --device cuda --jobs 8      # trainings at a time

The networks and the training are those of `maxk_training`. Data are read from the folder that
PYG_ACCEL_DATA names. A row is a training; it is written when that is over, and what
maxk_accuracy.csv has already is not trained again.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_accel
from benchmarks import gpu_machine, results, tasks
from benchmarks.datasets import load_task, load_twitch_fr
from benchmarks.maxk_models import CONVS
from benchmarks.maxk_training import HIDDEN, LAYERS, SEEDS, train

NAME = "maxk_accuracy"
DATASETS = ("Cora", "CiteSeer", "twitch-fr", "facebook-pages", "cornell5")
EPOCHS = 60
KEY = ["dataset", "model", "k", "seed", "hidden", "epochs"]
Case = tuple[str, str, int, int, int, int]  # in the order of KEY; k = 0 is ReLU


def load(name: str, root: str) -> Data:
    """A data set with its task: gender for cornell5, whose own features and classes are random."""
    if name == "twitch-fr":
        return load_twitch_fr(root)
    return tasks.cornell5(root) if name == "cornell5" else load_task(name, root)


@functools.lru_cache(maxsize=1)
def _data(name: str, device: str) -> Data:
    return load(name, os.environ["PYG_ACCEL_DATA"]).to(device)


def accuracy_of(case: Case, device: str) -> dict[str, float]:
    """The accuracies of one training."""
    name, kind, k, seed, hidden, epochs = case
    return train(_data(name, device), (kind, k or None), seed, hidden=hidden, epochs=epochs)


@contextmanager
def mapping(jobs: int) -> Iterator[Callable[..., Iterator[dict[str, float]]]]:
    """`map`, in so many processes, under `patch()`."""
    if jobs == 1:
        with pyg_accel.patched():
            yield map
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=pyg_accel.patch) as pool:
        yield pool.map


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--models", nargs="+", choices=CONVS, default=["SAGE"])
    parser.add_argument("--k", nargs="+", type=int, default=[32])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=results.FOLDER)
    options = parser.parse_args(arguments)
    if "PYG_ACCEL_DATA" not in os.environ:
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
    facts = gpu_machine.facts_of(options.device) | {"layers": LAYERS}
    with mapping(options.jobs) as run:
        found = run(functools.partial(accuracy_of, device=options.device), missing)
        for case, right in zip(tqdm(missing, unit="training"), found, strict=True):
            head = dict(zip(KEY, case, strict=True))
            rows.append(head | {"k": case[2] or None} | right | facts)
            pd.DataFrame(rows).to_csv(file, index=False, float_format="%.5g")
    print(results.read(file).groupby(["dataset", "model", "k"], dropna=False, sort=False)
          ["accuracy"].agg(["mean", "std", "count"]).round(2).to_string())  # fmt: skip


if __name__ == "__main__":
    main()
