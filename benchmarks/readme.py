"""Puts the measured figures into the README, between its two `results` comments.

python -m benchmarks.readme
"""

import pandas as pd

from benchmarks import cpu_epochs, cpu_kernels, machine, results

BEGIN, END = "<!-- results -->", "<!-- /results -->"


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


def gpu_epochs(frame: pd.DataFrame) -> list[str]:
    """A row a graph and model: stock PyG on edge_index and on torch's CSR, and patched."""
    lines = [
        "| graph | model | epoch ms, stock | torch CSR | patched | ratio | peak GiB, best stock | "
        "patched |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (graph, model), group in frame.groupby(["graph", "model"], sort=False):
        rows = group.set_index("backend")
        times = rows["epoch_ms"].reindex(["stock", "torch CSR", "patched"])
        peaks = rows["peak_mib"] / 1024
        shown = [f"{t:.4g}" for t in times.fillna(0)]
        shown[0] = "out of memory" if times.isna()["stock"] else shown[0]
        shown[1] = "" if times.isna()["torch CSR"] else shown[1]
        stock = times[["stock", "torch CSR"]]
        ratio, peak = "", ""
        if not stock.isna().all():
            ratio = f"{stock.min() / times['patched']:.2f}x"
            peak = f"{peaks[stock.idxmin()]:.3g}"
        lines.append(
            f"| {graph} | {model} | {' | '.join(shown)} | {ratio} | {peak} | "
            f"{peaks['patched']:.3g} |"
        )
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


def main() -> None:
    frames = {
        name: pd.read_csv(results.FOLDER / f"{name}.csv")
        for name in (cpu_epochs.NAME, cpu_kernels.NAME, "gpu_epochs", "gpu_kernels")
    }
    cpu, gpu = frames[cpu_epochs.NAME].iloc[0], frames["gpu_epochs"].iloc[0]
    block = [
        BEGIN,
        f"{cpu['cpu']}, {cpu['threads']} threads, torch {cpu['torch']}, PyG {cpu['pyg']}; epochs "
        "of 3 layers, 128 hidden:",
        "",
        *epochs(frames[cpu_epochs.NAME]),
        "",
        "Kernels on that CPU, forward: time of the best peer of each case (MKL, torch, DGL 1.1.3, "
        "torch-sparse, PyG) over ours:",
        "",
        *kernels(frames[cpu_kernels.NAME]),
        "",
        f"{gpu['gpu']}, torch {gpu['torch']}, Triton {gpu['triton']}, PyG {gpu['pyg']}; epochs of "
        "3 layers, 256 hidden (attention: 4 heads x 64), fp32:",
        "",
        *gpu_epochs(frames["gpu_epochs"]),
        "",
        "SpMM with weights on that GPU: cuSPARSE's time over ours:",
        "",
        *gpu_kernels(frames["gpu_kernels"]),
        END,
    ]
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + "\n".join(block) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
