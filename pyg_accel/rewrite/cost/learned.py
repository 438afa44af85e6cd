"""Times predicted by a model trained on a profile of the machine, as factors of the roofline's."""

import json
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyg_accel.costs import Machine
from pyg_accel.rewrite.cost.base import DENSE, SPARSE, Primitive
from pyg_accel.rewrite.cost.features import GraphFeatures
from pyg_accel.rewrite.cost.roofline import Roofline
from pyg_accel.runtime.machine import Device

__all__ = ["ENSEMBLE", "FORMAT", "METADATA", "NAMES", "Learned", "read", "unusable", "vectors"]

FORMAT = 3
METADATA, ENSEMBLE = "about.json", "residuals.json"
# Seconds of Python code per call in a rewritten model. Measurements repeat one call, and do not
# contain them.
CALL_OVERHEAD = 40e-6
OF_GRAPH = (*(field.name for field in fields(GraphFeatures)), "degree_mean")
NAMES = (*DENSE, *SPARSE, "rows", "inner", "cols", "heads", "permuted", "shared", "width", "result",
         *OF_GRAPH, "roofline")  # fmt: skip


def vectors(primitives: Sequence[Primitive], roofline: Roofline) -> NDArray[np.float32]:
    """Return the inputs of the ensemble, [number of primitives, len(NAMES)]."""
    of_graph, no_graph = attrgetter(*OF_GRAPH), (0.0,) * len(OF_GRAPH)
    rows = []
    for p, seconds in zip(primitives, roofline.many(primitives), strict=True):
        kind = (p.name == name for name in (*DENSE, *SPARSE))
        sizes = (p.rows, p.inner, p.cols, p.heads, p.permuted, p.shared, p.cols // p.heads,
                 p.rows * p.cols)  # fmt: skip
        graph = of_graph(p.graph) if p.graph else no_graph
        rows.append((*kind, *sizes, *graph, math.log(seconds)))
    return np.array(rows, dtype=np.float32)


class Learned:
    """Predicts factors of a roofline with one boosted ensemble for all primitives.

    The roofline predicts primitives that were not measured.
    """

    def __init__(
        self, booster: Any, roofline: Roofline, learned: Collection[str], source: str
    ) -> None:
        """Take an ensemble, and the roofline and the primitives that it was trained on."""
        self.roofline, self.learned, self.source = roofline, learned, source
        self._booster = booster

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call."""
        calls = list(primitives)
        seconds = dict(zip(calls, self.roofline.many(calls), strict=True))
        learned = [p for p in seconds if p.name in self.learned]
        if learned:
            factors = self._booster.inplace_predict(vectors(learned, self.roofline))
            for p, factor in zip(learned, factors, strict=True):
                seconds[p] *= math.exp(float(factor))
        return [seconds[p] + CALL_OVERHEAD for p in calls]


# Errors of importing a package that lacks a library, or was built for another version of numpy.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


def _missing_library_error() -> type[BaseException]:
    """Return the class of xgboost's error for a missing library; only a failed import loads it."""
    module = sys.modules.get("xgboost.libpath")
    return getattr(module, "XGBoostLibraryNotFound", ImportError)


@cache
def unusable() -> str:
    """Return why xgboost cannot be used, in a line; empty if it can."""
    if find_spec("xgboost") is None:
        return "xgboost is not installed (pip install xgboost-cpu)"
    try:
        import xgboost  # noqa: F401
    except (*_BROKEN, _missing_library_error()) as error:
        return f"xgboost is installed but cannot be imported: {_summary(error)}"
    return ""


@lru_cache(maxsize=16)
def read(folder: Path, device: Device) -> Learned:
    """Read the model of a device.

    Raises:
        ValueError: if a file is invalid, with its path and the reason.
    """
    import xgboost

    path = folder / METADATA
    try:
        metadata = json.loads(path.read_text())
        if (version := metadata["format"]) != FORMAT:
            raise ValueError(f"format {version}, but this version reads {FORMAT}: retrain")
        if tuple(metadata["features"]) != NAMES:
            raise ValueError("it was trained on other features: retrain")
        measured_on, machine = Device(**metadata["device"]), Machine(**metadata["machine"])
        rows = sum(part["rows"] for part in metadata["primitives"].values())
        source = f"a model learned on {device} from {rows:,} measurements of {metadata['measured']}"
        path = folder / ENSEMBLE
        booster = xgboost.Booster(model_file=path)
        if booster.num_features() != len(NAMES):
            raise ValueError(f"it reads {booster.num_features()} features, not {len(NAMES)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected cost models in '{path}': {_summary(error)}") from error
    if measured_on != device:
        raise ValueError(f"the cost models in '{folder}' are of {measured_on}, not of {device}")
    booster.set_param({"nthread": 1})  # a few rows: threads would cost more than they save
    roofline = Roofline(machine, f"roofline of {device}: the layer takes less time than measuring")
    return Learned(booster, roofline, frozenset(metadata["primitives"]), source)


def _summary(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
