"""Pictures of the figures of the papers."""

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.tools import frames, results
from benchmarks.tools.panels import (
    BLUE,
    LOST,
    PAGES,
    STOCK,
    WON,
    bars,
    grouped,
    lines,
    panels,
    save,
    titled,
    twos,
)

PART_COLOURS = dict(zip(frames.PARTS, (WON, BLUE, "#d9a441", PAGES), strict=True))


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


TC = "papers/tc_gnn/tc_paper_"
FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
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


def orders() -> None:
    """Draw the figures of SENSEi, which are of the files of both devices."""
    frame, folder = frames.order_cases(frames.orders()), results.FOLDER / "papers/sensei"
    save(draw_sizes(frame), folder / "association_sizes.png")
    for model in ("GCN", "GAT"):
        save(draw_orders(frame, model), folder / f"association_{model.lower()}.png")
