"""Figures of panels: colours, groups, titles and axes that all pictures share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.tools import results

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WON, LOST, STOCK, PAGES, BLUE = "#2a7f62", "#c8443c", "#8a8f98", "#c3c7cd", "#6f8fb3"


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
