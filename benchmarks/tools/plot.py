"""Pictures of the results, drawn from the CSV files alone.

    python -m benchmarks.tools.plot [NAME ...] [--quick]

A picture stands beside every CSV file that has one; colours mark which side of stock PyG or of the
best peer a case is on.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.tools import frames, results

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WON, LOST, STOCK, PAGES, BLUE = "#2a7f62", "#c8443c", "#8a8f98", "#c3c7cd", "#6f8fb3"
GPU_COLOURS = {"stock": STOCK, "stock, compiled": PAGES, "torch CSR": BLUE, "patched": WON}
APPLICATION_COLOURS = {"large pages": PAGES, "patched": WON, "optimized": BLUE}
RANK_COLOURS = {"all-gather": STOCK, "halo, torch CSR, DDP": BLUE,
                "pyg_accel, bf16 wire": "#7fc4ab", "pyg_accel": WON}  # fmt: skip
PART_COLOURS = dict(zip(frames.PARTS, (WON, BLUE, "#d9a441", PAGES), strict=True))


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
    print(f"written: {path}")


def panels(
    count: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row."""
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained",
                                figsize=(width * columns + 0.8, height * rows + 0.6),
                                **options)  # fmt: skip
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, list(axes.flat[:count])


def grouped(
    frame: pd.DataFrame,
    by: list[str] | str,
    columns: int,
    width: float,
    height: float,
    **options: Any,
) -> tuple[Figure, Iterator[tuple[Axes, Any, pd.DataFrame]]]:
    """A panel a group, with the name of the group as its title."""
    groups = list(frame.groupby(by, sort=False))
    figure, axes = panels(len(groups), columns, width, height, **options)
    for axis, (key, _) in zip(axes, groups, strict=True):
        name = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        axis.set_title(name, fontsize="small")
    return figure, ((a, key, group) for a, (key, group) in zip(axes, groups, strict=True))


def titled(figure: Figure, text: str, frame: pd.DataFrame) -> Figure:
    """With the machine, the commit and the date of the last row."""
    row = frame.iloc[-1]
    about = f"{text} {results.machine_of(frame)} ({row['commit']}, {row['date']})"
    figure.suptitle(about, fontsize="small")
    return figure


def twos(axis: Axes, which: str = "x") -> None:
    """A logarithmic axis in powers of two, with a line at 1."""
    line = axis.xaxis if which == "x" else axis.yaxis
    axis.set(**{f"{which}scale": "log"})
    line.set_major_locator(LogLocator(base=2))
    line.set_minor_locator(NullLocator())
    line.set_major_formatter("{x:g}")
    (axis.axvline if which == "x" else axis.axhline)(1, color="black", linewidth=0.8)


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
    for axis, figures, label in zip(
        axes, ("epoch_ms", "peak_mib"), ("epochs: times faster", "times less memory"), strict=True
    ):
        ratios = wide[figures].rdiv(wide[figures]["stock"], axis=0)
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


def draw_orders(frame: pd.DataFrame, model: str) -> Figure:
    """SENSEi, figures 7 and 8: a panel a device and mode, bars by size within each graph."""
    part = frame[frame["model"] == model]
    figure, groups = grouped(part, ["device", "mode"], 1, 12, 2.6)
    first = frames.FIRST_FAMILY[model]
    for axis, _, rows in groups:
        ratios = (rows["default"] / rows["chosen"]).to_numpy()
        bars = axis.bar(range(len(rows)), ratios - 1, bottom=1,
                        color=[WON if r >= 1 else LOST for r in ratios])  # fmt: skip
        for bar, took in zip(bars, rows["took"], strict=True):
            bar.set(hatch="" if took == first else "///", edgecolor="white", linewidth=0)
        names = [f"{a}, {b}" for a, b in zip(rows["in"], rows["out"], strict=True)]
        axis.set_xticks(range(len(rows)), names, rotation=90, fontsize=5)
        axis.set_ylabel("speed-up")
        twos(axis, "y")
        for graph, at in rows.reset_index().groupby("graph", sort=False).apply(lambda g: g.index[0],
                                                                             include_groups=False
                                                                             ).items():  # fmt: skip
            axis.axvline(at - 0.5, color="grey", linewidth=0.5)
            axis.annotate(graph, (at - 0.3, 1), fontsize=6, xycoords=("data", "axes fraction"))
        axis.margins(x=0.005)
    figure.suptitle(f"{frames.ITERATIONS} iterations against PyG's order, choosing included; "
                    f"hatched: not '{first}'", fontsize="medium")  # fmt: skip
    return figure


def draw_sizes(frame: pd.DataFrame) -> Figure:
    """SENSEi, figure 11: a panel a layer and device, inference."""
    over = frames.order_by_size(frame).xs("inference", level="mode")
    figure, groups = grouped(over.reset_index(), ["model", "device"], 4, 4, 2.6)
    for axis, _, group in groups:
        sizes = group["in"].astype(str) + ", " + group["out"].astype(str)
        (group.set_index(sizes)[["ours", "PyG's order"]] - 1).plot.bar(
            ax=axis, width=0.8, bottom=1, color=[WON, STOCK], legend=False, xlabel=""
        )
        twos(axis, "y")
        axis.set_ylabel("over DGL's order")
    figure.axes[0].legend(fontsize="small")
    return figure


def draw_samples(frame: pd.DataFrame) -> Figure:
    """SENSEi, figure 9: time of both compositions on samples; the line is their median."""
    figure, groups = grouped(frame, ["sampling", "model"], 4, 5, 3.2)
    for axis, (sampling, model), part in groups:
        families = part[part["family"].notna()].groupby("family", sort=False)
        for (name, group), colour in zip(families, (STOCK, WON), strict=True):
            axis.scatter(group["size"], group["ms"], s=8, color=colour, label=name)
            axis.plot(group.groupby("size")["ms"].median(), color=colour, linewidth=1)
        row = part.iloc[0]
        axis.set(xscale="log", yscale="log", xlabel=f"{sampling} of a sample", ylabel="ms",
                 title=f"{model}, {row['in']} to {row['out']}, {row['graph']}")  # fmt: skip
        axis.legend(fontsize="small")
    return figure


def _parts(
    frame: pd.DataFrame, by: list[str], names: Callable[[pd.Series], str],
    whole: Callable[[pd.DataFrame], pd.Series],
) -> Figure:  # fmt: skip
    """A panel a group, a bar a row, made of its parts; `whole` is what 100% is."""
    figure, groups = grouped(frame, by, 4, 4.2, 2.6)
    for axis, _, group in groups:
        shares = group[list(frames.PARTS)].div(whole(group), axis=0) * 100
        shares.index = [names(row) for _, row in group.iterrows()]
        shares.plot.barh(ax=axis, stacked=True, width=0.8, legend=False,
                         color=list(PART_COLOURS.values()))  # fmt: skip
        axis.invert_yaxis()
        axis.tick_params(labelsize=6)
        axis.xaxis.set_major_formatter("{x:g}%")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_shares(frame: pd.DataFrame) -> Figure:
    """SENSEi, figure 2, and ES-SpMM, figure 3: parts of a step, in per cent."""
    layers = frame["what"] == "layers"
    kind = (frame["model"] + ", " + frame["mode"]).where(layers, frame["mode"])
    frame = frame.assign(panel=frame["graph"].where(layers, "models of ES-SpMM"), kind=kind)
    return _parts(
        frame, ["panel", "kind"],
        lambda row: (f"{row['in']}, {row['out']}" if row["what"] == "layers"
                     else f"{row['graph']}, {row['model']}"),
        lambda group: group[list(frames.PARTS)].sum(axis=1),
    )  # fmt: skip


def draw_inference(frame: pd.DataFrame) -> Figure:
    """ES-SpMM, figure 9: time of inference in per cent of that with all edges."""

    def name(row: pd.Series) -> str:
        edges = f"S = {row['width']}" if row["width"] else "all edges"
        return edges + ("" if pd.isna(row["accuracy"]) else f", {row['accuracy']:.1%}")

    def whole(group: pd.DataFrame) -> pd.Series:
        """The time of the parts that makes 100%: shares are the profiler's, times are not."""
        all_edges = group.loc[group["width"] == 0, "ms"].iloc[0]
        return group[list(frames.PARTS)].sum(axis=1) * all_edges / group["ms"]

    return _parts(frame[frame["case"] != "stock"], ["graph", "model"], name, whole)


def draw_dropped(frame: pd.DataFrame) -> Figure:
    """ES-SpMM, figure 5: accuracy by the share of edges that is dropped, of several draws."""
    figure, (axis,) = panels(1, 1, 4.2, 2.8)
    for graph, group in frame.dropna(subset="accuracy").groupby("graph", sort=False):
        axis.errorbar(100 * group["dropped"], 100 * group["accuracy"], 100 * group["deviation"],
                      marker="o", markersize=3, label=graph)  # fmt: skip
    axis.set(xlabel="edges dropped, %", ylabel="accuracy, test, %")
    axis.legend(fontsize="small")
    return figure


def draw_convergence(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 10: loss and accuracy by epoch, means over the seeds."""
    figure, axes = panels(2, 2, 4.2, 2.6)
    for (dataset, model, k), part in frame.groupby(["dataset", "model", "k"], sort=False):
        mean = part.groupby("epoch")[["loss", "accuracy"]].mean()
        name = f"{dataset}, {model}, " + (f"MaxK {k}" if k else "ReLU")
        for axis, column in zip(axes, mean, strict=True):
            axis.plot(mean[column], label=name, linewidth=1, color=None if k else "black")
    axes[0].set(xlabel="epoch", ylabel="loss, training", yscale="log")
    axes[1].set(xlabel="epoch", ylabel="accuracy, test, %")
    axes[1].legend(fontsize="small")
    return figure


def by_k(axis: Axes, group: pd.DataFrame) -> None:
    """Accuracy by k, mean and deviation of the seeds; ReLU is the band."""
    found = group.groupby("k")["accuracy"].agg(["mean", "std"]).fillna(0.0)
    axis.errorbar(found.index, found["mean"], found["std"], marker="o", markersize=3, color=WON,
                  label="accuracy, MaxK")  # fmt: skip
    relu = group.loc[group["k"].isna(), "accuracy"]
    axis.axhline(relu.mean(), color=STOCK, label="accuracy, ReLU")
    axis.axhspan(relu.mean() - relu.std(), relu.mean() + relu.std(), color=STOCK, alpha=0.2)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="k", ylabel="test, %")


def speed_by_k(axis: Axes, group: pd.DataFrame, base: str, others: Sequence[str]) -> None:
    """Epochs over those of a base by k; dashed lines are other cases, such as the limit."""
    times, maxk = group.set_index("case")["epoch_ms"], group[group["k"].notna()]
    axis.plot(maxk["k"], times[base] / maxk["epoch_ms"], marker="s", markersize=3, color=BLUE,
              label="MaxK")  # fmt: skip
    for case, style in zip(others, ("--", ":"), strict=False):
        axis.axhline(times[base] / times[case], linestyle=style, color=BLUE, label=case)
    axis.axhline(1, color=STOCK, label=base)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="k", ylabel="times faster")


def draw_accuracy(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 9, accuracy: a panel a data set and model."""
    known = frame.groupby(["dataset", "model"])["k"].transform("nunique") > 1
    figure, groups = grouped(frame[known | ~known.any()], ["dataset", "model"], 3, 4, 2.6)
    for axis, _, group in groups:
        by_k(axis, group)
    figure.axes[0].legend(fontsize="x-small", loc="lower right")
    return figure


def draw_speed(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 9, speed: epochs over ReLU on cuSPARSE; the lines are ours and the limit."""
    frame = frame[frame["shape"] == "paper"]
    known = frame.groupby(["graph", "model"])["k"].transform("nunique") > 1
    figure, groups = grouped(frame[known | ~known.any()], ["graph", "model"], 3, 4, 2.6)
    for axis, _, group in groups:
        speed_by_k(axis, group, "ReLU, torch CSR", ("ReLU, no edges", "ReLU, patched"))
    figure.axes[0].legend(fontsize="x-small")
    return figure


def draw_training(trainings: pd.DataFrame) -> Figure:
    """Accuracy (left) and speed-up over patched ReLU (right) by k, with its limit by Amdahl."""
    timings = results.read("papers/maxk_gnn/maxk_training_epochs")
    timings = {key: rows for key, rows in timings.groupby(["dataset", "model"])}
    figure, groups = grouped(trainings, ["dataset", "model"], 3, 3.6, 2.5)
    for axis, key, group in groups:
        by_k(axis, group)
        if key in timings:
            speed_by_k(axis.twinx(), timings[key], "ReLU, patched", ["ReLU, no edges"])
    figure.axes[0].legend(fontsize="x-small")
    return titled(figure, "Accuracy and speed-up by k,", trainings)


def draw_square(frame: pd.DataFrame) -> Figure:
    """MaxK-GNN, figure 4: what networks learnt of y = x^2, and errors by hidden units."""
    figure, axes = panels(3, 3, 3.6, 2.8)
    errors = frame.assign(error=(frame["y"] - frame["x"] ** 2) ** 2)
    errors = errors.groupby(["act", "hidden"], sort=False)["error"].mean() ** 0.5
    for axis, (act, colour) in zip(axes, (("MaxK", WON), ("ReLU", STOCK)), strict=False):
        for hidden, part in frame[frame["act"] == act].groupby("hidden"):
            axis.plot(part["x"], part["y"], linewidth=1, label=f"{hidden} hidden units")
        axis.plot(part["x"], part["x"] ** 2, color="black", linestyle=":", label="x²")
        axis.set_title(act)
        axis.legend(fontsize="x-small")
        axes[2].plot(errors[act], marker="o", color=colour, label=act)
    axes[2].set(xscale="log", yscale="log", xlabel="hidden units", title="root mean square error")
    axes[2].legend(fontsize="x-small")
    return figure


def bars(value: str, across: str, label: str) -> Callable[[pd.DataFrame], Figure]:
    """A bar a graph and column."""

    def draw(frame: pd.DataFrame) -> Figure:
        figure, (axis,) = panels(1, 1, 6.5, 3.2)
        frame = frame.assign(order="") if across not in frame else frame
        table = frame.pivot_table(value, "graph", across, sort=False)
        table.plot.bar(ax=axis, width=0.8, xlabel="", ylabel=label, legend=table.shape[1] > 1)
        axis.grid(axis="y", alpha=0.3)
        return titled(figure, label + ":", frame)

    return draw


def lines(value: str, x: str, across: str, by: str, label: str) -> Callable[[pd.DataFrame], Figure]:
    """A panel a group, a line a column, both axes logarithmic."""

    def draw(frame: pd.DataFrame) -> Figure:
        figure, groups = grouped(frame.assign(all="F = 16"), by, 4, 3.2, 3.2)
        for axis, _, rows in groups:
            table = rows.pivot_table(value, x, across, sort=False)
            table.plot(ax=axis, marker="o", markersize=3, logx=True, logy=True, ylabel=label)
            axis.set_xticks(list(table.index), labels=map(str, table.index))
            axis.minorticks_off()
            axis.legend(fontsize="small")
            axis.grid(alpha=0.3)
        return titled(figure, label + ":", frame)

    return draw


TC = "papers/tc_gnn/tc_paper_"
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
    **{f"papers/{name}_{device}": draw for device in ("cpu", "cuda") for name, draw in {
        "sensei/association_samples": draw_samples, "sensei/shares": draw_shares,
        "es_spmm/sampled_inference": draw_inference, "es_spmm/dropped_edges": draw_dropped,
    }.items()},
    "papers/maxk_gnn/maxk_training": draw_training,
    "papers/maxk_gnn/maxk_accuracy": draw_accuracy,
    "papers/maxk_gnn/maxk_convergence": draw_convergence,
    "papers/maxk_gnn/maxk_epochs_cuda": draw_speed,
    f"{TC}tiles": bars("removed", "order", "share of tiles removed by translation"),
    f"{TC}overhead": bars("share", "order", "translation, share of it and 200 epochs of GCN"),
    f"{TC}epochs": bars("speedup", "model", "stock PyG's epoch / patched"),
    f"{TC}sparsity": lines("gflop_s", "blocks", "backend", "all", "GFLOP/s"),
    f"{TC}warps": lines("ms", "warps", "window", "graph", "ms, F = 128"),
    f"{TC}throughput": lines("gflop_s", "F", "backend", "graph", "GFLOP/s"),
}  # fmt: skip


def beside(path: Path) -> None:
    """Draw a CSV file of this name, if it has a picture, into a PNG beside it."""
    for name, draw in FIGURES.items():
        if path.stem == Path(name).name:
            save(draw(results.read(path)), path.with_suffix(".png"))


def orders() -> None:
    """Draw the figures of SENSEi, which are of the files of both devices."""
    frame, folder = frames.order_cases(frames.orders()), results.FOLDER / "papers/sensei"
    save(draw_sizes(frame), folder / "association_sizes.png")
    for model in ("GCN", "GAT"):
        save(draw_orders(frame, model), folder / f"association_{model.lower()}.png")


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
        orders()


if __name__ == "__main__":
    main()
