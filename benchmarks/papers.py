"""docs/results/papers.md: every table and figure of the five papers, and where ours is.

`papers.csv` says what each shows, which command makes our counterpart, and what is missing;
`paper_ratios` has the numbers. `python -m benchmarks.tables` writes the page.
"""

import os
from pathlib import Path

import pandas as pd

from benchmarks import machine
from benchmarks.paper_ratios import RATIOS, Ratio
from benchmarks.table_lines import NONE

PAGE = machine.ROOT / "docs" / "results" / "papers.md"
STATES = {
    "reproduced": "the same experiment, on synthetic graphs of the paper's sizes where its data "
    "cannot be had",
    "in part": "some of it, or by a neighbouring definition",
    "not": "no counterpart yet",
    "nothing to measure": "a drawing, a definition, or arithmetic on sizes",
}
LACKING = {
    "hardware": "Other hardware",
    "data": "Data that cannot be had",
    "peer": "Programs that are not compared",
    "run": "A run is missing, the command is there",
    "benchmark": "No benchmark yet",
    "absent": "Not part of pyg_accel",
}
PAPERS = {
    "SENSEi": ("2306.15155", "Speed-ups are over DGL's order of the products, on our kernels."),
    "DGL on x86": (
        "2007.06354",
        "Its baseline is DGL 0.4.3, ours stock PyG. The text gives a range over the seven "
        "applications, its bars have no numbers; of ours, several data sets of an application "
        "count by their geometric mean.",
    ),
    "MaxK-GNN": ("2312.08656", "Speed-ups are over cuSPARSE: an A100 there, an H200 here."),
    "ES-SpMM": ("2104.10716", "Speed-ups are over cuSPARSE on all edges: a V100 there, an H200 "
                "here; S is the width."),
    "TC-GNN": ("2112.02052", "An RTX 3090 there, an H200 here. Its 1.70x over DGL has no "
               "counterpart, see figure 6."),
}  # fmt: skip


def items() -> pd.DataFrame:
    """A row a table or figure, in the order of the papers."""
    return pd.read_csv(Path(__file__).with_suffix(".csv"), dtype=str, keep_default_na=False)


def page() -> str:
    """The whole page."""
    rows = items()
    counts = rows["state"].value_counts()
    lines = [
        "# The five papers, table by table",
        "",
        "Every table and figure of the papers whose methods pyg_accel has, the command that makes "
        "our counterpart, and the numbers side by side. `python -m benchmarks.tables` makes this "
        "page; ours are read from the CSV files in [benchmarks/results]"
        "(../../benchmarks/results), whose rows carry hardware, versions and commit. More tables: "
        "[results](../results.md).",
        "",
        "| state | | tables and figures |",
        "|---|---|--:|",
        *(f"| {state} | {what} | {counts[state]} |" for state, what in STATES.items()),
    ]
    for paper, (arxiv, about) in PAPERS.items():
        part = rows[rows["paper"] == paper]
        ratios = sorted(RATIOS[paper](), key=lambda ratio: list(part["item"]).index(ratio.item))
        lines += ["", f"## {paper}", "", f"[The paper](https://arxiv.org/abs/{arxiv}). {about}"]
        lines += ["", *_items(part, ratios), "", *_ratios(ratios)]
    lines += ["", "## What could not be reproduced and why"]
    for lacking, title in LACKING.items():
        part = rows[rows["lacking"] == lacking]
        lines += ["", f"### {title}", ""]
        lines += [f"- {row.paper}, {row.item}: {row.reason}" for row in part.itertuples()]
    return "\n".join(lines) + "\n"


def _items(rows: pd.DataFrame, ratios: list[Ratio]) -> list[str]:
    """A line a table or figure; of several ratios the first, which is the headline."""
    first = {ratio.item: ratio for ratio in reversed(ratios)}
    lines = ["| | what it shows | state | command | results | paper | ours |",
             "|---|---|---|---|---|--:|--:|"]  # fmt: skip
    for row in rows.itertuples():
        commands = "; ".join(f"`{command}`" for command in row.command.split("; ") if command)
        links = ", ".join(map(_link, row.results.split()))
        ratio = first.get(row.item)
        numbers = _numbers(ratio) if ratio else [NONE, NONE]
        cells = [row.item, row.shows, row.state, commands or NONE, links or NONE, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ratios(ratios: list[Ratio]) -> list[str]:
    lines = ["| | what | paper | ours | where ours is worse |", "|---|---|--:|--:|---|"]
    for ratio in ratios:
        cells = [ratio.item, ratio.what, *_numbers(ratio), ratio.because if ratio.worse else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _numbers(ratio: Ratio) -> list[str]:
    return [f"{number:.3g}{ratio.unit}" for number in (ratio.paper, ratio.ours)]


def _link(path: str) -> str:
    """A link from the page to a path from the root, named by its heading or file."""
    file, _, anchor = path.partition("#")
    name = anchor.replace("-", " ") or (Path(file).stem if file.endswith(".md") else file)
    target = os.path.relpath(machine.ROOT / file, PAGE.parent)
    return f"[{Path(name).name}]({target}{'#' + anchor if anchor else ''})"
