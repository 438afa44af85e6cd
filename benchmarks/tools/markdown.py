"""Tables of pages: frames as lines of Markdown."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from benchmarks.tools import results

Make = Callable[[pd.DataFrame], list[str]]
NONE = "—"  # not measured, or nothing to compare with
TIMES, SHARE = "{:.2f}x", "{:.0%}"


def markdown(
    frame: pd.DataFrame, formats: Mapping[str, str] | None = None,
    missing: Mapping[str, str] | None = None, right: Sequence[str] | bool = (),
) -> list[str]:  # fmt: skip
    """The lines of a table.

    Args:
        frame: a row a line.
        formats: of numbers by column; four digits for others.
        missing: what a cell without a value says, by column; `—` for others.
        right: columns of text that stand at the right like numbers; True for all but the first two.
    """
    if right is True:
        right = list(frame.columns[2:])
    aligned = [pd.api.types.is_numeric_dtype(frame[name]) or name in (right or ())
               for name in frame]  # fmt: skip
    cells = pd.DataFrame({
        name: [
            (missing or {}).get(name, NONE) if pd.isna(value)
            else (formats or {}).get(name, "{:.4g}").format(value) if isinstance(value, float)
            else str(value)
            for value in frame[name]
        ]
        for name in frame
    })  # fmt: skip
    rules = "|".join("--:" if number else "---" for number in aligned)
    rows = [f"| {' | '.join(row)} |" for row in cells.itertuples(index=False, name=None)]
    return [f"| {' | '.join(map(str, frame.columns))} |", f"|{rules}|", *rows]


def pivot(index: list[str], across: str, value: str) -> Make:
    """A row an index, a column each thing that was measured."""
    return lambda frame: markdown(frame.pivot_table(value, index, across, sort=False).reset_index())


def columns(*names: str, missing: Mapping[str, str] | None = None) -> Make:
    """Some columns as they are."""
    return lambda frame: markdown(frame[list(names)], missing=missing)


def measured(frame: pd.DataFrame) -> str:
    """The line below a table."""
    return f"*{results.measured_on(frame)}.*"
