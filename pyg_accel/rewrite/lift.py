"""Lifting: what a layer computes, as an expression, and where its matrices come from.

A rule (:mod:`.rules`) reads the options of the layer and what kind of arguments it was called with,
and either returns an :class:`Algebra` or raises :class:`NotLifted` with the reason. It is asked
again only if a call has other kinds of arguments.
"""

from collections.abc import Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

from torch_geometric.nn import MessagePassing

from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.guards import reasons_now
from pyg_accel.rewrite.registry import rule_of
from pyg_accel.rewrite.rules import written

__all__ = ["bind", "is_written", "lift", "parameters_of"]


@lru_cache(maxsize=256)
def parameters_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of a layer's ``forward`` and their defaults."""
    found = list(signature(cls.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    return tuple((p.name, None if p.default is p.empty else p.default) for p in found)


def bind(conv: MessagePassing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    parameters = parameters_of(type(conv))  # type: ignore[arg-type]
    given = dict(parameters)
    given.update(zip((name for name, _ in parameters), args, strict=False))
    given.update(kwargs)
    return given


def lift(conv: MessagePassing, call: Call) -> Algebra:
    """Return what a layer computes.

    Raises:
        NotLifted: with the reason.
    """
    if reasons := reasons_now(conv):
        raise NotLifted("; ".join(reasons))
    return (rule_of(type(conv)) or written)(conv, call)  # type: ignore[arg-type]


def is_written(cls: type) -> bool:
    """Return whether a layer is without a rule: its code is run as it is, in every call."""
    return rule_of(cls) is None
