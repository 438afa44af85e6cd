"""Pictures of the TC-GNN paper's experiments, from the CSV files of `tc_paper` alone.

python -m benchmarks.tc_plot [FOLDER]
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes

from benchmarks import results
from benchmarks.tc_paper import NAME

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def tiles(frame: pd.DataFrame) -> None:
    axes = _panels(2, "share of tiles removed by translation")
    for axis, (tile, rows) in zip(axes, frame.groupby("tile", sort=False), strict=True):
        _bars(axis, rows.pivot_table("removed", "graph", "order", sort=False), f"{tile} tiles")


def overhead(frame: pd.DataFrame) -> None:
    (axis,) = _panels(1, "translation, share of it and 200 epochs of GCN, %")
    _bars(axis, 100 * frame.set_index("graph")[["share"]], "")


def sparsity(frame: pd.DataFrame) -> None:
    (axis,) = _panels(1, "GFLOP/s")
    _lines(axis, frame.pivot_table("gflop_s", "blocks", "backend", sort=False), "F = 16")


def warps(frame: pd.DataFrame) -> None:
    groups = list(frame.groupby("graph", sort=False))
    for axis, (graph, rows) in zip(_panels(len(groups), "ms, F = 128"), groups, strict=True):
        table = rows.pivot_table("ms", "warps", "window", sort=False)
        _lines(axis, table.rename(columns="{} rows".format), str(graph))


def throughput(frame: pd.DataFrame) -> None:
    groups = list(frame.groupby("graph", sort=False))
    for axis, (graph, rows) in zip(_panels(len(groups), "GFLOP/s"), groups, strict=True):
        _lines(axis, rows.pivot_table("gflop_s", "F", "backend", sort=False), str(graph))


def epochs(frame: pd.DataFrame) -> None:
    (axis,) = _panels(1, "stock PyG's epoch / patched")
    _bars(axis, frame.pivot_table("speedup", "graph", "model", sort=False), "")
    axis.legend(loc="upper left", fontsize="small")  # where the small graphs are
    axis.axhline(1, color="black", linewidth=0.8)


DRAW: dict[str, Callable[[pd.DataFrame], None]] = {
    "tiles": tiles, "overhead": overhead, "sparsity": sparsity,
    "warps": warps, "throughput": throughput, "epochs": epochs,
}  # fmt: skip


def _panels(count: int, label: str) -> list[Axes]:
    size = (max(6.5, 3.2 * count), 3.6)
    _, axes = plt.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    axes[0][0].set_ylabel(label)
    return list(axes[0])


def _bars(axis: Axes, table: pd.DataFrame, title: str) -> None:
    table.plot.bar(ax=axis, title=title, xlabel="", legend=False, width=0.8)
    if len(table.columns) > 1:
        axis.legend(loc="lower right", fontsize="small")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _lines(axis: Axes, table: pd.DataFrame, title: str) -> None:
    table.plot(ax=axis, title=title, marker="o", markersize=3, logx=True, logy=True)
    axis.set_xticks(list(table.index), labels=[str(i) for i in table.index])
    axis.minorticks_off()
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).with_name("results"))
    folder = parser.parse_args().folder
    for name, draw in DRAW.items():
        source = folder / f"{NAME}_{name}.csv"
        if not source.exists():
            continue
        frame = results.read(source)
        draw(frame)
        row = frame.iloc[-1]
        plt.gcf().suptitle(f"{name}: {row['gpu']}, torch {row['torch']}, commit {row['commit']}",
                           fontsize="small")  # fmt: skip
        plt.savefig(source.with_suffix(".png"), dpi=130)
        plt.close("all")
        print(f"written: {source.with_suffix('.png')}")


if __name__ == "__main__":
    main()
