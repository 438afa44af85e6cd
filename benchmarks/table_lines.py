"""How the rows of each CSV file become the lines of a table."""

from collections.abc import Callable

import pandas as pd

from benchmarks import applications, binary_reduce, cpu_epochs, cpu_kernels, gpu_epochs, results

Make = Callable[[pd.DataFrame], list[str]]
NONE = "—"  # not measured, or nothing to compare with


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


def applied(frame: pd.DataFrame) -> list[str]:
    """A row an application and data set; geometric means over the applications."""
    wide = applications.side_by_side(frame)
    variants = [v for v in applications.VARIANTS if v in wide["epoch_ms"]]
    ours = [v for v in variants if v in ("patched", "optimized")]
    lines = [
        f"| application | data | batch | epoch ms, {' | '.join(variants)} | "
        f"ratio, {' | '.join(ours)} | peak MiB, stock | {' | '.join(ours)} |",
        "|---|---|--:|" + "--:|" * (len(variants) + 2 * len(ours) + 1),
    ]
    for (application, data, size), row in wide.iterrows():
        times, peaks = row["epoch_ms"], row["peak_mib"]
        figures = [NONE if pd.isna(times[v]) else f"{times[v]:.4g}" for v in variants]
        figures += [f"{times['stock'] / times[v]:.2f}x" for v in ours]
        figures += [NONE if pd.isna(peaks[v]) else f"{peaks[v]:.0f}" for v in ("stock", *ours)]
        lines.append(f"| {application} | {data} | {size or NONE} | {' | '.join(figures)} |")
    means = applications.means(frame)
    shown = ", ".join(f"{variant} {means[variant]:.2f}x" for variant in ours)
    names = frame[frame["batch"] == 0]["application"].unique()
    lines += ["", f"Geometric means over {', '.join(names)}, without batches: {shown}."]
    return lines


def beside_aggregation(frame: pd.DataFrame) -> list[str]:
    """BatchNorm and Embedding: a row a size."""
    lines = ["| op | rows | width | ids | drawn | torch | bound or ours | ratio |",
             "|---|--:|--:|--:|---|--:|--:|--:|"]  # fmt: skip
    pairs = {"BatchNorm1d": ("torch", "copies of the same bytes"),
             "Embedding backward": ("step", "step, by a graph")}  # fmt: skip
    keys = ["op", "rows", "width", "ids", "drawn"]
    times = frame.fillna({"drawn": NONE}).pivot_table("ms", keys, "backend", sort=False)
    for (op, *size), row in times.iterrows():
        first, second = (row[name] for name in pairs[op])
        name = op.removesuffix(" backward")
        shown = " | ".join(map(str, (name, *size)))
        lines.append(f"| {shown} | {first:.4g} | {second:.4g} | {first / second:.2f}x |")
    return lines


def kernels(frame: pd.DataFrame) -> list[str]:
    """A row per graph and kind of operation: mean ratio to the best peer, and the worst."""
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
        mean = results.geometric_mean(group["ratio"])
        lost = f"{(group['ratio'] < 1).sum()} of {len(group)}"
        lines.append(
            f"| {graph} | {kind} | {mean:.2f}x | {worst['ratio']:.2f}x ({what}) | {lost} |"
        )
    against_dgl = cpu_kernels.against(frame, "DGL")
    beyond = against_dgl[against_dgl["op"] != "spmm"]["ratio"]
    mean = results.geometric_mean(beyond)
    lines += [
        "",
        f"SDDMM and binary-reduce against DGL alone: {mean:.2f}x over {len(beyond)} cases.",
    ]
    return lines


def operand_pairs(frame: pd.DataFrame) -> list[str]:
    """A row a graph and message: over stock PyG / over DGL; then means, and what loses to PyG."""
    over = binary_reduce.ratios(frame)
    ours = frame[frame["variant"] == "patched"].set_index(binary_reduce.CASE)
    left = ours.index[ours["formula"].isna()]
    works = [work for work in binary_reduce.WORK if work in over.index.droplevel([0, 1])]
    heads = [reduce if name == "forward" else f"{reduce}, {name}" for reduce, name in works]
    lines = [f"| graph | message | {' | '.join(heads)} |", "|---|---|" + "--:|" * len(heads)]
    for (graph, message), _ in over.groupby(["graph", "message"], sort=False):
        cells = []
        for work in works:
            case = (graph, message, *work)
            known = over.loc[case] if case in over.index else []
            cell = " / ".join(NONE if pd.isna(r) else f"{r:.2f}x" for r in known) or NONE
            cells.append(f"{cell} \\*" if case in left else cell)
        lines.append(f"| {graph} | `{message}` | {' | '.join(cells)} |")
    means = ", ".join(
        f"{results.geometric_mean(ratio.dropna()):.2f}x over {peer} "
        f"({(ratio < binary_reduce.LOST).sum()} of {ratio.count()} below {binary_reduce.LOST})"
        for peer, ratio in over.items()
    )
    return [*lines, "", f"Geometric means: {means}. \\*: left to PyG."]


def gpu_models(frame: pd.DataFrame) -> list[str]:
    """A row per graph and model: stock PyG, compiled, on torch's CSR; patched."""
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
        shown = [notes.get(b) or (NONE if pd.isna(t) else f"{t:.4g}") for b, t in times.items()]
        peaks, ratio, peak = rows["peak_mib"] / 1024, NONE, NONE
        if not times[list(stocks)].isna().all():
            best = times[list(stocks)].idxmin()
            ratio = f"{times[best] / times['patched']:.2f}x"
            peak = f"{peaks[best]:.3g}"
        figures = [*shown, ratio, peak, f"{peaks['patched']:.3g}"]
        lines.append(f"| {graph} | {model} | {' | '.join(figures)} |")
    return lines


def gpu_kernels(frame: pd.DataFrame) -> list[str]:
    """Weighted sums: cuSPARSE's time over ours, a row per graph."""
    sums = frame[frame["op"] == "spmm weighted sum"]
    table = sums.pivot_table("ms", ["graph", "dtype", "F"], "backend", sort=False)
    ratio = (table["cuSPARSE"] / table["pyg_accel"]).unstack(["dtype", "F"])
    head = " | ".join(f"{dtype}, F = {width}" for dtype, width in ratio.columns)
    lines = [f"| graph | {head} |", "|---|" + "--:|" * len(ratio.columns)]
    for graph, values in ratio.iterrows():
        lines.append(f"| {graph} | " + " | ".join(f"{value:.2f}x" for value in values) + " |")
    means = ratio.T.groupby("dtype").apply(
        lambda part: results.geometric_mean(part.stack())
    )  # fmt: skip
    shown = ", ".join(f"{dtype} {mean:.2f}x" for dtype, mean in means.items())
    lines += ["", f"Geometric means: {shown}."]
    return lines


def side_by_side(index: list[str], across: str, value: str) -> Make:
    """A row an index, a column each thing that was measured."""

    def make(frame: pd.DataFrame) -> list[str]:
        return _lines(frame.pivot_table(value, index, across, sort=False).reset_index())

    return make


def rewritten(frame: pd.DataFrame) -> list[str]:
    """A row a graph and model: epochs and gains, of variants that were measured together."""
    lines = ["| graph | model | patched | rewritten | with `static` | gain | with `static` |",
             "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        rows = group.set_index("variant")
        together = rows[rows["commit"] == rows["commit"]["rewritten"]]["epoch_ms"]
        patched, *ours = (together.get(v) for v in ("patched", "rewritten", "rewritten, static"))
        figures = [NONE if ms is None else f"{ms:.4g}" for ms in (patched, *ours)]
        gains = [NONE if None in (ms, patched) else f"{patched / ms:.2f}x" for ms in ours]
        lines.append(f"| {graph} | {model} | {' | '.join(figures + gains)} |")
    return lines


def columns(*names: str, out_of_memory: str = "") -> Make:
    """Some columns as they are; whoever has nothing in `out_of_memory` ran out of it."""
    return lambda frame: _lines(frame[list(names)], out_of_memory)


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


def _lines(frame: pd.DataFrame, out_of_memory: str = "") -> list[str]:
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    lines = [f"| {' | '.join(map(str, frame.columns))} |"]
    lines.append("|" + "|".join("--:" if number else "---" for number in numeric) + "|")
    for row in frame.itertuples(index=False):
        cells = [
            f"{cell:.4g}" if isinstance(cell, float) else str(cell)
            for cell in (
                ("out of memory" if name == out_of_memory else NONE) if pd.isna(cell) else cell
                for name, cell in zip(frame.columns, row, strict=True)
            )
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def maxk_products(frame: pd.DataFrame) -> list[str]:
    """What dispatch chooses, what it replaces, and what else there is."""
    backend = frame["backend"].str.replace(r"auto \(\w+\)", "chosen", regex=True)
    shown = frame.assign(backend=backend)[~backend.isin(["cuda", "cuda, deterministic"])]
    table = shown.pivot_table("ms", ["graph", "op", "k"], "backend", sort=False)
    first = [name for name in table.columns if name.startswith("chosen")]
    return _lines(table[[*first, *table.columns.drop(first)]].reset_index())


def maxk_accuracy(frame: pd.DataFrame) -> list[str]:
    """A row a data set and model: mean and standard deviation over the seeds, by k."""
    shown = ["ReLU", *(f"MaxK {k:g}" for k in sorted(frame["k"].dropna().unique()))]
    frame = frame.assign(k=frame["k"].map(lambda k: "ReLU" if pd.isna(k) else f"MaxK {k:g}"))
    lines = [f"| data set | model | {' | '.join(shown)} |", "|---|---|" + "--:|" * len(shown)]
    for (dataset, model), group in frame.groupby(["dataset", "model"], sort=False):
        found = group.groupby("k")["accuracy"].agg(["mean", "std"])
        cells = [f"{row.mean:.1f} ± {row.std:.1f}" for row in found.reindex(shown).itertuples()]
        figures = [NONE if "nan" in cell else cell for cell in cells]
        lines.append(f"| {dataset} | {model} | {' | '.join(figures)} |")
    return lines


def sampled(frame: pd.DataFrame) -> list[str]:
    """A row per graph and width: fastrand, against the full graph and one sampled beforehand."""
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
        figures += [NONE if peer is None else f"{peer / weighted:.2f}x"]
        lines.append(f"| {graph} | {width} | {' | '.join(figures)} |")
    return lines


def sampled_models(frame: pd.DataFrame) -> list[str]:
    """A row per graph, model, strategy and rescaling: the chosen width, and what it costs."""
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
