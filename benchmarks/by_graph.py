"""Benchmarks whose CSV gets the rows of one graph after another; run again, they go on."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from benchmarks import gpu_machine, results


def options_of(
    arguments: Sequence[str] | None, doc: str | None, devices: Iterable[str], quick: str
) -> argparse.Namespace:
    """Read the command line; `quick` says what a quick run is made of."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument("--graphs", nargs="+")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help="folder of the CSV, by default results/")
    return parser.parse_args(arguments)


def run(
    options: argparse.Namespace, name: str, graphs: Sequence[str], real: Sequence[str],
    measure: Callable[[str], Iterable[Mapping[str, Any]]],
) -> pd.DataFrame:  # fmt: skip
    """Measure the graphs that the CSV lacks, each whole or not at all, and return all rows.

    Args:
        options: those of the command line; its graphs take the place of `graphs`.
        name: of the CSV, in front of the device.
        graphs: names of graphs.
        real: names of those that need PYG_ACCEL_DATA.
        measure: returns the rows of a graph.
    """
    names = options.graphs or graphs
    if not os.environ.get("PYG_ACCEL_DATA"):
        names = [name for name in names if name not in real]
        print("real graphs are left out: PYG_ACCEL_DATA is not set")
    folder = options.out or (results.QUICK if options.quick else results.FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{options.device}.csv"
    rows: list[dict[str, Any]] = results.read(path).to_dict("records") if path.exists() else []
    done, facts = {row["graph"] for row in rows}, gpu_machine.facts_of(options.device)
    for graph in (progress := tqdm([n for n in names if n not in done], unit="graph")):
        progress.set_postfix_str(graph)
        rows += [{"graph": graph, **row, **facts} for row in measure(graph)]
        pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
    return results.read(path)
