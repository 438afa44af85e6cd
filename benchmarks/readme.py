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


def main() -> None:
    epoch_frame = pd.read_csv(results.FOLDER / f"{cpu_epochs.NAME}.csv")
    kernel_frame = pd.read_csv(results.FOLDER / f"{cpu_kernels.NAME}.csv")
    facts = epoch_frame.iloc[0]
    where = (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, PyG {facts['pyg']}"
    )
    block = [
        BEGIN,
        f"Measured on: {where}. 3 layers, 128 hidden; forward, backward and Adam.",
        "",
        *epochs(epoch_frame),
        "",
        "Kernels, forward: time of the best peer of each case over ours.",
        "",
        *kernels(kernel_frame),
        END,
    ]
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + "\n".join(block) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
