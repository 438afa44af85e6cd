"""Trains a boosted ensemble on measurements, and tests it on graphs that were held out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyg_accel.costs import machine_of
from pyg_accel.rewrite.cost.base import DENSE, SPARSE
from pyg_accel.rewrite.cost.learned import ENSEMBLE, FORMAT, METADATA, NAMES, vectors
from pyg_accel.rewrite.cost.measurements import devices_of, primitives_of, read_measurements
from pyg_accel.rewrite.cost.roofline import Roofline

__all__ = ["boosted", "factors_of", "train"]

PARAMETERS = {"max_depth": 5, "eta": 0.07, "subsample": 0.8, "colsample_bytree": 0.6,
              "min_child_weight": 4, "lambda": 2, "seed": 0, "nthread": 1}  # fmt: skip
ROUNDS = 220
FOLDS = 5
FEWEST_ROWS = 20  # measurements of each primitive: with fewer, the roofline is more accurate

Array = NDArray[Any]


def train(measurements: Path, folder: Path) -> dict[str, Any]:
    """Train on a CSV file of measurements and write the model as JSON.

    Args:
        measurements: of one device, by :func:`~pyg_accel.rewrite.cost.measurements.collect`.
        folder: for the ensemble and ``about.json``.

    Returns:
        The content of ``about.json``: device, versions, rows, and errors on held out graphs.

    Raises:
        ValueError: if there are too few measurements of a primitive, or several devices.
    """
    import xgboost

    frame = read_measurements(measurements)
    counts = frame.primitive.value_counts().reindex([*DENSE, *SPARSE], fill_value=0)
    if few := [f"{name} ({rows})" for name, rows in counts.items() if rows < FEWEST_ROWS]:
        raise ValueError(
            f"'{measurements}' has fewer than {FEWEST_ROWS} measurements of {', '.join(few)}, too "
            "few for a model: run the same command again, it goes on from there"
        )
    (device,) = devices_of(frame)
    roofline = Roofline(machine_of(device), "")
    inputs, factors = vectors(primitives_of(frame), roofline), factors_of(frame, roofline)
    errors = np.zeros_like(factors)
    folds = frame.groupby("graph").ngroup() % FOLDS
    for fold in folds.unique():
        held_out = folds == fold
        model = boosted(inputs[~held_out], factors[~held_out])
        predicted = model.inplace_predict(inputs[held_out])
        errors[held_out] = np.abs(np.expm1(predicted - factors[held_out]))
    parts = frame.assign(error=errors).groupby("primitive", sort=False).error
    metadata = {
        "format": FORMAT,
        "device": asdict(device),
        "measured": frame.date.max(),
        "versions": {"torch": frame.torch.iloc[-1], "pyg_accel": frame.pyg_accel.iloc[-1],
                     "xgboost": xgboost.__version__},
        "features": NAMES,
        "machine": asdict(roofline.machine),
        "primitives": {
            name: {"rows": error.size, "error_median": round(error.median(), 4),
                   "error_95": round(error.quantile(0.95), 4)}
            for name, error in parts
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    boosted(inputs, factors).save_model(folder / ENSEMBLE)
    (folder / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    return metadata


def factors_of(frame: Any, roofline: Roofline) -> Array:
    """Return the logarithms of the measured times over the roofline's, [number of rows]."""
    base = roofline.many(primitives_of(frame))
    return np.log(frame.seconds.to_numpy() / np.array(base))  # type: ignore[no-any-return]


def boosted(inputs: Array, factors: Array) -> Any:
    """Return an ensemble that predicts factors."""
    import xgboost

    return xgboost.train(PARAMETERS, xgboost.DMatrix(inputs, factors), ROUNDS)
