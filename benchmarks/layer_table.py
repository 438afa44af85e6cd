"""docs/reference/layers.md: what patch() does with every layer of PyG, from layers_{cpu,cuda}.csv.

A row per layer and option. Ratios are over all sizes and widths that were measured, the losing ones
included; the CSV files have each of them.
"""

import pandas as pd

from benchmarks import machine, results
from benchmarks.layer_cases import CASES, WITHOUT
from benchmarks.table_lines import NONE

PAGE = machine.ROOT / "docs" / "reference" / "layers.md"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
INTRODUCTION = """# PyG's layers

What `pyg_accel.patch()` does with every layer of `torch_geometric.nn.conv` at default settings.
`python -m benchmarks.layers` measures it and `python -m benchmarks.tables` makes this page of its
CSV files.

- **formula**: what is aggregated, where the layer is accelerated at all: `u` is a value per source,
  `v` per target, `e` per edge.
- **forward**, **training**: the least and the largest time of stock PyG over patched, and the
  geometric mean; a ratio below 1 is a loss. A layer that is left to PyG has about 1.
- **E x F**: whether the largest call makes a tensor with a row of features per edge.
- **left to PyG**: the reasons of `report()`, and up to how many edges if only small graphs are.
"""

# What the limits of patch() were set by, and not yet measured again with them.
SINCE = {
    "cuda": "Since these rows were measured, their limits were raised: NNConv, and at 1,000,000 "
    "edges of 16 features ARMAConv, HGTConv, and with edge_attr CGConv, GENConv and "
    "ResGatedGraphConv, are left to PyG now where they lose here, but for NNConv at 10,000,000 "
    "edges, which takes a fraction of the memory. DNAConv, PPFConv and HEATConv lose still.",
}


def lines(frame: pd.DataFrame) -> list[str]:
    """The table of one device."""
    table = [
        "| layer | option | formula | forward | training | E x F | left to PyG |",
        "|---|---|---|---|---|---|---|",
    ]
    frame = frame.fillna({"option": "", "formula": "", "reason": ""})
    groups = {key: rows for key, rows in frame.groupby(["layer", "option"])}
    for layer, option in (key for key in CASES if key in groups):
        rows = groups[layer, option]
        formulas = " ; ".join(dict.fromkeys(f for f in rows["formula"] if f))
        cells = [f"`{layer}`", option, f"`{formulas}`" if formulas else NONE]
        for name in ("forward", "training"):
            cells.append(_ratios(rows.loc[rows["pass"] == name, "ratio"].dropna()))
        largest = rows[rows["edges"] == rows["edges"].max()]
        cells += ["yes" if largest["edge_tensor"].eq(True).any() else "no", _left(rows)]
        table.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return table


def _ratios(ratios: pd.Series) -> str:
    if ratios.empty:
        return NONE
    mean = results.geometric_mean(ratios)
    return f"{ratios.min():.2f} to {ratios.max():.2f}, **{mean:.2f}**"


def _left(rows: pd.DataFrame) -> str:
    """Why rows are left to PyG; of layers that are not always, up to which size."""
    left = rows[rows["reason"] != ""]
    if left.empty:
        return NONE
    small = left["reason"].str.startswith("small")
    parts = list(dict.fromkeys(left.loc[~small, "reason"]))
    if small.any():
        parts.append(f"up to {left.loc[small, 'edges'].max():,} edges: too small")
    return "; ".join(parts)


def page() -> str:
    """The whole page."""
    text = [INTRODUCTION]
    for device, title in DEVICES.items():
        path = results.FOLDER / f"layers_{device}.csv"
        if not path.exists():
            text += [f"## On a {title}", "", f"Not measured yet: `--device {device}`.", ""]
            continue
        frame = results.read(path)
        edges = ", ".join(f"{n:,}" for n in sorted(frame["edges"].unique()))
        widths = ", ".join(map(str, sorted(frame["width"].unique())))
        text += [
            f"## On a {title}",
            "",
            f"{edges} edges, {widths} features. {results.measured_on(frame)}.",
            "",
            *([SINCE[device], ""] if device in SINCE else []),
            *lines(frame),
            "",
        ]
    text += ["## Without a row", "", "| layer | reason |", "|---|---|"]
    text += [f"| `{layer}` | {reason} |" for layer, reason in WITHOUT.items()]
    return "\n".join(text) + "\n"
