"""From which size on acceleration pays: measured numbers in a data file, not a guess.

``python -m benchmarks.thresholds`` measures them and writes ``thresholds.json``, with the machines
it was run on. ``PYG_ACCEL_THRESHOLDS`` names another file; ``PYG_ACCEL_ALWAYS=1`` ignores it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pyg_accel.settings import settings

__all__ = ["SHIPPED", "Thresholds", "thresholds"]

SHIPPED = Path(__file__).with_name("thresholds.json")


@dataclass(frozen=True)
class Thresholds:
    """When PyG's own path is kept on a kind of device.

    Attributes:
        min_edges: with fewer edges some layer was faster in PyG. Features play no part: what small
            graphs lose is the fixed cost of a call, and building the graph is little beside it.
    """

    min_edges: int


def thresholds(device: str) -> Thresholds:
    """Return the thresholds in force.

    Args:
        device: kind of device, ``"cpu"`` or ``"cuda"``. One that the user's file leaves out has
            the shipped thresholds; one that nobody measured has none.

    Raises:
        ValueError: naming the file, if it does not hold thresholds.
    """
    own = _read(settings.thresholds or str(SHIPPED))
    return own.get(device) or _read(str(SHIPPED)).get(device) or Thresholds(0)


@lru_cache(maxsize=4)
def _read(path: str) -> dict[str, Thresholds]:
    try:
        devices = json.loads(Path(path).read_text())
        if not isinstance(devices, dict) or not devices:
            raise TypeError("the file must hold an object with a part for each kind of device")
        return {device: _limits(part["min_edges"]) for device, part in devices.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected thresholds in '{path}': {error!r}") from error


def _limits(found: object) -> Thresholds:
    if type(found) is not int or found < 0:
        raise TypeError(f"'min_edges' must be an integer of at least 0 (got {found!r})")
    return Thresholds(found)
