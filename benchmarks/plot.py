"""Pictures of the results, drawn from the CSV files alone.

    python -m benchmarks.plot

A figure appears for every CSV in results/; colours mark which side of stock or of the best peer a
case falls on.
"""

import math
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks import applications, cpu_epochs, cpu_kernels, results

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WON, LOST, STOCK, PAGES = "#2a7f62", "#c8443c", "#8a8f98", "#c3c7cd"
GPU_COLOURS = {
    "stock": STOCK,
    "stock, compiled": PAGES,
    "torch CSR": "#6f8fb3",
    "patched": WON,
}
APPLICATION_COLOURS = {"large pages": PAGES, "patched": WON, "optimized": "#6f8fb3"}
RANK_COLOURS = {
    "all-gather": STOCK,
    "halo, torch CSR, DDP": "#6f8fb3",
    "pyg_accel, bf16 wire": "#7fc4ab",
    "pyg_accel": WON,
}


def main(*, quick: bool = False) -> None:
    """Draw every CSV that is there, into a PNG beside it."""
    folder = results.QUICK if quick else results.FOLDER
    for name, draw in FIGURES.items():
        source = folder / f"{name}.csv"
        if source.exists():
            picture = source.with_suffix(".png")
            save(draw(results.read(source)), picture)
            print(f"written: {picture}")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw_ratios(shares: pd.DataFrame) -> Figure:
    """A panel a variant, a cell a case: the rival's time over ours; green where we are faster."""
    size = (7 * shares.shape[1], 3 + 0.04 * len(shares))
    figure, axes = plt.subplots(
        1, shares.shape[1], squeeze=False, layout="constrained", figsize=size
    )
    for axis, (variant, column) in zip(axes[0], shares.items(), strict=True):
        table = column.unstack("workload", sort=False)
        image = axis.imshow(table.map(math.log2), cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
        for (row, place), share in np.ndenumerate(table.to_numpy()):
            if share == share:
                axis.text(place, row, f"{share:.2f}", ha="center", va="center", fontsize=6)
        axis.set_xticks(range(table.shape[1]), table.columns, rotation=30, ha="right", fontsize=7)
        axis.set_yticks(range(len(table)), [", ".join(case) for case in table.index], fontsize=7)
        axis.set_title(f"{variant}: times faster")
    figure.colorbar(image, ax=axes, label="log2")
    return figure


def draw_kernels(frame: pd.DataFrame) -> Figure:
    """A panel a graph, a bar a case: time of the best right peer over ours."""
    cases = cpu_kernels.best_peers(frame)
    cases["case"] = cpu_kernels.labels(cases) + ", F=" + cases["F"].astype(str)
    names = list(dict.fromkeys(cases["case"]))
    graphs = list(dict.fromkeys(cases["graph"]))
    size = (2.2 + 2.6 * len(graphs), 0.8 + 0.2 * len(names))
    figure, axes = plt.subplots(1, len(graphs), sharey=True, squeeze=False, figsize=size)
    for axis, graph in zip(axes[0], graphs, strict=True):
        ratios = cases[cases["graph"] == graph].set_index("case")["ratio"].reindex(names)
        axis.barh(names, ratios - 1, left=1, color=[LOST if r < 1 else WON for r in ratios])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(
            xscale="log",
            title=f"{graph}\ngeo. mean {results.geometric_mean(ratios.dropna()):.2f}",
        )
        axis.xaxis.set_major_locator(LogLocator(base=2))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_axisbelow(True)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].invert_yaxis()
    figure.supxlabel("best peer's time / ours (right of 1: faster)", fontsize="medium")
    figure.suptitle(f"CPU kernels, {machine_of(frame)}", fontsize="medium")
    figure.tight_layout()
    return figure


def draw_epochs(frame: pd.DataFrame) -> Figure:
    """A row a data set; time of an epoch and peak memory of a training, stock beside patched."""
    wide = cpu_epochs.side_by_side(frame)
    datasets = list(dict.fromkeys(wide.index.get_level_values("dataset")))
    size = (9, 0.6 + 2.4 * len(datasets))
    figure, axes = plt.subplots(len(datasets), 2, squeeze=False, figsize=size)
    for pair, dataset in zip(axes, datasets, strict=True):
        rows = wide.loc[dataset]
        for axis, column, label in zip(
            pair, ("epoch_ms", "peak_mib"), ("epoch, ms", "peak memory, MiB"), strict=True
        ):
            draw_pairs(axis, rows[column])
            axis.set(title=dataset, ylabel=label)
    axes[0][0].legend(loc="best", fontsize="small")
    figure.suptitle(f"Training on the CPU, {machine_of(frame)}", fontsize="medium")
    figure.tight_layout()
    return figure


def draw_pairs(axis: plt.Axes, rows: pd.DataFrame) -> None:
    """Three bars a model, the ratio to stock above the patched one."""
    at = range(len(rows))
    better = rows["patched"] <= rows["stock"]
    colours = [WON if good else LOST for good in better]
    places = [[i + shift for i in at] for shift in (-0.27, 0, 0.27)]
    axis.bar(places[0], rows["stock"], width=0.27, color=STOCK, label="stock PyG")
    axis.bar(places[1], rows["large pages"], width=0.27, color=PAGES, label="with large pages")
    bars = axis.bar(places[2], rows["patched"], width=0.27, color=colours, label="patched")
    ratios = [f"{ratio:.1f}x" for ratio in rows["stock"] / rows["patched"]]
    axis.bar_label(bars, labels=ratios, fontsize="small")
    axis.set_xticks(list(at), labels=rows.index)
    axis.margins(y=0.12)


def draw_gpu_kernels(frame: pd.DataFrame) -> Figure:
    """A panel a dtype, a bar a graph and width: cuSPARSE's time over ours for weighted sums."""
    sums = frame[frame["op"] == "spmm weighted sum"]
    table = sums.pivot_table("ms", ["dtype", "graph", "F"], "backend", sort=False)
    ratio = (table["cuSPARSE"] / table["pyg_accel"]).unstack("F")
    dtypes = list(dict.fromkeys(sums["dtype"]))
    figure, axes = plt.subplots(1, len(dtypes), sharey=True, squeeze=False, figsize=(10, 6))
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        ratio.loc[dtype].plot.barh(ax=axis, width=0.8, colormap="viridis", legend=False)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=dtype, ylabel="")
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(title="F", loc="upper right")
    figure.supxlabel("cuSPARSE's time / ours (right of 1: faster)", fontsize="medium")
    figure.suptitle(f"Weighted SpMM on {machine_of(frame)}", fontsize="medium")
    figure.tight_layout()
    return figure


def draw_gpu_epochs(frame: pd.DataFrame) -> Figure:
    """A panel a graph: time of an epoch by model and backend; what ran out of memory has no bar."""
    names = list(dict.fromkeys(frame["graph"]))
    figure, axes = plt.subplots(-(-len(names) // 2), 2, squeeze=False, figsize=(10, 6.5))
    for axis, graph in zip(axes.flat, names, strict=False):
        rows = frame[frame["graph"] == graph]
        wide = rows.pivot_table("epoch_ms", "model", "backend", sort=False)
        shown = [b for b in GPU_COLOURS if b in wide]
        wide[shown].plot.bar(
            ax=axis, width=0.8, rot=0, color=[GPU_COLOURS[b] for b in shown],
            legend=False,
        )  # fmt: skip
        axis.set(title=graph, ylabel="epoch, ms", xlabel="")
        axis.tick_params(axis="x", labelsize="small")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=5)
    figure.suptitle(f"Training on {machine_of(frame)}", fontsize="medium")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def draw_applications(frame: pd.DataFrame) -> Figure:
    """A bar an application, data set and variant: times faster than stock PyG, and its memory."""
    wide = applications.side_by_side(frame)
    names = [f"{app}, {data}" + (f", batches of {size}" if size else "")
             for app, data, size in wide.index]  # fmt: skip
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 1 + 0.42 * len(names)))
    for axis, figures, label in zip(
        axes, ("epoch_ms", "peak_mib"), ("epochs: times faster", "times less memory"), strict=True
    ):
        ratios = wide[figures].rdiv(wide[figures]["stock"], axis=0)
        for place, (variant, colour) in enumerate(APPLICATION_COLOURS.items()):
            if variant in ratios:
                at = [row + 0.27 * (place - 1) for row in range(len(names))]
                lost = ratios[variant] < applications.LOST
                colours = [LOST if low and variant != "large pages" else colour for low in lost]
                bars = axis.barh(at, ratios[variant], 0.27, color=colours, label=variant)
                axis.bar_label(bars, fmt="%.2g", fontsize=6, padding=2)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", title=label, yticks=range(len(names)), yticklabels=names)
        axis.xaxis.set_major_locator(LogLocator(base=2))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
    axes[0].invert_yaxis()
    handles = [matplotlib.patches.Patch(color=colour, label=variant)
               for variant, colour in APPLICATION_COLOURS.items()]  # fmt: skip
    figure.legend(handles=handles, loc="lower center", ncols=3, fontsize="small")
    figure.suptitle(f"Seven applications on {machine_of(frame)}", fontsize="medium")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def draw_distributed(frame: pd.DataFrame) -> Figure:
    """A row per graph, a column a model: time of an epoch by number of GPUs; our efficiency."""
    names, models = (list(dict.fromkeys(frame[key])) for key in ("graph", "model"))
    size = (1 + 3.2 * len(models), 1 + 2.6 * len(names))
    figure, grid = plt.subplots(len(names), len(models), sharex=True, squeeze=False, figsize=size)
    for axes, graph in zip(grid, names, strict=True):
        for axis, model in zip(axes, models, strict=True):
            rows = frame[(frame["graph"] == graph) & (frame["model"] == model)]
            draw_scaling(axis, rows.dropna(subset=["epoch_ms"]))
            axis.set_title(f"{graph}, {model}", fontsize="small")
    for axis in grid[-1]:
        axis.set_xlabel("ranks", fontsize="small")
    for axes in grid:
        axes[0].set_ylabel("epoch, ms", fontsize="small")
    handles: dict[str, Any] = {}
    for axis in grid.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="lower center", ncols=3, fontsize="small")
    figure.suptitle(f"Full-graph training on {machine_of(frame)}", fontsize="small")
    figure.tight_layout(rect=(0, 0.14 / len(names), 1, 1))
    return figure


def draw_scaling(axis: plt.Axes, rows: pd.DataFrame) -> None:
    """A line a variant; all begin at one rank, and the dashed one is what P ranks could reach."""
    alone = rows[rows["world"] == 1]["epoch_ms"]
    worlds = sorted(set(rows["world"]) | {1})
    if len(alone):
        ideal = [alone.iloc[0] / world for world in worlds]
        axis.plot(worlds, ideal, color="black", linestyle=":", linewidth=0.8, label="ideal")
    for variant, colour in RANK_COLOURS.items():
        own = rows[(rows["variant"] == variant) & (rows["world"] > 1)].sort_values("world")
        if own.empty:
            continue
        times = dict(zip(own["world"], own["epoch_ms"], strict=True))
        times = ({1: alone.iloc[0]} if len(alone) else {}) | times
        axis.plot(times.keys(), times.values(), marker="o", markersize=3, color=colour,
                  label=variant)  # fmt: skip
        if variant == "pyg_accel":
            for world, ms, share in zip(own["world"], own["epoch_ms"], own["efficiency"],
                                        strict=True):  # fmt: skip
                if share == share:
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
                    axis.annotate(
                        f"{share:.0%}", (world, ms), (0, -13), textcoords="offset points",
                        ha="center", fontsize=7, bbox=box, color=colour,
                    )  # fmt: skip
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(worlds, labels=[str(world) for world in worlds])
    axis.xaxis.set_minor_locator(NullLocator())
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.15, high)
    axis.margins(x=0.12)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize="small")


def machine_of(frame: pd.DataFrame) -> str:
    """Hardware, versions and commit of a result."""
    row = frame.iloc[-1]
    where = row["gpu"] if "gpu" in frame else f"{row['cpu']}, {row['threads']} threads"
    return f"{where}, torch {row['torch']}, PyG {row['pyg']} ({row['commit']}, {row['date']})"


FIGURES = {
    cpu_kernels.NAME: draw_kernels,
    cpu_epochs.NAME: draw_epochs,
    "gpu_kernels": draw_gpu_kernels,
    "gpu_epochs": draw_gpu_epochs,
    "distributed": draw_distributed,
    "applications": draw_applications,
    "applications_cuda": draw_applications,
}


if __name__ == "__main__":
    main()
