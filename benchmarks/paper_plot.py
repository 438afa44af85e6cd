"""Pictures of the papers' experiments, from the CSV files of `association_samples`, `shares`, ...

python -m benchmarks.paper_plot
"""

import itertools
from collections.abc import Callable

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.plot import PAGES, STOCK, WON, save
from benchmarks.shares import PARTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLUE = "#6f8fb3"
PART_COLOURS = dict(zip(PARTS, (WON, BLUE, "#d9a441", PAGES), strict=True))


def draw_samples(frame: pd.DataFrame) -> Figure:
    """SENSEi, figure 9: time of both compositions on samples; the line is their median."""
    kinds = list(frame.groupby(["sampling", "model"], sort=False))
    figure, axes = plt.subplots(1, len(kinds), squeeze=False, figsize=(5 * len(kinds), 3.4))
    for axis, ((sampling, model), part) in zip(axes[0], kinds, strict=True):
        families = part[part["family"].notna()]
        for (name, group), colour in zip(
            families.groupby("family", sort=False), (STOCK, WON), strict=True
        ):
            axis.scatter(group["size"], group["ms"], s=8, color=colour, label=name)
            median = group.groupby("size")["ms"].median()
            axis.plot(median.index, median, color=colour, linewidth=1)
        row = part.iloc[0]
        axis.set(xscale="log", yscale="log", xlabel=f"{sampling} of a sample", ylabel="ms",
                 title=f"{model}, {row['in']} to {row['out']}, {row['graph']}")  # fmt: skip
        axis.legend(fontsize="small")
    figure.tight_layout()
    return figure


def _bars(frame: pd.DataFrame, panels: list[str], names: Callable[[pd.Series], str],
          scale: Callable[[pd.DataFrame], pd.Series]) -> Figure:  # fmt: skip
    """A panel a group, a bar a row, made of its parts; `scale` is what 100% is."""
    groups = list(frame.groupby(panels, sort=False))
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    size = (4.2 * columns, 0.8 + 2.6 * lines)
    figure, axes = plt.subplots(lines, columns, squeeze=False, figsize=size)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, (key, group) in zip(axes.flat, groups, strict=False):
        shares = group[list(PARTS)].div(scale(group), axis=0) * 100
        left = pd.Series(0.0, index=group.index)
        labels = [names(row) for _, row in group.iterrows()]
        for part, colour in PART_COLOURS.items():
            axis.barh(range(len(group)), shares[part], left=left, color=colour, label=part)
            left = left + shares[part]
        axis.set_yticks(range(len(group)), labels, fontsize=6)
        axis.invert_yaxis()
        axis.tick_params(axis="x", labelsize=6)
        axis.xaxis.set_major_formatter("{x:g}%")
        axis.set_title(", ".join(map(str, key)), fontsize="small")
    handles, texts = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="lower center", ncols=len(PARTS), fontsize="small")
    figure.tight_layout(rect=(0, 0.4 / size[1], 1, 1))
    return figure


def draw_shares(frame: pd.DataFrame) -> Figure:
    """SENSEi, figure 2, and ES-SpMM, figure 3: parts of a step, in per cent."""
    frame = frame.assign(panel=[
        row["graph"] if row["what"] == "layers" else "models of ES-SpMM"
        for _, row in frame.iterrows()
    ], kind=[
        f"{row['model']}, {row['mode']}" if row["what"] == "layers" else row["mode"]
        for _, row in frame.iterrows()
    ])  # fmt: skip
    return _bars(
        frame, ["panel", "kind"],
        lambda row: (f"{row['in']}, {row['out']}" if row["what"] == "layers"
                     else f"{row['graph']}, {row['model']}"),
        lambda group: group[list(PARTS)].sum(axis=1),
    )  # fmt: skip


def draw_inference(frame: pd.DataFrame) -> Figure:
    """ES-SpMM, figure 9: time of inference in per cent of that with all edges."""

    def name(row: pd.Series) -> str:
        edges = f"S = {row['width']}" if row["width"] else "all edges"
        right = "" if pd.isna(row["accuracy"]) else f", {row['accuracy']:.1%}"
        return edges + right

    def whole(group: pd.DataFrame) -> pd.Series:
        """The time of the parts that makes 100%: shares are the profiler's, times are not."""
        all_edges = group.loc[group["width"] == 0, "ms"].iloc[0]
        return group[list(PARTS)].sum(axis=1) * all_edges / group["ms"]

    return _bars(frame[frame["case"] != "stock"], ["graph", "model"], name, whole)


def draw_dropped(frame: pd.DataFrame) -> Figure:
    """ES-SpMM, figure 5: accuracy by the share of edges that is dropped, of several draws."""
    figure, axis = plt.subplots(figsize=(5, 3.2))
    for graph, group in frame.dropna(subset="accuracy").groupby("graph", sort=False):
        axis.errorbar(100 * group["dropped"], 100 * group["accuracy"], 100 * group["deviation"],
                      marker="o", markersize=3, label=graph)  # fmt: skip
    axis.set(xlabel="edges dropped, %", ylabel="accuracy, test, %")
    axis.legend(fontsize="small")
    figure.tight_layout()
    return figure


def draw_convergence(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 10: loss and accuracy by epoch, means over the seeds."""
    kinds = list(frame.groupby(["dataset", "model"], sort=False))
    size = (9, 3 * len(kinds))
    figure, axes = plt.subplots(len(kinds), 2, squeeze=False, figsize=size)
    for pair, (key, group) in zip(axes, kinds, strict=True):
        for k, part in group.groupby("k", sort=False):
            mean = part.groupby("epoch")[["loss", "accuracy"]].mean()
            for axis, column in zip(pair, mean, strict=True):
                axis.plot(mean.index, mean[column], label=f"MaxK {k}" if k else "ReLU",
                          linewidth=1, color=None if k else "black")  # fmt: skip
        pair[0].set(title=", ".join(key), xlabel="epoch", ylabel="loss, training", yscale="log")
        pair[1].set(xlabel="epoch", ylabel="accuracy, test, %")
        pair[1].legend(fontsize="small")
    figure.tight_layout()
    return figure


def draw_accuracy(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 9: accuracy by k, mean and deviation of the seeds; ReLU is the band."""
    figure, panels = _grid(frame, "dataset")
    for axis, group in panels:
        found = group.groupby("k")["accuracy"].agg(["mean", "std"])
        axis.errorbar(found.index, found["mean"], found["std"], marker="o", markersize=3,
                      color=WON, label="MaxK")  # fmt: skip
        relu = group.loc[group["k"].isna(), "accuracy"]
        axis.axhline(relu.mean(), color=STOCK, label="ReLU")
        axis.axhspan(relu.mean() - relu.std(), relu.mean() + relu.std(), color=STOCK, alpha=0.2)
        axis.set(xlabel="k of 256", ylabel="accuracy, test, %")
        axis.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    return figure


def draw_speed(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 9: epochs over ReLU on cuSPARSE by k; the lines are ours and the limit."""
    figure, panels = _grid(frame[frame["shape"] == "paper"], "graph")
    for axis, group in panels:
        times = group.set_index("case")["epoch_ms"]
        stock = times["ReLU, torch CSR"]
        maxk = group[group["k"].notna()]
        axis.plot(maxk["k"], stock / maxk["epoch_ms"], marker="o", markersize=3, color=WON,
                  label="MaxK")  # fmt: skip
        for case, style in (("ReLU, no edges", "--"), ("ReLU, patched", "-")):
            axis.axhline(stock / times[case], linestyle=style, color=BLUE, label=case)
        axis.axhline(1, color=STOCK, label="ReLU, torch CSR")
        axis.set(xlabel="k of 256", ylabel="times faster")
    figure.axes[0].legend(fontsize="x-small")
    figure.tight_layout()
    return figure


def _grid(frame: pd.DataFrame, rows: str) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A line of panels a data set or graph, a panel a model, over k in powers of 2."""
    lines, models = frame[rows].unique(), frame["model"].unique()
    size = (4 * len(models), 3 * len(lines))
    figure, axes = plt.subplots(len(lines), len(models), squeeze=False, figsize=size)
    panels = []
    for line, model in itertools.product(lines, models):
        axis = axes[list(lines).index(line)][list(models).index(model)]
        group = frame[(frame[rows] == line) & (frame["model"] == model)]
        if group["k"].nunique() < 2:
            axis.axis("off")
            continue
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{line}, {model}")
        panels.append((axis, group))
    return figure, panels


FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "association_samples": draw_samples,
    "shares": draw_shares,
    "sampled_inference": draw_inference,
    "dropped_edges": draw_dropped,
    "maxk_convergence": draw_convergence,
    "maxk_accuracy": draw_accuracy,
    "maxk_epochs_cuda": draw_speed,
}


def main() -> None:
    """Draw every CSV that is there, into a PNG beside it."""
    for name, draw in FIGURES.items():
        for source in sorted(results.FOLDER.glob(f"{name}*.csv")):
            save(draw(results.read(source)), source.with_suffix(".png"))
            print(f"written: {source.with_suffix('.png')}")


if __name__ == "__main__":
    main()
