"""Times from learned models: what profiling a machine taught, as factors of the roofline."""

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

__all__ = ["ABOUT", "FORMAT", "SHIPPED", "Learned", "read", "unusable"]

FORMAT = 1
ABOUT = "about.json"
SHIPPED = Path(__file__).with_name("models")
# Seconds of Python around a call of a rewritten model, which profiling, where one call is repeated,
# does not see. It decides where graphs are small.
AROUND = 15e-6
MOST_KEPT = 1 << 16  # predictions


class Learned:
    """Predicts with one boosted ensemble a primitive, trained on one machine.

    The ensembles know by what factor a call differs from the roofline; a primitive without one is
    left to the roofline. Predictions are kept, and made for many primitives at once.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Take a folder whose ``about.json`` :func:`read` has checked."""
        self.device = Device(**about["device"])
        self._folder = folder
        self._roofline = Roofline(Machine(**about["machine"]), "")
        self._parts: dict[str, dict[str, float]] = about["primitives"]
        self._boosters: dict[str, Any] = {}
        self._known: dict[Primitive, float] = {}
        rows = sum(part["rows"] for part in self._parts.values())
        self._source = (
            f"models learned on {self.device} from {rows:,} measurements of {about['measured']}"
        )

    @property
    def source(self) -> str:
        """What decides, for people."""
        return self._source

    @property
    def learned(self) -> Collection[str]:
        """The primitives that have an ensemble."""
        return self._parts

    def seconds(self, primitive: Primitive) -> float:
        """Return the expected time of one call."""
        return self.many([primitive])[0]

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call, predicting those of one kind together."""
        asked = list(primitives)
        if len(self._known) > MOST_KEPT:
            self._known.clear()
        new: dict[str, dict[Primitive, None]] = {}
        for primitive in asked:
            if primitive not in self._known:
                new.setdefault(primitive.name, {})[primitive] = None
        for name, several in new.items():
            self._known |= self._predict(name, list(several))
        return [self._known[primitive] + AROUND for primitive in asked]

    def _predict(self, name: str, primitives: list[Primitive]) -> dict[Primitive, float]:
        base = self._roofline.many(primitives)
        if name not in self._parts:
            return dict(zip(primitives, base, strict=True))
        factors = self._booster(name).inplace_predict(vectors(primitives))
        return {
            primitive: seconds * math.exp(float(factor))
            for primitive, seconds, factor in zip(primitives, base, factors, strict=True)
        }

    def _booster(self, name: str) -> Any:
        if name not in self._boosters:
            self._boosters[name] = _load(self._folder / f"{name}.json")
        return self._boosters[name]


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


def _load(path: Path) -> Any:
    import xgboost

    booster = xgboost.Booster()
    try:
        booster.load_model(path)
    except xgboost.core.XGBoostError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"expected an ensemble of xgboost in '{path}': {reason}") from error
    if booster.num_features() != len(NAMES):
        raise ValueError(
            f"'{path}' reads {booster.num_features()} features, not {len(NAMES)}: train again"
        )
    booster.set_param({"nthread": 1})  # a few rows: threads would cost more than they save
    return booster


@lru_cache(maxsize=16)
def read(folder: Path) -> Learned:
    """Read the models of one device.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text())
        _check(about, folder)
        return Learned(folder, about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected cost models in '{path}': {error!r}") from error


def _check(about: Any, folder: Path) -> None:
    """Raise for contents that :class:`Learned` could not use, before something is predicted."""
    if not isinstance(about, dict) or "format" not in about:
        raise ValueError("no 'format', so it is not from `python -m pyg_accel profile`")
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']!r}, but this version reads {FORMAT}: retrain")
    if tuple(about["features"]) != NAMES:
        raise ValueError("it was trained on other features: retrain")
    if not isinstance(about["measured"], str) or not about["primitives"]:
        raise ValueError("no date or no primitives")
    for name, part in about["primitives"].items():
        if not all(isinstance(part[key], int | float) for key in ("rows", "error_median")):
            raise TypeError(f"numbers of '{name}' are missing")
        if not (folder / f"{name}.json").is_file():
            raise ValueError(f"no file '{name}.json' beside it")
