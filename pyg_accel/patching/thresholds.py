"""From which size on acceleration pays: measured numbers in a data file, not a guess.

What a call gains an edge depends on what it computes, so there is a number for each kind of call,
in inference and in training, and one for graphs that were never seen: those must be sorted first.
Compiled calls have one number, because each number that a compiler compares with is another graph.
``python -m benchmarks.thresholds`` measures them and writes ``thresholds.json``, with the machines
it was run on. ``PYG_ACCEL_THRESHOLDS`` names another file; ``PYG_ACCEL_ALWAYS=1`` ignores it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pyg_accel.settings import settings

__all__ = ["KINDS", "SHIPPED", "Limits", "Thresholds", "thresholds"]

SHIPPED = Path(__file__).with_name("thresholds.json")


# Sums of features, with a weight an edge perhaps; messages made of several features; softmax
# weights; features of edges; all relations of a layer at once.
KINDS = ("sums", "messages", "attention", "edge features", "relations")


class Limits(NamedTuple):
    """The fewest edges that one kind of call is accelerated with.

    Attributes:
        inference: without gradients.
        training: with gradients.
        new: of a graph that the layer has not seen before.
    """

    inference: int
    training: int
    new: int


@dataclass(frozen=True)
class Thresholds:
    """When PyG's own path is kept on a kind of device.

    Attributes:
        min_edges: with fewer no call is accelerated, with as many one whose kind is not known yet.
        min_elements: with as many elements of messages, edges times features, a call is accelerated
            whatever its number of edges; None: that is no reason.
        kinds: the limits of each kind; one that is left out has ``min_edges`` alone.
        compiled: with fewer no call is accelerated under ``torch.compile``, where a graph may be
            new in every call and nobody can ask; by default ``min_edges``.
    """

    min_edges: int
    min_elements: int | None = None
    kinds: Mapping[str, Limits] = field(default_factory=dict)
    compiled: int | None = None

    @property
    def fewest_compiled(self) -> int:
        """``compiled``, or its default."""
        return self.min_edges if self.compiled is None else self.compiled

    def of(self, kind: str) -> Limits:
        """Return the limits of a kind of call."""
        return self.kinds.get(kind) or Limits(self.min_edges, self.min_edges, self.min_edges)


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
        return {device: _thresholds(part) for device, part in devices.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected thresholds in '{path}': {error!r}") from error


def _thresholds(part: dict[str, Any]) -> Thresholds:
    least, kinds = _number(part["min_edges"], "min_edges"), part.get("kinds", {})
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise KeyError(f"expected kinds of {', '.join(KINDS)} (got {', '.join(unknown)})")
    limits = {
        kind: Limits(*(max(least, _number(numbers[name], name)) for name in Limits._fields))
        for kind, numbers in kinds.items()
    }
    elements, compiled = (
        None if part.get(name) is None else _number(part[name], name)
        for name in ("min_elements", "compiled")
    )
    return Thresholds(least, elements, limits, compiled)


def _number(found: object, name: str) -> int:
    if type(found) is not int or found < 0:
        raise TypeError(f"'{name}' must be an integer of at least 0 (got {found!r})")
    return found
