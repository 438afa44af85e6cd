"""Tables 3, 4 and figures 7, 8, 11 of the paper (SENSEi), from the CSV files of `association`.

    python -m benchmarks.association_tables

Times are of 100 iterations: the first call, 99 times the median call, and for our choice what
choosing took. `naive` calls each tree once, at its own cost, and then keeps the fastest.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from benchmarks import results
from benchmarks.plot import LOST, STOCK, WON, save

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ITERATIONS = 100
CASE = ["device", "graph", "model", "in", "out", "mode"]
FIRST_FAMILY = {"GCN": "dynamic", "SGC": "dynamic", "TAGCN": "dynamic", "GAT": "reuse",
                "GATv2": "reuse", "GaAN": "reuse", "GraphSAGE": "aggregate"}  # fmt: skip
TABLES = "association_tables.md"


def read(folder: Path) -> pd.DataFrame:
    """All rows of both devices."""
    frames = []
    for device in ("cpu", "cuda"):
        path = folder / f"association_{device}.csv"
        if path.exists():
            frames.append(completed(results.read(path), device))
    if not frames:
        raise SystemExit(f"no association_*.csv in {folder}: python -m benchmarks.association")
    return pd.concat(frames, ignore_index=True)


def completed(frame: pd.DataFrame, device: str) -> pd.DataFrame:
    """The rows of a file, with what all of its iterations took."""
    total = frame["first_ms"] + (ITERATIONS - 1) * frame["ms"]
    return frame.assign(device=device, family=frame["family"].fillna(""), total=total)


def cases(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case with more than one tree: milliseconds of 100 iterations under each policy."""
    rows = []
    for key, group in frame.groupby(CASE, sort=False):
        case = dict(zip(CASE, key, strict=True))
        ran = group[group["total"].notna()]
        chosen, default = ran[ran["chosen"]], ran[ran["default"]]
        if len(ran) < 2 or chosen.empty or default.empty:
            continue
        first = FIRST_FAMILY[case["model"]]
        families = ran[ran["family"] != ""].set_index("family")["total"]
        alternative = next((name for name in families.index if name != first), first)
        best = ran["ms"].idxmin()
        rows.append({
            **case,
            "default": float(default["total"].iloc[0]),
            "chosen": float(chosen["total"].iloc[0] + chosen["overhead_ms"].iloc[0]),
            "chosen_alone": float(chosen["total"].iloc[0]),
            "alternative": families.get(alternative, np.nan),
            "paper_default": families.get(first, float(default["total"].iloc[0])),
            "naive": float(ran["first_ms"].sum() + (ITERATIONS - len(ran)) * ran["ms"].min()),
            "optimal": float(ran["total"].loc[best]),
            "iteration": float(chosen["ms"].iloc[0]),
            "overhead": float(chosen["overhead_ms"].iloc[0]),
            "took": chosen["family"].iloc[0] or "other",
        })  # fmt: skip
    return pd.DataFrame(rows)


def mean(values: pd.Series) -> float:
    """Geometric mean."""
    return float(np.exp(np.log(values.dropna()).mean()))


def table3(frame: pd.DataFrame) -> list[str]:
    """Speed-ups over PyG's order, and ours over DGL's, which orders products by size."""
    lines = [
        "| layer | device | mode | cases | ours, max | min | min of more than 1 ms | ours | "
        "alternative | naive | ours over DGL's order | iterations that choosing costs, median |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (model, device, mode), group in frame.groupby(["model", "device", "mode"], sort=False):
        ours = group["default"] / group["chosen"]
        long = ours[group["iteration"] > 1]
        shown = [ours.max(), ours.min(), long.min(), mean(ours),
                 mean(group["default"] / group["alternative"]),
                 mean(group["default"] / group["naive"]),
                 mean(group["paper_default"] / group["chosen"]),
                 (group["overhead"] / group["iteration"]).median()]  # fmt: skip
        figures = " | ".join("" if np.isnan(value) else f"{value:.3g}" for value in shown)
        lines.append(f"| {model} | {device} | {mode} | {len(group)} | {figures} |")
    return lines


def oracle(frame: pd.DataFrame, by: list[str]) -> pd.Series:
    """The total of the family that is best over all cases that agree in `by`, for each case."""
    families = frame[frame["family"] != ""].pivot_table("total", CASE, "family", sort=False)
    relative = np.log(families.div(families.min(axis=1), axis=0))
    groups = [families.index.get_level_values(name) for name in by]
    scores = relative.fillna(relative.max().max()).groupby(groups).transform("mean")
    # A family that a layer does not have is no choice.
    scores = scores.where(families.notna())
    picked = scores.fillna(np.inf).to_numpy().argmin(axis=1)
    values = families.to_numpy()[np.arange(len(families)), picked]
    return pd.Series(values, index=families.index)


def table4(frame: pd.DataFrame, summary: pd.DataFrame) -> list[str]:
    """Geometric means over PyG's order: the best tree, ours, and oracles that see one thing."""
    indexed = summary.set_index(CASE)
    oracles = {
        "device only": oracle(frame, ["model", "device"]),
        "sizes only": oracle(frame, ["model", "in", "out"]),
        "graph only": oracle(frame, ["model", "graph"]),
    }
    lines = [
        "| layer | device | optimal | ours, without overhead | ours / optimal | device only | "
        "sizes only | graph only |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (model, device), group in indexed.groupby(["model", "device"], sort=False):
        shown = [mean(group["default"] / group["optimal"]),
                 mean(group["default"] / group["chosen_alone"]),
                 mean(group["optimal"] / group["chosen_alone"])]  # fmt: skip
        shown += [
            mean(group["default"] / totals.reindex(group.index)) for totals in oracles.values()
        ]
        lines.append(f"| {model} | {device} | " + " | ".join(f"{v:.3f}" for v in shown) + " |")
    return lines


def by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """Figure 11: over DGL's order, what is chosen and PyG's order; geometric means by size."""
    keys = ["model", "device", "mode", "in", "out"]
    over = frame.assign(**{
        "ours": frame["paper_default"] / frame["chosen"],
        "PyG's order": frame["paper_default"] / frame["default"],
    })  # fmt: skip
    shown = over[over["model"].isin(["GCN", "GAT"])]
    return shown.groupby(keys, sort=False)[["ours", "PyG's order"]].agg(mean)


def sizes_table(frame: pd.DataFrame) -> list[str]:
    """The lines of figure 11; of GAT, PyG's order is DGL's."""
    lines = [
        "| layer | device | mode | in, out | ours | PyG's order |",
        "|---|---|---|---|--:|--:|",
    ]
    for (model, device, mode, n_in, n_out), row in by_size(frame).iterrows():
        figures = " | ".join(f"{value:.3g}" for value in row)
        lines.append(f"| {model} | {device} | {mode} | {n_in}, {n_out} | {figures} |")
    return lines


def draw_sizes(frame: pd.DataFrame) -> plt.Figure:
    """Figure 11: a panel a layer and device, inference."""
    over = by_size(frame).xs("inference", level="mode")
    panels = list(over.groupby(["model", "device"], sort=False))
    figure, axes = plt.subplots(1, len(panels), squeeze=False, figsize=(4 * len(panels), 2.8))
    for axis, (key, group) in zip(axes[0], panels, strict=True):
        labels = [f"{n_in}, {n_out}" for *_, n_in, n_out in group.index]
        for shift, (name, colour) in zip(
            (-0.2, 0.2), (("ours", WON), ("PyG's order", STOCK)), strict=True
        ):
            places = np.arange(len(group)) + shift
            axis.bar(places, group[name] - 1, 0.4, bottom=1, color=colour, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(group)), labels, rotation=90, fontsize="x-small")
        axis.set(title=", ".join(key), yscale="log", ylabel="over DGL's order")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="both", labelsize="x-small")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    return figure


def draw(summary: pd.DataFrame, model: str) -> plt.Figure:
    """Figures 7 and 8: a panel a device and mode, bars by size within each graph."""
    part = summary[summary["model"] == model]
    panels = list(dict.fromkeys(zip(part["device"], part["mode"], strict=True)))
    figure, axes = plt.subplots(len(panels), 1, squeeze=False, figsize=(13, 2.6 * len(panels)))
    for axis, (device, mode) in zip(axes[:, 0], panels, strict=True):
        rows = part[(part["device"] == device) & (part["mode"] == mode)]
        ratios = (rows["default"] / rows["chosen"]).to_numpy()
        names = [f"{a}, {b}" for a, b in zip(rows["in"], rows["out"], strict=True)]
        hatches = ["" if took == FIRST_FAMILY[model] else "///" for took in rows["took"]]
        bars = axis.bar(range(len(rows)), ratios - 1, bottom=1,
                        color=[WON if r >= 1 else LOST for r in ratios])  # fmt: skip
        for bar, hatch in zip(bars, hatches, strict=True):
            bar.set(hatch=hatch, edgecolor="white", linewidth=0)
        axis.set_xticks(range(len(rows)), names, rotation=90, fontsize=5)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(yscale="log", ylabel="speed-up")
        axis.set_title(f"{model}, {device}, {mode}", pad=14, fontsize="medium")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        starts = [
            i for i, g in enumerate(rows["graph"]) if i == 0 or g != rows["graph"].iloc[i - 1]
        ]
        for start in starts:
            axis.axvline(start - 0.5, color="grey", linewidth=0.5)
            axis.annotate(rows["graph"].iloc[start], (start - 0.3, 1), fontsize=6,
                          xycoords=("data", "axes fraction"), va="bottom")  # fmt: skip
        axis.margins(x=0.005)
    figure.suptitle(f"{ITERATIONS} iterations against PyG's order, choosing included; hatched: not "
                    f"'{FIRST_FAMILY[model]}'", fontsize="medium")  # fmt: skip
    figure.tight_layout()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=results.FOLDER)
    folder = parser.parse_args(arguments).folder
    frame = read(folder)
    summary = cases(frame)
    text = "\n".join([
        "Made by `python -m benchmarks.association_tables`.", "",
        f"Speed-up of {ITERATIONS} iterations over PyG's order, on our kernels (table 3):",
        "", *table3(summary), "",
        "Geometric means over PyG's order, without what choosing costs (table 4):", "",
        *table4(frame, summary), "",
        "Geometric means over DGL's order, by size (figure 11):", "", *sizes_table(summary),
    ])  # fmt: skip
    (folder / TABLES).write_text(text + "\n")
    print(text)
    save(draw_sizes(summary), folder / "association_sizes.png")
    for model, name in (("GCN", "association_gcn"), ("GAT", "association_gat")):
        if (summary["model"] == model).any():
            save(draw(summary, model), folder / f"{name}.png")
            print(f"written: {folder / name}.png")


if __name__ == "__main__":
    main()
