"""From which size on acceleration pays: measured numbers in a data file, not guesses.

``python -m benchmarks.thresholds`` measures them and writes ``thresholds.json``, with the machine
it was run on. ``PYG_ACCEL_THRESHOLDS`` names another file; ``PYG_ACCEL_ALWAYS=1`` ignores them.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pyg_accel.settings import settings

__all__ = ["Thresholds", "thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """Sizes as edges x features of the widest operand.

    Attributes:
        cached_work: below it PyG's own path is as fast, even if the graph is there already.
        one_shot_work: below it a graph that was never seen before is not worth building.
    """

    cached_work: int
    one_shot_work: int


def thresholds() -> Thresholds:
    """Return the thresholds in force.

    Raises:
        ValueError: naming the file, if it does not hold them.
    """
    return _read(settings.thresholds or str(Path(__file__).parent / "thresholds.json"))


@lru_cache(maxsize=4)
def _read(path: str) -> Thresholds:
    try:
        data = json.loads(Path(path).read_text())
        found = Thresholds(data["cached_work"], data["one_shot_work"])
        if not all(type(value) is int and value >= 0 for value in vars(found).values()):
            raise TypeError("sizes must be integers of at least 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected thresholds in '{path}': {error}") from error
    return found
