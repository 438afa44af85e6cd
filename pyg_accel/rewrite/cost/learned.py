"""Times from a learned model: what profiling a machine taught, as factors of the roofline."""

import json
import math
import sys
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pyg_accel.machine import Device
from pyg_accel.rewrite.cost.base import Primitive
from pyg_accel.rewrite.cost.roofline import Machine, Roofline
from pyg_accel.rewrite.cost.vector import NAMES, vectors

__all__ = ["ABOUT", "ENSEMBLE", "FORMAT", "Learned", "read", "unusable"]

FORMAT = 2
ABOUT, ENSEMBLE = "about.json", "residuals.json"
# Seconds of Python around a call of a rewritten model, which profiling, where one call is repeated,
# does not see. It decides where graphs are small.
AROUND = 40e-6


class Learned:
    """Predicts with one boosted ensemble for all primitives, as factors of a roofline.

    A primitive that was not measured is left to the roofline.
    """

    def __init__(
        self, booster: Any, roofline: Roofline, learned: Collection[str], source: str
    ) -> None:
        """Take an ensemble, and the roofline and the primitives that it was trained on."""
        self.roofline = roofline
        self._booster, self._learned, self._source = booster, learned, source

    @property
    def source(self) -> str:
        """What decides, for people."""
        return self._source

    @property
    def learned(self) -> Collection[str]:
        """The primitives that were measured."""
        return self._learned

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call."""
        asked = list(primitives)
        found = dict(zip(asked, self.roofline.many(asked), strict=True))
        known = [primitive for primitive in found if primitive.name in self._learned]
        if known:
            factors = self._booster.inplace_predict(vectors(known, self.roofline.machine))
            for primitive, factor in zip(known, factors, strict=True):
                found[primitive] *= math.exp(float(factor))
        return [found[primitive] + AROUND for primitive in asked]


# What importing a package raises that lacks a library, or was built for another numpy.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError)


def _not_found() -> type[BaseException]:
    """The error of xgboost's own for a library that is missing, once its import raised that."""
    module = sys.modules.get("xgboost.libpath")
    return getattr(module, "XGBoostLibraryNotFound", ImportError)


@cache
def unusable() -> str:
    """Return why xgboost cannot be used, in a line; nothing if it can."""
    if find_spec("xgboost") is None:
        return "xgboost is not installed (pip install xgboost-cpu)"
    try:
        import xgboost  # noqa: F401
    except (*_BROKEN, _not_found()) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        return f"xgboost is installed but cannot be imported: {type(error).__name__}: {reason}"
    return ""


@lru_cache(maxsize=16)
def read(folder: Path, device: Device) -> Learned:
    """Read the model of a device.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
        _check(about)
        measured_on, machine = Device(**about["device"]), Machine(**about["machine"])
        rows = sum(part["rows"] for part in about["primitives"].values())
        source = f"a model learned on {device} from {rows:,} measurements of {about['measured']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected cost models in '{path}': {error!r}") from error
    if measured_on != device:
        raise ValueError(f"the cost models in '{folder}' are of {measured_on}, not of {device}")
    booster = _load(folder / ENSEMBLE)
    roofline = Roofline(machine, f"roofline of {device}: the layer takes less time than measuring")
    return Learned(booster, roofline, frozenset(about["primitives"]), source)


def _check(about: Any) -> None:
    """Raise for contents that are not of this version."""
    if not isinstance(about, dict) or "format" not in about:
        raise ValueError("no 'format', so it is not from `python -m pyg_accel profile`")
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']!r}, but this version reads {FORMAT}: retrain")
    if tuple(about["features"]) != NAMES:
        raise ValueError("it was trained on other features: retrain")


def _load(path: Path) -> Any:
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(path)
    except xgboost.core.XGBoostError as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise ValueError(f"expected an ensemble of xgboost in '{path}': {reason}") from error
    if booster.num_features() != len(NAMES):
        raise ValueError(
            f"'{path}' reads {booster.num_features()} features, not {len(NAMES)}: train again"
        )
    booster.set_param({"nthread": 1})  # a few rows: threads would cost more than they save
    return booster
