"""Measures the primitives on this machine, and writes a CSV file that a later run continues."""

import csv
import datetime
import os
import time
from dataclasses import asdict, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

import pyg_accel
from pyg_accel.graph import Graph
from pyg_accel.rewrite.cost.base import DENSE, Primitive
from pyg_accel.rewrite.cost.cases import ProfileGraph, calls, graph_cases
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.timing import timed
from pyg_accel.rewrite.cost.workload import workload
from pyg_accel.runtime.machine import Device

__all__ = ["COLUMNS", "collect", "devices_of", "primitives_of", "read_measurements"]

SIZES = ("rows", "inner", "cols", "heads", "permuted", "shared")
KEY = ("graph", "primitive", *SIZES)
FEATURES = tuple(field.name for field in fields(GraphFeatures))
DEVICE = tuple(field.name for field in fields(Device))
COLUMNS = (*KEY, "seconds", "fastest", "laps", *FEATURES, *DEVICE, "torch", "pyg_accel", "date")


def collect(device: torch.device, path: Path, minutes: float = float("inf")) -> bool:
    """Append a row for every call that is missing in a file; return whether it is complete now.

    Every graph has calls of every primitive, so that an incomplete file has some of each.

    Args:
        device: the device to measure.
        path: the CSV file, created if it does not exist.
        minutes: stop after this time; the next run continues.

    Raises:
        ValueError: if the file is of another device or not a file of measurements.
    """
    from tqdm import tqdm

    here = Device.of(device)
    done = set(read_measurements(path, here)[list(KEY)].itertuples(index=False, name=None))
    if path.exists() and not (text := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, text.rfind(b"\n") + 1)  # a run was killed while it wrote a line
    facts = asdict(here) | {"torch": torch.__version__, "pyg_accel": pyg_accel.__version__,
                              "date": datetime.date.today().isoformat()}  # fmt: skip
    planned = [(case, p) for case in graph_cases(device.type) for p in calls(device.type, case)]
    missing = [pair for pair in planned if _key(*pair) not in done]
    stop = time.monotonic() + 60 * minutes
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        current = None
        for case, p in tqdm(missing, initial=len(planned) - len(missing), total=len(planned),
                            unit="call"):  # fmt: skip
            if time.monotonic() > stop:
                return False
            if current != case:
                current, graph = case, case.make(device)
                # The graph is symmetric: its transpose is the same matrix with permuted entries.
                permuted = Graph(graph.rowptr, graph.col, graph.transposed().eid, case.nodes,
                                 sorted=True)  # fmt: skip
            if p.graph:
                p = replace(p, graph=GraphFeatures.of(graph))
            laps = timed(workload(p, device, permuted if p.permuted else graph), device)
            row = dict(zip(KEY, _key(case, p), strict=True)) | facts
            row |= {"seconds": laps.median, "fastest": laps.fastest, "laps": laps.laps}
            writer.writerow(row | (asdict(p.graph) if p.graph else {}))
            file.flush()
    return True


def read_measurements(path: Path, device: Device | None = None) -> Any:
    """Read measurements as a DataFrame with the columns :data:`COLUMNS`; empty without a file.

    Raises:
        ValueError: if the file holds something else, or rows of another device.
    """
    import pandas as pd

    text = path.read_bytes() if path.exists() else b""
    header, line_end, rows = text.partition(b"\n")
    names = ",".join(COLUMNS).encode()
    # A run may have been killed while it wrote a line, the first one included.
    if header.rstrip() != names if line_end else not (names + b"\r").startswith(header):
        raise ValueError(f"'{path}' holds no measurements: its first line has no column names "
                         f"{','.join(COLUMNS[:3])},...")  # fmt: skip
    try:
        frame = pd.read_csv(BytesIO(rows[: rows.rfind(b"\n") + 1]), names=COLUMNS,
                            dtype={"name": str, "isa": str})  # fmt: skip
        # Files of earlier versions have the rows of a graph in one column only.
        frame["rows"] = frame["rows"].fillna(frame["num_rows"]).astype(int)
    except ValueError as error:
        raise ValueError(f"'{path}' holds a line that is no measurement: {error}") from error
    frame = frame.fillna({"isa": ""})
    if device is not None and (others := devices_of(frame) - {device}):
        raise ValueError(f"'{path}' is of {others.pop()}, not of {device}: name another folder")
    return frame


def devices_of(frame: Any) -> set[Device]:
    """Return the devices of measurements."""
    return {Device(*row) for row in frame[list(DEVICE)].itertuples(index=False, name=None)}


def primitives_of(frame: Any) -> list[Primitive]:
    """Return the call of each measurement."""
    primitives = []
    for row in frame.to_dict("records"):
        graph = None
        if row["primitive"] not in DENSE:
            graph = GraphFeatures(**{name: row[name] for name in FEATURES})
        sizes = {name: row[name] for name in SIZES}
        primitives.append(Primitive(row["primitive"], **sizes, graph=graph))
    return primitives


def _key(case: ProfileGraph, p: Primitive) -> tuple[Any, ...]:
    return (str(case), p.name, *(int(getattr(p, name)) for name in SIZES))
