"""The command line of an application of examples/applications: options, training, scores."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tqdm import trange

from benchmarks.tools import tasks

Train = Callable[[torch.nn.Module, torch.optim.Optimizer, Any], float]


def run(
    about: str | None,
    data: Sequence[str],
    build: Callable[[Any], torch.nn.Module],
    train: Train,
    test: Callable[[torch.nn.Module, Any], float],
    *,
    epochs: int,
    lr: float,
    weight_decay: float = 0.0,
    score: str = "accuracy",
    batches: Callable[[Any, int | None], Iterable[Any]] | None = None,
    of: str = "",
    device: bool = True,
) -> None:
    """Train a model, and print its score before and after.

    Args:
        about: docstring of the program; its first line describes the command.
        data: names of its tasks (`tasks.py`), by default the first that can be had.
        build: makes the model for the data.
        train: trains it on a batch; returns the loss.
        test: returns its score.
        epochs: by default.
        lr: of Adam.
        weight_decay: of Adam.
        score: what `test` returns.
        batches: makes batches of the data; None trains on all of it at once.
        of: what is batched, for the help of ``--batch-size``.
        device: the program runs on a GPU too.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--data", default=tasks.first(*data), help=f"{', '.join(data)}, NAME@0.1")
    if batches is not None:
        parser.add_argument("--batch-size", type=int, help=of)
    parser.add_argument("--epochs", type=int, default=epochs)
    if device:
        parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    where = options.device if device else "cpu"
    torch.manual_seed(0)
    loaded = tasks.load(options.data).to(where)
    model = build(loaded).to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=weight_decay)
    print(f"{options.data}: {score} {test(model, loaded):.3f} before training")
    loader = [loaded] if batches is None else batches(loaded, options.batch_size)
    for _ in (progress := trange(options.epochs, unit="epoch")):
        for batch in loader:
            loss = train(model, optimizer, batch)
        progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
    print(f"{options.data}: {score} {test(model, loaded):.3f} after {options.epochs} epochs")
