"""Puts measured figures where people read them: docs/results.md, and the README's short table.

    python -m benchmarks.tables

Both are made from the CSV files in results/ alone; the README's part lies between its two `results`
comments.
"""

from collections.abc import Callable

import pandas as pd

from benchmarks import cpu_epochs, cpu_kernels, gpu_epochs, machine, results

Make = Callable[[pd.DataFrame], list[str]]

BEGIN, END = "<!-- results -->", "<!-- /results -->"
SHOWN = {
    "cpu_epochs": ("arxiv-like", "facebook-pages"),
    "gpu_epochs": ("arxiv-like", "reddit-like"),
}


def epochs(frame: pd.DataFrame) -> list[str]:
    """A row a data set and model."""
    lines = [
        "| graph | model | epoch ms, stock | large pages | patched | ratio | peak MiB, stock | "
        "patched | ratio |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (dataset, model), row in cpu_epochs.side_by_side(frame).iterrows():
        times, peaks = row["epoch_ms"], row["peak_mib"]
        figures = [f"{times[backend]:.4g}" for backend in cpu_epochs.BACKENDS]
        figures += [f"{times['stock'] / times['patched']:.2f}x"]
        figures += [f"{peaks[backend]:.0f}" for backend in ("stock", "patched")]
        figures += [f"{peaks['stock'] / peaks['patched']:.2f}x"]
        lines.append(f"| {dataset} | {model} | {' | '.join(figures)} |")
    return lines


def kernels(frame: pd.DataFrame) -> list[str]:
    """A row a graph and kind of operation: geometric mean of the ratios to the best peer, worst."""
    cases = cpu_kernels.best_peers(frame)
    kind = cases["op"].map({"spmm": "SpMM", "sddmm": "SDDMM"}).fillna("binary-reduce")
    cases["kind"] = kind + cases["weighted"].map({True: ", weighted", False: ""})
    lines = [
        "| graph | kernel | geometric mean | worst case | lost |",
        "|---|---|--:|---|--:|",
    ]
    for (graph, kind), group in cases.groupby(["graph", "kind"], sort=False):
        worst = group.loc[group["ratio"].idxmin()]
        what = f"{worst['reduce'] or 'dot'}, F = {worst['F']}, {worst['best_peer']}"
        mean = cpu_kernels.geometric_mean(group["ratio"])
        lost = f"{(group['ratio'] < 1).sum()} of {len(group)}"
        lines.append(
            f"| {graph} | {kind} | {mean:.2f}x | {worst['ratio']:.2f}x ({what}) | {lost} |"
        )
    against_dgl = cpu_kernels.against(frame, "DGL")
    beyond = against_dgl[against_dgl["op"] != "spmm"]["ratio"]
    mean = cpu_kernels.geometric_mean(beyond)
    lines += [
        "",
        f"SDDMM and binary-reduce against DGL alone: {mean:.2f}x over {len(beyond)} cases.",
    ]
    return lines


def gpu_models(frame: pd.DataFrame) -> list[str]:
    """A row a graph and model: stock PyG, compiled, on torch's CSR; patched."""
    stocks = gpu_epochs.BACKENDS[:3]
    lines = [
        f"| graph | model | epoch ms, {' | '.join(stocks)} | patched | ratio to the best | "
        "peak GiB, that one | patched |",
        "|---|---|" + "--:|" * 7,
    ]
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        rows = group.set_index("backend")
        notes = rows["note"].reindex(stocks).fillna("")
        times = rows["epoch_ms"].reindex([*stocks, "patched"])
        shown = [notes.get(b) or ("" if pd.isna(t) else f"{t:.4g}") for b, t in times.items()]
        peaks, ratio, peak = rows["peak_mib"] / 1024, "", ""
        if not times[list(stocks)].isna().all():
            best = times[list(stocks)].idxmin()
            ratio = f"{times[best] / times['patched']:.2f}x"
            peak = f"{peaks[best]:.3g}"
        figures = [*shown, ratio, peak, f"{peaks['patched']:.3g}"]
        lines.append(f"| {graph} | {model} | {' | '.join(figures)} |")
    return lines


def gpu_kernels(frame: pd.DataFrame) -> list[str]:
    """Weighted sums: cuSPARSE's time over ours, a row a graph."""
    sums = frame[frame["op"] == "spmm weighted sum"]
    table = sums.pivot_table("ms", ["graph", "dtype", "F"], "backend", sort=False)
    ratio = (table["cuSPARSE"] / table["pyg_accel"]).unstack(["dtype", "F"])
    head = " | ".join(f"{dtype}, F = {width}" for dtype, width in ratio.columns)
    lines = [f"| graph | {head} |", "|---|" + "--:|" * len(ratio.columns)]
    for graph, values in ratio.iterrows():
        lines.append(f"| {graph} | " + " | ".join(f"{value:.2f}x" for value in values) + " |")
    means = ratio.T.groupby("dtype").apply(
        lambda part: cpu_kernels.geometric_mean(part.stack())
    )  # fmt: skip
    shown = ", ".join(f"{dtype} {mean:.2f}x" for dtype, mean in means.items())
    lines += ["", f"Geometric means: {shown}."]
    return lines


def side_by_side(index: list[str], across: str, value: str) -> Make:
    """A row an index, a column each thing that was measured."""

    def make(frame: pd.DataFrame) -> list[str]:
        return _lines(frame.pivot_table(value, index, across, sort=False).reset_index())

    return make


def columns(*names: str) -> Make:
    """Some columns as they are."""
    return lambda frame: _lines(frame[list(names)])


def tensor_cores(frame: pd.DataFrame) -> list[str]:
    """The best window of each case beside the kernels on CUDA cores."""
    best = frame.loc[frame.groupby(["graph", "F", "mode", "op"], sort=False)["ms"].idxmin()]
    ratio = (best["cuda_core_ms"] / best["ms"]).map("{:.2f}x".format)
    shown = ["graph", "F", "mode", "op", "window", "least", "entries", "ms", "cuda_core_ms"]
    return _lines(best[shown].assign(ratio=ratio))


def beside_cusparse(frame: pd.DataFrame) -> list[str]:
    """What dispatch chooses, both of its candidates, and cuSPARSE."""
    shown = ["graph", "F", "mode", "op", "chosen", "cuda_ms", "triton_ms", "cusparse_ms"]
    return _lines(frame[shown])


def _lines(frame: pd.DataFrame) -> list[str]:
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    lines = [f"| {' | '.join(map(str, frame.columns))} |"]
    lines.append("|" + "|".join("--:" if number else "---" for number in numeric) + "|")
    for row in frame.itertuples(index=False):
        cells = [
            "" if pd.isna(cell) else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
            for cell in row
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def maxk_accuracy(frame: pd.DataFrame) -> list[str]:
    """A row a data set and model: mean and standard deviation over the seeds, by k."""
    frame = frame.assign(k=frame["k"].map(lambda k: "ReLU" if pd.isna(k) else f"MaxK {k:g}"))
    shown = dict.fromkeys(frame["k"])
    lines = [f"| data set | model | {' | '.join(shown)} |", "|---|---|" + "--:|" * len(shown)]
    for (dataset, model), group in frame.groupby(["dataset", "model"], sort=False):
        found = group.groupby("k")["accuracy"].agg(["mean", "std"])
        figures = [f"{found.loc[k, 'mean']:.1f} ± {found.loc[k, 'std']:.1f}" for k in shown]
        lines.append(f"| {dataset} | {model} | {' | '.join(figures)} |")
    return lines


def sampled(frame: pd.DataFrame) -> list[str]:
    """A row a graph and width: fastrand, against the full graph and one sampled beforehand."""
    library = "cuSPARSE" if "gpu" in frame else "MKL"
    lines = [
        f"| graph | width | edges | {library} ms, all edges | ours, all edges | sampled | ratio to "
        f"{library} | to ours, sampled before | bf16 ms | int8 | fp8 | weighted | to ours, "
        "weighted and sampled before |",
        "|---|--:|" + "--:|" * 11,
    ]
    for (graph, width), group in frame[frame["strategy"] == "fastrand"].groupby(
        ["graph", "width"], sort=False
    ):
        whole = frame[(frame["graph"] == graph) & (frame["strategy"] == "all")]
        theirs, ours = whole.set_index("backend")["device_ms"][
            [library, "pyg_accel spmm"]
        ].to_list()
        by_backend = group.set_index("backend")
        times = by_backend.loc["sampled_spmm"].set_index("storage")["device_ms"]
        before = by_backend.loc["spmm, sampled before", "device_ms"]
        figures = [f"{group['rate'].iloc[0]:.1%}", f"{theirs:.4g}", f"{ours:.4g}"]
        figures += [f"{times['fp32']:.4g}", f"{theirs / times['fp32']:.2f}x"]
        figures += [f"{before / times['fp32']:.2f}x"]
        figures += [f"{times[storage]:.4g}" for storage in ("bf16", "int8", "fp8")]
        weighted = by_backend.loc["weighted, rescaled as gcn", "device_ms"]
        figures += [f"{weighted:.4g}"]
        peer = by_backend["device_ms"].get("weighted spmm, sampled before")
        figures += ["" if peer is None else f"{peer / weighted:.2f}x"]
        lines.append(f"| {graph} | {width} | {' | '.join(figures)} |")
    return lines


def sampled_models(frame: pd.DataFrame) -> list[str]:
    """A row a graph, model, strategy and rescaling: the chosen width, and what it costs."""
    lines = [
        "| graph | model | strategy | rescale | width | edges | validation, all | sampled | test, "
        "all | sampled |",
        "|---|---|---|---|--:|" + "--:|" * 5,
    ]
    for row in frame[frame["chosen"]].itertuples():
        figures = [f"{v:.4f}" for v in (row.val_all, row.val, row.test_all, row.test)]
        what = f"{row.graph} | {row.model} | {row.strategy} | {row.rescale} | {row.width}"
        lines.append(f"| {what} | {row.edges:.1%} | {' | '.join(figures)} |")
    return lines


# Title, CSV file, what the figures are, how they become lines.
SECTIONS: tuple[tuple[str, str, str, Make], ...] = (
    (
        "Epochs on a CPU",
        "cpu_epochs",
        "3 layers, 128 hidden. `large pages` is PyG with the [memory pages](explanation/"
        "the_seam.md#memory) that importing pyg_accel first switches on.",
        epochs,
    ),
    (
        "Kernels on a CPU",
        "cpu_kernels",
        "Forward: time of the best peer of each case (MKL, torch, DGL 1.1.3, torch-sparse, PyG) "
        "over ours.",
        kernels,
    ),
    (
        "Epochs on a GPU",
        "gpu_epochs",
        "3 layers, 256 hidden (attention: 4 heads x 64), fp32.",
        gpu_models,
    ),
    (
        "First steps on a GPU",
        "gpu_first_call",
        "Seconds of a process's first training step and its second one. `cold`: nothing is in "
        "Triton's cache; `warm`: everything is.",
        columns("graph", "model", "backend", "kernel_cache", "first_step_s", "second_step_s"),
    ),
    (
        "Sampled batches on a GPU",
        "gpu_batches",
        "Milliseconds of a training step, 2 layers, 256 hidden, fan-outs 15 and 10, a new graph in "
        "each. `trimmed`: layers get what the seeds still need. `always`: whatever the size.",
        side_by_side(["graph", "model", "trimmed", "seeds", "E"], "backend", "step_ms"),
    ),
    (
        "Attention by dot products on a GPU",
        "gpu_dot_attention",
        "AGNN epochs in fp32; one head of 128 features in fp16. Milliseconds forward and in all, "
        "MiB.",
        columns("what", "graph", "by", "forward_ms", "ms", "peak_mib"),
    ),
    (
        "SpMM on a GPU",
        "gpu_kernels",
        "Weighted sums: cuSPARSE's time over ours.",
        gpu_kernels,
    ),
    (
        "Rewritten models on a GPU",
        "rewrite_epochs",
        "Milliseconds of a training epoch, 3 layers, 256 hidden, 40 classes. `static`: the "
        "features are the same tensor in every call, what a layer aggregates of them is kept.",
        side_by_side(["graph", "model"], "variant", "epoch_ms"),
    ),
    (
        "MaxK on a GPU",
        "maxk_epochs_cuda",
        "Milliseconds of a training epoch, 3 layers, 256 hidden. `no edges` is the time of "
        "everything but aggregation.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    (
        "Products of MaxK on a GPU",
        "gpu_maxk",
        "Milliseconds, F = 256, fp32; products with weights. `sspmm` is the gradient of "
        "`cbsr_spmm`.",
        side_by_side(["graph", "op", "k"], "backend", "ms"),
    ),
    (
        "MaxK on a CPU",
        "maxk_epochs_cpu",
        "The same.",
        side_by_side(["graph", "model", "shape"], "case", "epoch_ms"),
    ),
    (
        "Accuracy with MaxK",
        "maxk_training",
        "Test nodes, %, mean ± standard deviation of 5 seeds; 3 layers, 64 hidden; community: 3000 "
        "nodes.",
        maxk_accuracy,
    ),
    (
        "Epochs with MaxK on these data sets",
        "maxk_training_epochs",
        "Milliseconds of a training epoch of the same networks.",
        side_by_side(["dataset", "model"], "case", "epoch_ms"),
    ),
    (
        "Orders of the nodes on a GPU",
        "node_order",
        "`community` is `reorder()`. `reuse`: edges per distinct column in windows of 16 rows; "
        "seconds to find the order on the GPU, milliseconds of a sum before and after.",
        columns(
            "graph",
            "order",
            "reuse",
            "find_s",
            "spmm_fp32_64_ms",
            "spmm_fp32_256_ms",
            "spmm_bf16_256_ms",
        ),
    ),
    (
        "Relations on a GPU",
        "relations_cuda",
        "Milliseconds of a training step of `RGCNConv`. `patched` was a loop over the relations at "
        "that commit; `patch()` has since run what `RGCNConv of ours` stands for.",
        side_by_side(["graph", "relations"], "backend", "step_ms"),
    ),
    (
        "Tensor Cores on a GPU",
        "tc_sweep",
        "The best of the `cuda` backend beside the Triton kernels on CUDA cores, milliseconds: the "
        "rows of a window, and how many entries a column must have to go to Tensor Cores "
        "(`entries` is their part of all).",
        tensor_cores,
    ),
    (
        "Tensor Cores beside cuSPARSE",
        "tc_kernels",
        "What dispatch chooses, and milliseconds of either backend and of cuSPARSE in the same "
        "precision, but for `tf32`, where the others stay in fp32.",
        beside_cusparse,
    ),
    (
        "Sampled edges on a GPU",
        "sampled_kernels_cuda",
        "`sampled_spmm` with `fastrand`, F = 128, fp32 unless said: time on the device, sampling "
        "included.",
        sampled,
    ),
    (
        "Sampled edges on a CPU",
        "sampled_kernels",
        "The same.",
        sampled,
    ),
    (
        "Accuracy with sampled edges",
        "sampled_accuracy",
        "The smallest width that loses at most 1% on the validation nodes, and what it does on the "
        "test nodes.",
        sampled_models,
    ),
)


def measured_on(frame: pd.DataFrame) -> str:
    """Hardware, versions, commit and date of a result."""
    row = frame.iloc[-1]
    where = row["gpu"] if "gpu" in frame else f"{row['cpu']}, {row['threads']} threads"
    triton = f"Triton {row['triton']}, " if "triton" in frame else ""
    commits = ", ".join(dict.fromkeys(map(str, frame["commit"])))
    return f"{where}, torch {row['torch']}, {triton}PyG {row['pyg']}, measured at {commits}"


def read(name: str) -> pd.DataFrame | None:
    path = results.FOLDER / f"{name}.csv"
    return results.read(path) if path.exists() else None


def page() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Ratios above 1 are ours. Tables are made by `python -m benchmarks.tables` from the CSV "
        "files in [benchmarks/results](../benchmarks/results), which have every row, losing ones "
        "included; [benchmarks](../benchmarks/README.md) says by which command each was measured "
        "and how.",
    ]
    for title, name, what, make in SECTIONS:
        frame = read(name)
        if frame is not None:
            lines += ["", f"## {title}", f"{what} {measured_on(frame)}.", "", *make(frame)]
            if (results.FOLDER / f"{name}.png").exists():
                lines += ["", f"![{title}](../benchmarks/results/{name}.png)"]
    return "\n".join(lines) + "\n"


def headline() -> list[str]:
    """The README's table: whole training epochs."""
    lines = [
        "| on | graph | model | epoch ms, stock PyG | its best variant | patched | over stock | "
        "over the best |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, graphs in SHOWN.items():
        frame = read(name)
        if frame is None:
            continue
        where = "GPU" if "gpu" in frame else "CPU"
        frame = frame.rename(columns={"dataset": "graph"})
        for graph in graphs:
            for model, group in frame[frame["graph"] == graph].groupby("model", sort=False):
                figures = " | ".join(_of_one_model(group.groupby("backend")["epoch_ms"].median()))
                lines.append(f"| {where} | {graph} | {model} | {figures} |")
    return lines


def _of_one_model(times: pd.Series) -> list[str]:
    ours, variants = times["patched"], times[[b for b in times.index if "patched" not in b]]
    stock, others = variants["stock"], variants.drop("stock").dropna()
    return [
        "out of memory" if pd.isna(stock) else f"{stock:.4g}",
        f"{others.min():.4g} ({others.idxmin()})" if len(others) else "",
        f"{ours:.4g}",
        "" if pd.isna(stock) else f"{stock / ours:.1f}x",
        f"{others.min() / ours:.1f}x" if len(others) else "",
    ]


def main() -> None:
    (machine.ROOT / "docs" / "results.md").write_text(page())
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    block = "\n".join([BEGIN, *headline(), END])
    path.write_text(before + block + rest.partition(END)[2])


if __name__ == "__main__":
    main()
