"""Pictures of the results, drawn from the CSV files alone.

    python -m benchmarks.tools.plot [NAME ...] [--quick]

A picture stands beside every CSV file that has one; colours mark which side of stock PyG or of the
best peer a case is on.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.papers import figures
from benchmarks.tools import frames, results
from benchmarks.tools.panels import (
    BLUE,
    LOST,
    PAGES,
    STOCK,
    WON,
    grouped,
    panels,
    save,
    titled,
    twos,
)

GPU_COLOURS = {"stock": STOCK, "stock, compiled": PAGES, "torch CSR": BLUE, "patched": WON}
APPLICATION_COLOURS = {"large pages": PAGES, "patched": WON, "optimized": BLUE}
RANK_COLOURS = {"all-gather": STOCK, "halo, torch CSR, DDP": BLUE,
                "pyg_accel, bf16 wire": "#7fc4ab", "pyg_accel": WON}  # fmt: skip


def draw_ratios(frame: pd.DataFrame) -> Figure:
    """A panel a variant, a cell a case: the rival's time over ours; green where we are faster."""
    shares = frames.size_ratios(frame)
    figure, axes = panels(shares.shape[1], 4, 7, 2.4 + 0.04 * len(shares))
    for axis, (variant, column) in zip(axes, shares.items(), strict=True):
        table = column.unstack("workload", sort=False)
        logs = np.log2(table.astype(float))
        image = axis.imshow(logs, cmap="RdYlGn", vmin=-2, vmax=2, aspect="auto")
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
    cases = frames.best_peers(frame)
    cases["case"] = frames.labels(cases) + ", F=" + cases["F"].astype(str)
    names = list(dict.fromkeys(cases["case"]))
    figure, groups = grouped(cases, "graph", 4, 2.6, 0.2 + 0.2 * len(names), sharey=True)
    for axis, graph, group in groups:
        ratios = group.set_index("case")["ratio"].reindex(names)
        axis.barh(names, ratios - 1, left=1, color=[LOST if r < 1 else WON for r in ratios])
        axis.set_title(f"{graph}\ngeo. mean {results.geometric_mean(ratios):.2f}", fontsize="small")
        twos(axis)
        axis.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.supxlabel("best peer's time / ours (right of 1: faster)", fontsize="medium")
    return titled(figure, "CPU kernels,", frame)


def draw_epochs(frame: pd.DataFrame) -> Figure:
    """A row a data set; time of an epoch and peak memory of a training, stock beside patched."""
    wide = frames.epochs(frame)
    datasets = list(dict.fromkeys(wide.index.get_level_values("dataset")))
    figure, axes = panels(2 * len(datasets), 2, 4.2, 2.4)
    colours = {"stock": STOCK, "large pages": PAGES, "patched": WON}
    cases = itertools.product(datasets, (("epoch_ms", "epoch, ms"),
                                         ("peak_mib", "peak memory, MiB")))  # fmt: skip
    for axis, (dataset, (column, label)) in zip(axes, cases, strict=True):
        rows = wide.loc[dataset][column][list(colours)]
        rows.plot.bar(ax=axis, width=0.8, rot=0, color=list(colours.values()), legend=False)
        ratios = rows["stock"] / rows["patched"]
        for bar, ratio in zip(axis.containers[-1], ratios, strict=True):
            bar.set_color(LOST if ratio < 1 else WON)
        axis.bar_label(axis.containers[-1], [f"{r:.1f}x" for r in ratios], fontsize="small")
        axis.set(title=dataset, ylabel=label, xlabel="")
        axis.margins(y=0.12)
    axes[0].legend(fontsize="small")
    return titled(figure, "Training on the CPU,", frame)


def draw_gpu_kernels(frame: pd.DataFrame) -> Figure:
    """A panel a dtype, a bar a graph and width: cuSPARSE's time over ours for weighted sums."""
    ratio = frames.over_cusparse(frame)
    figure, axes = panels(len(ratio.columns.levels[0]), 2, 5, 5, sharey=True)
    for axis, dtype in zip(axes, dict.fromkeys(ratio.columns.get_level_values(0)), strict=True):
        ratio[dtype].plot.barh(ax=axis, width=0.8, colormap="viridis", legend=False)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=dtype, ylabel="")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[-1].legend(title="F", loc="upper right")
    figure.supxlabel("cuSPARSE's time / ours (right of 1: faster)", fontsize="medium")
    return titled(figure, "Weighted SpMM,", frame)


def draw_gpu_epochs(frame: pd.DataFrame) -> Figure:
    """A panel a graph: time of an epoch by model and backend; what ran out of memory has no bar."""
    figure, groups = grouped(frame, "graph", 2, 4.8, 2.8)
    for axis, _, rows in groups:
        wide = rows.pivot_table("epoch_ms", "model", "backend", sort=False)
        shown = [b for b in GPU_COLOURS if b in wide]
        wide[shown].plot.bar(ax=axis, width=0.8, rot=0, color=[GPU_COLOURS[b] for b in shown],
                             legend=False, xlabel="", ylabel="epoch, ms")  # fmt: skip
        axis.tick_params(axis="x", labelsize="small")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return titled(figure, "Training,", frame)


def draw_applications(frame: pd.DataFrame) -> Figure:
    """A bar an application, data set and variant: times faster than stock PyG, and its memory."""
    wide = frames.applications(frame)
    names = [f"{app}, {data}" + (f", batches of {size}" if size else "")
             for app, data, size in wide.index]  # fmt: skip
    figure, axes = panels(2, 2, 5, 0.4 + 0.42 * len(names), sharey=True)
    for axis, value, label in zip(
        axes, ("epoch_ms", "peak_mib"), ("epochs: times faster", "times less memory"), strict=True
    ):
        ratios = wide[value].rdiv(wide[value]["stock"], axis=0)
        for place, (variant, colour) in enumerate(APPLICATION_COLOURS.items()):
            if variant in ratios:
                at = [row + 0.27 * (place - 1) for row in range(len(names))]
                lost = ratios[variant] < frames.NOISE
                colours = [LOST if low and variant != "large pages" else colour for low in lost]
                bars = axis.barh(at, ratios[variant], 0.27, color=colours, label=variant)
                axis.bar_label(bars, fmt="%.2g", fontsize=6, padding=2)
        axis.set(title=label, yticks=range(len(names)), yticklabels=names)
        twos(axis)
    axes[0].invert_yaxis()
    handles = [matplotlib.patches.Patch(color=colour, label=variant)
               for variant, colour in APPLICATION_COLOURS.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    return titled(figure, "Seven applications,", frame)


def draw_distributed(frame: pd.DataFrame) -> Figure:
    """A panel a graph and model: time of an epoch by number of ranks; our efficiency."""
    models = frame["model"].nunique()
    figure, groups = grouped(frame, ["graph", "model"], models, 3.2, 2.6)
    handles: dict[str, Any] = {}
    for axis, _, rows in groups:
        rows = rows.dropna(subset=["epoch_ms"])
        alone = rows[rows["world"] == 1].set_index("world")["epoch_ms"]
        worlds = sorted(set(rows["world"]) | {1})
        if len(alone):
            ideal = [alone[1] / world for world in worlds]
            axis.plot(worlds, ideal, color="black", linestyle=":", linewidth=0.8, label="ideal")
        for variant, colour in RANK_COLOURS.items():
            own = rows[(rows["variant"] == variant) & (rows["world"] > 1)].sort_values("world")
            times = pd.concat([alone, own.set_index("world")["epoch_ms"]]) if len(own) else own
            if len(own):
                axis.plot(times.index, times, marker="o", markersize=3, color=colour, label=variant)
            if variant == "pyg_accel":
                for row in own.dropna(subset=["efficiency"]).itertuples():
                    axis.annotate(f"{row.efficiency:.0%}", (row.world, row.epoch_ms), (0, -13),
                                  textcoords="offset points", ha="center", fontsize=7,
                                  color=colour)  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="epoch, ms")
        axis.set_xticks(worlds, labels=map(str, worlds))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="both", labelsize="x-small")
        axis.margins(x=0.12, y=0.15)
        axis.grid(alpha=0.3)
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, fontsize="small")
    return titled(figure, "Full-graph training,", frame)


def draw_loaders(frame: pd.DataFrame) -> Figure:
    """Seconds of an epoch by backend and workers, and of them those that waited for batches."""
    epochs = frame[frame["what"] == "epoch"]
    labels = [f"{row.backend}, {row.workers} workers" for row in epochs.itertuples()]
    figure, (axis,) = panels(1, 1, 6.5, 0.5 * len(labels) + 0.6)
    axis.barh(labels, epochs["loader_s"], label="waiting for batches")
    step = epochs["seconds"] - epochs["loader_s"]
    axis.barh(labels, step, left=epochs["loader_s"], label="training on them")
    axis.invert_yaxis()
    axis.set(xlabel="seconds")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize="small")
    return titled(figure, "Epochs with NeighborLoader:", epochs)


FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "kernels/cpu_kernels": draw_kernels,
    "kernels/gpu_kernels": draw_gpu_kernels,
    "epochs/cpu_epochs": draw_epochs,
    "epochs/gpu_epochs": draw_gpu_epochs,
    "epochs/applications": draw_applications,
    "epochs/applications_cuda": draw_applications,
    "sizes/sizes_cpu": draw_ratios,
    "sizes/sizes_cuda": draw_ratios,
    "distributed/distributed": draw_distributed,
    "loaders/loaders": draw_loaders,
} | figures.FIGURES


def beside(path: Path) -> None:
    """Draw a CSV file of this name, if it has a picture, into a PNG beside it."""
    for name, draw in FIGURES.items():
        if path.stem == Path(name).name:
            save(draw(results.read(path)), path.with_suffix(".png"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of CSV files, by default all")
    parser.add_argument("--quick", action="store_true", help="those of quick runs")
    options = parser.parse_args(arguments)
    for name in FIGURES:
        path = (results.QUICK if options.quick else results.FOLDER) / f"{name}.csv"
        if path.exists() and (not options.names or path.stem in options.names):
            beside(path)
    if not (options.names or options.quick):
        figures.orders()


if __name__ == "__main__":
    main()
