"""Tables and figures of a paper by number: the commands that measure ours, and both in numbers.

    python -m benchmarks.papers.maxk_gnn --table 4        # measures, then shows
    python -m benchmarks.papers.maxk_gnn --figure 8 --show   # what the committed files say

`papers.csv` has a row a table or figure: what it shows, which commands make our counterpart, where
its results are, and what is missing. The packages of the papers know the numbers.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from benchmarks.tools import results, timing
from benchmarks.tools.markdown import NONE, markdown

ROMAN = {"I": "1", "II": "2", "III": "3", "IV": "4", "V": "5"}
NUMBERS = ("table", "figure", "section")


class Ratio(NamedTuple):
    """A number of a paper, and ours."""

    item: str  # table or figure
    what: str
    paper: float
    ours: float
    unit: str = "x"
    better: str = "more"  # or "less"; "" for what is a fact about a graph or model
    because: str = ""  # why ours is worse

    @property
    def worse(self) -> bool:
        """Ours is, in the digits that the page shows."""
        paper, ours = float(f"{self.paper:.3g}"), float(f"{self.ours:.3g}")
        return bool(self.better) and (ours < paper if self.better == "more" else ours > paper)

    @property
    def numbers(self) -> tuple[str, str]:
        """The paper's and ours, with their unit."""
        return f"{self.paper:.3g}{self.unit}", f"{self.ours:.3g}{self.unit}"


class Paper(NamedTuple):
    """A paper.

    Attributes:
        name: in `papers.csv`.
        module: its package in this folder.
        arxiv: number.
        about: what its numbers and ours are ratios of.
        ratios: of all items.
    """

    name: str
    module: str
    arxiv: str
    about: str
    ratios: Callable[[], Iterator[Ratio]]


@cache
def read(name: str) -> pd.DataFrame:
    """A file of results."""
    return results.read(name)


def items(paper: str | None = None) -> pd.DataFrame:
    """A row a table or figure, in the order of the papers."""
    rows = pd.read_csv(Path(__file__).with_name("papers.csv"), dtype=str, keep_default_na=False)
    return rows if paper is None else rows[rows["paper"] == paper]


def option(item: str) -> str:
    """`--table 3` for `Table III`."""
    kind, number = item.split()
    return f"--{kind.lower()} {ROMAN.get(number, number)}"


def ratios(paper: Paper) -> list[Ratio]:
    """In the order of the items."""
    order = list(items(paper.name)["item"])
    return sorted(paper.ratios(), key=lambda ratio: order.index(ratio.item))


def numbers(found: Sequence[Ratio]) -> list[str]:
    """The table of numbers side by side."""
    rows = [{"": r.item, "what": r.what, "paper": r.numbers[0], "ours": r.numbers[1],
             "where ours is worse": r.because if r.worse else ""} for r in found]  # fmt: skip
    return markdown(pd.DataFrame(rows), right=["paper", "ours"])


def run(command: str, quick: bool) -> None:
    """Run a command of `papers.csv`, unless it needs a GPU and there is none."""
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if "=" in word.partition(" ")[0])
    words = [word for word in words if word not in {f"{k}={v}" for k, v in settings.items()}]
    if "cuda" in words and not torch.cuda.is_available():
        print(f"left out, it needs a GPU: {command}")
        return
    print(command, flush=True)
    words = [sys.executable, *words[1:], *(["--quick"] if quick else [])]
    subprocess.run(words, cwd=timing.ROOT, env=os.environ | settings, check=True)


def main(paper: Paper, arguments: Sequence[str] | None = None) -> None:
    """Reproduce an item of a paper, or list all of them."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.papers.{paper.module}",
        description=f"Tables and figures of {paper.name}, arXiv:{paper.arxiv}. {paper.about}",
    )
    for name in NUMBERS:
        parser.add_argument(f"--{name}", metavar="N", help=f"the {name} of this number")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is there")
    parser.add_argument("--quick", action="store_true", help="small graphs: does it all work?")
    options = parser.parse_args(arguments)
    asked = {f"--{n} {ROMAN.get(v, v)}" for n in NUMBERS if (v := getattr(options, n))}
    rows = items(paper.name)
    if not asked:
        for row in rows.itertuples():
            print(f"{option(row.item):18} {row.state:20} {row.shows}")
        return
    chosen = rows[rows["item"].map(option).isin(asked)]
    if chosen.empty:
        parser.error(f"{paper.name} has no {' '.join(sorted(asked))}")
    for row in chosen.itertuples():
        for command in row.command.split("; ") if row.command and not options.show else ():
            run(command, options.quick)
        print(f"\n{row.item}: {row.shows} ({row.state})\n{row.reason}".rstrip())
        print(f"results: {row.results.replace(' ', ', ') or NONE}")
        found = [ratio for ratio in ratios(paper) if ratio.item == row.item]
        print("\n".join(["", *numbers(found)] if found else []))
