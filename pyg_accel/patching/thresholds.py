"""From which size on acceleration pays: measured numbers in a data file, not a guess.

What a call gains an edge depends on what it computes, so there is a number for each kind of call,
in inference and in training, and one for graphs that were never seen: those must be sorted first.
Compiled calls have one number, because each number that a compiler compares with is another graph.
``python -m benchmarks.thresholds`` measures them and writes ``thresholds.json``, with the machines
it was run on. ``python -m pyg_accel tune`` measures those of a user's machine, which come first
(see :mod:`pyg_accel.tuned`); ``PYG_ACCEL_ALWAYS=1`` ignores all of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pyg_accel.settings import settings
from pyg_accel.tuned import device_of_kind, tuned, tuning_file

__all__ = ["KINDS", "SHIPPED", "Limits", "Thresholds", "thresholds"]

SHIPPED = Path(__file__).with_name("thresholds.json")


# Sums of features, with a weight per edge perhaps; messages made of several features; softmax
# weights; features of edges. The others of these are traced in each call (or, of sums, have a graph
# that is derived anew in each). Softmax weights of narrow features of edges; all relations of a
# layer at once; what a network makes of every edge; a matrix that a network makes of every edge.
KINDS = (
    "sums", "other sums", "messages", "other messages", "attention", "other attention",
    "edge features", "other edge features", "edge attention", "relations", "edge networks",
    "edge matrices",
)  # fmt: skip


class Limits(NamedTuple):
    """The fewest edges that one kind of call is accelerated with.

    Attributes:
        inference: without gradients.
        training: with gradients.
        new: of a graph that the layer has not seen before.
        elements: with as many elements of messages, edges times features, a call is accelerated
            whatever its number of edges; None: that is no reason.
    """

    inference: int
    training: int
    new: int
    elements: int | None = None


@dataclass(frozen=True)
class Thresholds:
    """When PyG's own path is kept on a kind of device.

    Attributes:
        min_edges: with fewer no call is accelerated, with as many one whose kind is not known yet.
        min_elements: with as many elements of messages, edges times features, a call is accelerated
            whatever its number of edges; None: that is no reason.
        wide_edges: with fewer edges, elements are no reason, however many features there are.
        kinds: the limits of each kind; one that is left out has ``min_edges`` alone.
        compiled: with fewer no call is accelerated under ``torch.compile``, where a graph may be
            new in every call and is not known; by default ``min_edges``.
    """

    min_edges: int
    min_elements: int | None = None
    kinds: Mapping[str, Limits] = field(default_factory=dict)
    compiled: int | None = None
    wide_edges: int = 0

    @property
    def fewest_compiled(self) -> int:
        """``compiled``, or its default."""
        return self.min_edges if self.compiled is None else self.compiled

    @cached_property
    def few_edges(self) -> list[str]:
        """Why a call with fewer edges is not accelerated."""
        return [f"small: fewer than {self.min_edges} edges"]

    @cached_property
    def few_elements(self) -> list[str]:
        """Why a call with fewer edges and elements is not accelerated."""
        return [f"{self.few_edges[0]} and {self.min_elements} elements of messages"]

    def are_many(self, elements: int | None, num_edges: int, width: int) -> bool:
        """Whether a limit of elements is reached: edges times features."""
        if elements is None or num_edges < self.wide_edges:
            return False
        return num_edges * width >= elements

    def of(self, kind: str) -> Limits:
        """Return the limits of a kind of call."""
        return self.kinds.get(kind) or Limits(self.min_edges, self.min_edges, self.min_edges)


def thresholds(device: str) -> Thresholds:
    """Return the thresholds in force.

    Args:
        device: kind of device, ``"cpu"`` or ``"cuda"``. One that was not tuned has the shipped
            thresholds; one that was not measured has none.

    Raises:
        ValueError: naming the file, if it does not hold thresholds.
    """
    return _in_force(settings.tuning, device, torch.get_num_threads())


@lru_cache(maxsize=16)
def _in_force(tuning: str, kind: str, threads: int) -> Thresholds:
    part, path = tuned(device_of_kind(kind, threads)).get("thresholds"), tuning_file()
    if part is None:
        part, path = json.loads(SHIPPED.read_text()).get(kind, {"min_edges": 0}), SHIPPED
    try:
        return _thresholds(part)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected thresholds in '{path}': {error!r}") from error


def _thresholds(part: dict[str, Any]) -> Thresholds:
    least, kinds = _number(part["min_edges"], "min_edges"), part.get("kinds", {})
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise KeyError(f"expected kinds of {', '.join(KINDS)} (got {', '.join(unknown)})")
    limits = {
        kind: Limits(
            **{name: max(least, _number(numbers[name], name)) for name in Limits._fields[:-1]},
            elements=_optional(numbers, "elements"),
        )
        for kind, numbers in kinds.items()
    }
    return Thresholds(
        least, _optional(part, "min_elements"), limits, _optional(part, "compiled"),
        _optional(part, "wide_edges") or 0,
    )  # fmt: skip


def _optional(part: dict[str, Any], name: str) -> int | None:
    return None if part.get(name) is None else _number(part[name], name)


def _number(found: object, name: str) -> int:
    if type(found) is not int or found < 0:
        raise TypeError(f"'{name}' must be an integer of at least 0 (got {found!r})")
    return found
