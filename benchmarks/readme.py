"""Puts the measured figures into the README, between its two `results` comments.

python -m benchmarks.readme
"""

import pandas as pd

from benchmarks import cpu_epochs, cpu_kernels, machine, results

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def epochs(frame: pd.DataFrame) -> list[str]:
    """A row a data set and model."""
    lines = [
        "| graph | model | epoch ms, stock | patched | ratio | peak MiB, stock | patched | ratio |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (dataset, model), row in cpu_epochs.side_by_side(frame).iterrows():
        figures = []
        for figure in ("epoch_ms", "peak_mib"):
            stock, patched = row[figure, "stock"], row[figure, "patched"]
            figures += [f"{stock:.4g}", f"{patched:.4g}", f"{stock / patched:.2f}x"]
        lines.append(f"| {dataset} | {model} | {' | '.join(figures)} |")
    return lines


def kernels(frame: pd.DataFrame) -> list[str]:
    """A row a graph and operation: the ratio to the best peer at each width."""
    cases = cpu_kernels.best_peers(frame)
    widths = sorted(cases["F"].unique())
    lines = [
        "| graph | kernel | " + " | ".join(f"F = {width}" for width in widths) + " |",
        "|---|---|" + "--:|" * len(widths),
    ]
    for graph, group in cases.groupby("graph", sort=False):
        for label, rows in group.groupby(cpu_kernels.labels(group), sort=False):
            cells = {row.F: f"{row.ratio:.2f}x ({row.best_peer})" for row in rows.itertuples()}
            values = " | ".join(cells.get(width, "") for width in widths)
            lines.append(f"| {graph} | {label} | {values} |")
    lost = int((cases["ratio"] < 1).sum())
    mean = cpu_kernels.geometric_mean(cases["ratio"])
    lines += ["", f"Geometric mean {mean:.2f}x; lost {lost} of {len(cases)} cases."]
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
        "Kernels, forward: time of the best peer (in brackets) over ours, at the commit that the",
        "CSV names; the SDDMM and binary-reduce kernels have become faster since.",
        "",
        *kernels(kernel_frame),
        END,
    ]
    path = machine.ROOT / "README.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + "\n".join(block) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
