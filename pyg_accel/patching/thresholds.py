"""From which size on acceleration pays: a measured number in a data file, not a guess.

``python -m benchmarks.thresholds`` measures it and writes ``thresholds.json``, with the machine it
was run on. ``PYG_ACCEL_THRESHOLDS`` names another file; ``PYG_ACCEL_ALWAYS=1`` ignores it.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pyg_accel.settings import settings

__all__ = ["Thresholds", "thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """When PyG's own path is kept.

    Attributes:
        min_edges: with fewer edges some layer was faster in PyG. Features play no part: what small
            graphs lose is the fixed cost of a call, and building the graph is little beside it.
    """

    min_edges: int


def thresholds() -> Thresholds:
    """Return the thresholds in force.

    Raises:
        ValueError: naming the file, if it does not hold them.
    """
    return _read(settings.thresholds or str(Path(__file__).parent / "thresholds.json"))


@lru_cache(maxsize=4)
def _read(path: str) -> Thresholds:
    try:
        found = json.loads(Path(path).read_text())["min_edges"]
        if type(found) is not int or found < 0:
            raise TypeError(f"'min_edges' must be an integer of at least 0 (got {found!r})")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected thresholds in '{path}': {error!r}") from error
    return Thresholds(found)
