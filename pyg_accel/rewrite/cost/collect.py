"""Times every primitive on this machine into a CSV file, from where an earlier run stopped."""

import csv
import datetime
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import pyg_accel
from pyg_accel.graph import Graph
from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.cases import ProfileGraph, dense_cases, graph_cases, sparse_cases
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.timing import timed
from pyg_accel.rewrite.cost.workload import workload

__all__ = ["COLUMNS", "DENSE_GRAPH", "Row", "collect", "read_rows"]

DENSE_GRAPH = "dense"  # where there is none
KEY = ("graph", "primitive", "rows", "inner", "cols", "heads", "permuted", "shared")
FEATURES = tuple(field.name for field in fields(GraphFeatures))
DEVICE = tuple(field.name for field in fields(Device))
COLUMNS = (*KEY, "seconds", "fastest", "laps", *FEATURES, *DEVICE, "torch", "pyg_accel", "date")

Row = dict[str, Any]


def collect(device: torch.device, path: Path, minutes: float = float("inf")) -> bool:
    """Append a row for every call that the file lacks; return whether all are there now.

    Args:
        device: what to measure.
        path: the CSV file, made if it is not there.
        minutes: stop after that long; the next run goes on from there.

    Raises:
        ValueError: if the file is of another device or not a file of measurements.
    """
    from tqdm import tqdm

    here = Device.of(device)
    _mend(path)
    done = {_key(row) for row in read_rows(path, here)}
    stop = time.monotonic() + 60 * minutes
    versions = {"torch": torch.__version__, "pyg_accel": pyg_accel.__version__,
                "date": datetime.date.today().isoformat()}  # fmt: skip
    batches = [(DENSE_GRAPH, None, list(dense_cases(device.type)))] + [
        (case.name, case, list(sparse_cases(device.type, case)))
        for case in graph_cases(device.type)
    ]
    total = sum(len(calls) for _, _, calls in batches)
    with (
        path.open("a", newline="") as file,
        tqdm(total=total, initial=len(done), unit="call", smoothing=0) as bar,
    ):
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for name, case, calls in batches:
            bar.set_description(name)
            if {_key_of(name, primitive) for primitive in calls} <= done:
                continue  # without making the graph
            for primitive, graph in _on(case, device) if case else ((call, None) for call in calls):
                key = _key_of(name, primitive)
                if key in done:
                    continue
                if time.monotonic() > stop:
                    return False
                laps = timed(workload(primitive, device, graph), device)
                known = asdict(primitive.graph) if primitive.graph else {}
                row = dict(zip(KEY, key, strict=True)) | known | here.as_dict() | versions
                row |= {"seconds": f"{laps.median:.5g}", "fastest": f"{laps.fastest:.5g}",
                        "laps": laps.laps}  # fmt: skip
                writer.writerow(row)
                file.flush()
                bar.update()
    return True


def _on(case: ProfileGraph, device: torch.device) -> Iterator[tuple[Primitive, Graph | None]]:
    rowptr, col = case.make(device=str(device))
    graph = Graph.from_csr(rowptr.int(), col.int())
    del rowptr, col
    # The graphs are symmetric, so that the transpose is the same matrix with permuted entries.
    turned = Graph(graph.rowptr, graph.col, graph.transposed().eid, graph.num_cols, sorted=True)
    for primitive in sparse_cases(device.type, case, GraphFeatures.of(graph)):
        yield primitive, turned if primitive.permuted else graph


def _mend(path: Path) -> None:
    """Cut off the line that a run was writing when it was killed."""
    if path.exists() and not (text := path.read_text()).endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def read_rows(path: Path, device: Device | None = None) -> list[Row]:
    """Read measurements; none if the file is not there.

    Raises:
        ValueError: if the file holds something else, or rows of another device.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = set(COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"expected measurements in '{path}': no column {sorted(missing)[0]!r}")
        rows: list[Row] = list(reader)
    for row in rows:
        found = Device(row["kind"], row["name"], row["isa"], int(row["threads"]))
        if device is not None and found != device:
            raise ValueError(f"'{path}' is of {found}, not of {device}: name another folder")
    return rows


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _key_of(graph: str, p: Primitive) -> tuple[str, ...]:
    # The rows of a sparse primitive are the graph's, and known once it was made.
    rows = "" if p.graph else str(p.rows)
    numbers = (p.inner, p.cols, p.heads, int(p.permuted), int(p.shared))
    return (graph, p.name, rows, *map(str, numbers))
