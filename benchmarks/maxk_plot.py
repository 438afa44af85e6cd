"""The pictures of the MaxK experiments: figures 4 and 9 of the MaxK-GNN paper, of our own runs."""

import math
from pathlib import Path

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch.nn import Linear, Module, ReLU, Sequential

from pyg_accel.layers import MaxK

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ACCURACY, SPEED, RELU = "#3b5b92", "#2a7f62", "#8a8f98"
SIZES = (4, 8, 16, 32, 64)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    print(f"written: {path}")


def draw_by_k(trainings: pd.DataFrame, timings: pd.DataFrame) -> Figure:
    """A panel a data set and model: accuracy (left) and speed-up over ReLU (right) by k."""
    datasets, models = (list(dict.fromkeys(trainings[c])) for c in ("dataset", "model"))
    figure, axes = plt.subplots(
        len(datasets), len(models), squeeze=False, sharex=True,
        figsize=(3.6 * len(models) + 0.8, 2.5 * len(datasets) + 0.9),
    )  # fmt: skip
    for row, dataset in zip(axes, datasets, strict=True):
        for axis, model in zip(row, models, strict=True):
            mine = (frame[(frame["dataset"] == dataset) & (frame["model"] == model)]
                    for frame in (trainings, timings))  # fmt: skip
            handles = _panel(axis, *mine)
            axis.set_title(f"{dataset}, {model}", fontsize="medium")
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize="small")
    figure.supxlabel("k", y=0.06, fontsize="medium")
    figure.suptitle(_where(timings), fontsize="small")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _panel(axis: plt.Axes, trainings: pd.DataFrame, timings: pd.DataFrame) -> list:
    found = trainings.groupby("k", dropna=False)["accuracy"].agg(["mean", "std"]).fillna(0.0)
    relu, found = found[found.index.isna()].iloc[0], found[found.index.notna()]
    bars = axis.errorbar(found.index, found["mean"], found["std"], color=ACCURACY, marker="o",
                         markersize=3, capsize=2, label="accuracy, MaxK (%)")  # fmt: skip
    line = axis.axhline(relu["mean"], color=RELU, label="accuracy, ReLU")
    axis.axhspan(relu["mean"] - relu["std"], relu["mean"] + relu["std"], color=RELU, alpha=0.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(found.index, labels=[f"{k:g}" for k in found.index], fontsize="x-small")
    axis.tick_params(axis="y", labelcolor=ACCURACY, labelsize="small")
    axis.minorticks_off()

    epoch = timings.set_index("case")["epoch_ms"]
    ours = timings[timings["k"].notna()]
    other = axis.twinx()
    dense = epoch["ReLU, patched"]
    (speed,) = other.plot(ours["k"], dense / ours["epoch_ms"], color=SPEED, marker="s",
                          markersize=3, label="speed-up over patched ReLU")  # fmt: skip
    limit = other.axhline(dense / epoch["ReLU, no edges"], color=SPEED, linestyle="--",
                          label="its limit (Amdahl)")  # fmt: skip
    one = other.axhline(1, color=SPEED, linewidth=0.6, linestyle=":", label="as fast as ReLU")
    other.tick_params(axis="y", labelcolor=SPEED, labelsize="small")
    other.set_ylim(bottom=0)
    return [bars, line, speed, limit, one]


def _where(frame: pd.DataFrame) -> str:
    row = frame.iloc[-1]
    if "torch" not in row:
        return ""
    machine = row["gpu"] if "gpu" in row else f"{row['cpu']}, {row['threads']} threads"
    return (f"{row['layers']} layers, {row['hidden']} hidden, {machine}, torch {row['torch']} "
            f"({row['commit']}, {row['date']})")  # fmt: skip


def learn_square(steps: int = 1_500, sizes: tuple[int, ...] = SIZES) -> pd.DataFrame:
    """Learn y = x^2 by networks of one hidden layer: a row a network and point.

    MaxK keeps a quarter of the hidden units, rounded up, as in the paper.
    """
    x = torch.linspace(-1, 1, 201).unsqueeze(1)
    rows = []
    for name, size in ((name, size) for name in ("ReLU", "MaxK") for size in sizes):
        torch.manual_seed(0)
        act: Module = ReLU() if name == "ReLU" else MaxK(math.ceil(size / 4))
        model = Sequential(Linear(1, size), act, Linear(size, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - x.square()).square().mean()
            loss.backward()
            optimizer.step()
        points = zip(x.flatten().tolist(), model(x).flatten().tolist(), strict=True)
        rows += [{"act": name, "hidden": size, "x": a, "y": b} for a, b in points]
    return pd.DataFrame(rows)


def draw_square(frame: pd.DataFrame) -> Figure:
    """What the networks learnt, and their errors by the number of hidden units."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    errors = frame.assign(error=(frame["y"] - frame["x"] ** 2) ** 2)
    errors = errors.groupby(["act", "hidden"], sort=False)["error"].mean() ** 0.5
    for axis, act in zip(axes, ("MaxK", "ReLU"), strict=False):
        for hidden, part in frame[frame["act"] == act].groupby("hidden"):
            axis.plot(part["x"], part["y"], linewidth=1, label=f"{hidden} hidden units")
        axis.plot(part["x"], part["x"] ** 2, color="black", linestyle=":", label="x²")
        axis.set_title(act)
        axis.legend(fontsize="x-small")
    for act, colour in (("MaxK", SPEED), ("ReLU", RELU)):
        axes[2].plot(errors[act].index, errors[act], marker="o", color=colour, label=act)
    axes[2].set(xscale="log", yscale="log", xlabel="hidden units", title="root mean square error")
    axes[2].set_xticks(list(errors["MaxK"].index), labels=list(errors["MaxK"].index))
    axes[2].minorticks_off()
    axes[2].legend(fontsize="x-small")
    figure.tight_layout()
    return figure
