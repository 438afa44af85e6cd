"""From measurements to a model: one boosted ensemble, tested on graphs that it never saw."""

import json
import math
from collections import Counter
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
from pyg_accel.rewrite.cost.learned import ABOUT, ENSEMBLE, FORMAT
from pyg_accel.rewrite.cost.roofline import Roofline, machine_like
from pyg_accel.rewrite.cost.vector import NAMES, vectors

__all__ = ["Array", "boosted", "device_of", "factors_of", "primitive_of", "train"]

PARAMETERS = {"max_depth": 5, "eta": 0.07, "subsample": 0.8, "colsample_bytree": 0.6,
              "min_child_weight": 4, "lambda": 2, "seed": 0, "nthread": 1}  # fmt: skip
ROUNDS = 220
FOLDS = 5
FEWEST_ROWS = 20  # below, the roofline knows better

Array = NDArray[Any]


def train(measurements: Path, folder: Path) -> dict[str, Any]:
    """Train on a CSV file of measurements and write the model as JSON.

    Args:
        measurements: what :func:`~pyg_accel.rewrite.cost.collect.collect` wrote, of one device.
        folder: where to write the ensemble and ``about.json``.

    Returns:
        What ``about.json`` says: device, versions, rows, and errors on graphs that were held out.

    Raises:
        ValueError: if there is too little to learn from.
    """
    import xgboost

    rows = read_rows(measurements)
    counts = Counter(row["primitive"] for row in rows)
    rows = [row for row in rows if counts[row["primitive"]] >= FEWEST_ROWS]
    if not rows:
        raise ValueError(f"'{measurements}' has {FEWEST_ROWS} measurements of no primitive")
    device = device_of(rows[0])
    roofline = Roofline(machine_like(device), "")
    inputs = vectors([primitive_of(row) for row in rows], roofline.machine)
    factors = factors_of(rows, roofline)
    errors = _held_out_errors(rows, inputs, factors)
    names = np.array([row["primitive"] for row in rows])
    about = {
        "format": FORMAT,
        "device": device.as_dict(),
        "measured": max(row["date"] for row in rows),
        "versions": {"torch": rows[-1]["torch"], "pyg_accel": rows[-1]["pyg_accel"],
                     "xgboost": xgboost.__version__},
        "features": NAMES,
        "machine": asdict(roofline.machine),
        "primitives": {
            name: {"rows": int((names == name).sum()),
                   "error_median": round(float(np.quantile(errors[names == name], 0.5)), 4),
                   "error_95": round(float(np.quantile(errors[names == name], 0.95)), 4)}
            for name in dict.fromkeys(names.tolist())
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    boosted(inputs, factors).save_model(folder / ENSEMBLE)
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


def factors_of(rows: Sequence[Row], roofline: Roofline) -> Array:
    """[number of rows]: logarithms of the measured times over the roofline's."""
    base = roofline.many(map(primitive_of, rows))
    return np.array([math.log(float(row["seconds"]) / seconds)
                     for row, seconds in zip(rows, base, strict=True)])  # fmt: skip


def boosted(inputs: Array, factors: Array) -> Any:
    """Return an ensemble that predicts factors."""
    import xgboost

    return xgboost.train(PARAMETERS, xgboost.DMatrix(inputs, factors), ROUNDS)


def _held_out_errors(rows: Sequence[Row], inputs: Array, factors: Array) -> Array:
    """[number of rows]: relative errors of models that did not see the graph of the row.

    Dense calls with one size of input are held out together.
    """
    names = [row["graph"] if row["graph"] != DENSE_GRAPH else row["rows"] + row["inner"]
             for row in rows]  # fmt: skip
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    shuffled = np.random.default_rng(0).permutation(len(order))
    folds = np.array([shuffled[order[name]] % FOLDS for name in names])
    found = np.zeros_like(factors)
    for fold in set(folds.tolist()):
        held = folds == fold
        if not held.all():
            found[held] = boosted(inputs[~held], factors[~held]).inplace_predict(inputs[held])
    errors: Array = np.abs(np.expm1(found - factors))
    return errors
