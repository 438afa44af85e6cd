"""From measurements to models: one boosted ensemble a primitive, tested on graphs it never saw."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.collect import DENSE_GRAPH, Row, read_rows
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.learned import ABOUT, FORMAT
from pyg_accel.rewrite.cost.roofline import Roofline, machine_like
from pyg_accel.rewrite.cost.vector import NAMES, vectors

__all__ = ["primitive_of", "train"]

PARAMETERS = {"max_depth": 4, "eta": 0.07, "subsample": 0.8, "colsample_bytree": 0.6,
              "min_child_weight": 2, "seed": 0, "nthread": 1}  # fmt: skip
ROUNDS = 220
FOLDS = 10
FEWEST_ROWS = 20  # below, the roofline knows better

Array = NDArray[np.float64]


def train(measurements: Path, folder: Path) -> dict[str, Any]:
    """Train on a CSV file of measurements and write the models as JSON.

    Args:
        measurements: what :func:`~pyg_accel.rewrite.cost.collect.collect` wrote, of one device.
        folder: where to write: an ensemble a primitive, and ``about.json``.

    Returns:
        What ``about.json`` says: device, versions, rows, and errors on graphs that were held out.

    Raises:
        ValueError: if there is too little to learn from.
    """
    import xgboost

    rows = read_rows(measurements)
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row["primitive"]].append(row)
    enough = {name: some for name, some in kinds.items() if len(some) >= FEWEST_ROWS}
    if not enough:
        raise ValueError(f"'{measurements}' has {FEWEST_ROWS} measurements of no primitive")
    device = device_of(rows[0])
    roofline = Roofline(machine_like(device), "")
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "format": FORMAT,
        "device": device.as_dict(),
        "measured": max(row["date"] for row in rows),
        "versions": {"torch": rows[-1]["torch"], "pyg_accel": rows[-1]["pyg_accel"],
                     "xgboost": xgboost.__version__},
        "features": NAMES,
        "machine": asdict(roofline.machine),
        "primitives": {name: _fit(name, some, roofline, folder) for name, some in enough.items()},
    }  # fmt: skip
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return about


def device_of(row: Row) -> Device:
    """Return the device of a measurement."""
    return Device(row["kind"], row["name"], row["isa"], int(row["threads"]))


def primitive_of(row: Row) -> Primitive:
    """Return the call of a measurement."""
    graph = None
    if row["graph"] != DENSE_GRAPH:
        names = [field.name for field in fields(GraphFeatures)]
        sizes, others = [int(row[n]) for n in names[:3]], [float(row[n]) for n in names[3:]]
        graph = GraphFeatures(*sizes, *others)
    rows = graph.num_rows if graph else int(row["rows"])
    inner, cols, heads = (int(row[name]) for name in ("inner", "cols", "heads"))
    permuted, shared = (row[name] == "1" for name in ("permuted", "shared"))
    return Primitive(row["primitive"], rows, inner, cols, heads, graph, permuted, shared)


def _fit(name: str, rows: Sequence[Row], roofline: Roofline, folder: Path) -> dict[str, Any]:
    primitives = [primitive_of(row) for row in rows]
    inputs = vectors(primitives)
    factors = np.array([
        math.log(float(row["seconds"]) / seconds)
        for row, seconds in zip(rows, roofline.many(primitives), strict=True)
    ])  # fmt: skip
    groups = _groups(rows)
    found = np.zeros_like(factors)
    for fold in range(FOLDS):
        held = groups % FOLDS == fold
        if held.any() and not held.all():
            found[held] = _boosted(inputs[~held], factors[~held]).inplace_predict(inputs[held])
    errors = np.abs(np.expm1(found - factors))
    _boosted(inputs, factors).save_model(folder / f"{name}.json")
    return {
        "rows": len(rows),
        "graphs": int(groups.max()) + 1,
        "error_median": round(float(np.quantile(errors, 0.5)), 4),
        "error_95": round(float(np.quantile(errors, 0.95)), 4),
    }


def _groups(rows: Sequence[Row]) -> NDArray[np.int64]:
    """[number of rows]: what is held out as one, a graph, or dense calls of one size of input."""
    names = [row["graph"] if row["graph"] != DENSE_GRAPH else row["rows"] + row["inner"]
             for row in rows]  # fmt: skip
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    shuffled = np.random.default_rng(0).permutation(len(order))
    return np.array([shuffled[order[name]] for name in names], dtype=np.int64)


def _boosted(inputs: NDArray[np.float32], factors: Array) -> Any:
    import xgboost

    data = xgboost.DMatrix(inputs, factors)
    return xgboost.train(PARAMETERS, data, ROUNDS)
