"""Lifting: what a layer computes, as an expression, and where its matrices come from.

One small rule a family of layers, registered by class with :func:`lifts`. A rule reads the options
of the layer and what kind of arguments it was called with, and either returns an :class:`Algebra`
or raises :class:`NotLifted` with the reason. It is asked again only if a call has other kinds of
arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.rewrite.ir import Expr
from pyg_accel.rewrite.matrices import Matrix

__all__ = ["Algebra", "Call", "NotLifted", "Rule", "lift", "lifts", "parameters_of"]


class NotLifted(Exception):
    """A layer, or a call of it, that no rule covers; the text says why."""


class Call:
    """One call of a layer.

    Attributes:
        conv: the layer.
        given: its arguments by name, defaults included.
        x: features of the sources.
        x_dst: features of the targets, if there are any.
        edge_index: [2, E].
        num_rows: number of targets.
        num_cols: number of sources.
        target: row of edge_index with the targets.
        memo: for rules, what several leaves are parts of.
    """

    def __init__(self, conv: Any, given: Mapping[str, Any]) -> None:
        """Look at the arguments.

        Raises:
            NotLifted: for arguments of a kind that no rule is for.
        """
        self.conv, self.given = conv, given
        self.memo: dict[str, Any] = {}
        x, edge_index = given.get("x"), given.get("edge_index")
        if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
            raise NotLifted("a graph that is not a plain edge_index")
        if edge_index.dim() != 2 or edge_index.size(0) != 2:
            raise NotLifted("a malformed edge_index")
        if isinstance(x, (tuple, list)):
            source, targets = x if len(x) == 2 else (None, None)
        else:
            source = targets = x
        if not isinstance(source, Tensor) or source.dim() != 2 or not source.is_floating_point():
            raise NotLifted("features that are not one matrix [N, F]")
        self.x: Tensor = source
        self.x_dst: Tensor | None = targets
        self.edge_index: Tensor = edge_index
        self.num_cols = source.size(0)
        size = given.get("size")
        rows = self.x_dst.size(0) if self.x_dst is not None else None
        if size is not None and size[1] is not None:
            rows = size[1]
        self.num_rows: int = self.num_cols if rows is None else rows
        self.target = 1 if conv.flow == "source_to_target" else 0
        if self.target == 0 and size is not None:
            raise NotLifted("a size together with the flow 'target_to_source'")

    @property
    def bipartite(self) -> bool:
        """Sources and targets are two sets of nodes."""
        return isinstance(self.given.get("x"), (tuple, list))


Value = Tensor | Matrix | float


@dataclass(frozen=True)
class Algebra:
    """What a layer computes.

    Attributes:
        expr: the expression, as the layer writes it.
        values: of every leaf, by name, how its value is found for a call.
        maps: of every map, by name, what it does.
        scores: of every attention, by name, how it computes the weights of the edges from the
            matrix and the features.
        owners: names of the arguments that matrices of edges are computed from.
        learned: names of diagonals that learn.
        constants: names of features that do not.
        sizes: of symbols that are the width of no weight.
        also: other forms of the expression; by default they are looked for.
        calls: of maps that need the call as well as the argument, by name.
        facts: what matrices are made with beside the arguments of a call.
        sampled: ``sampled()`` applies to its products with matrices of edges.
        compiles: its values are found by code that torch.compile can read.
    """

    expr: Expr
    values: Mapping[str, Callable[[Call], Value]]
    maps: Mapping[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    scores: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    also: tuple[Expr, ...] = ()
    calls: Mapping[str, Callable[[Call, Tensor], Any]] = field(default_factory=dict)
    facts: tuple[Any, ...] = ()
    sampled: bool = True
    compiles: bool = True


Rule = Callable[[Any, Call], Algebra]
_RULES: dict[type, Rule] = {}
# A subclass that writes one of these anew may compute anything.
_METHODS = ("forward", "message", "aggregate", "update", "edge_update", "message_and_aggregate")


def lifts(*classes: type) -> Callable[[Rule], Rule]:
    """Register a rule for layers of these classes, and of subclasses that change none of it."""

    def register(rule: Rule) -> Rule:
        for cls in classes:
            if cls in _RULES:
                raise ValueError(f"there is a rule for {cls.__name__} already")
            _RULES[cls] = rule
        _rule_of.cache_clear()
        return rule

    return register


@lru_cache(maxsize=256)
def _rule_of(cls: type) -> tuple[Rule | None, str]:
    """The rule for a class, or the reason why there is none."""
    for base in cls.__mro__:
        if base in _RULES:
            changed = [m for m in _METHODS if getattr(cls, m, None) is not getattr(base, m, None)]
            if changed:
                return None, f"{cls.__name__} has its own {', '.join(changed)}"
            return _RULES[base], ""
    return None, f"no lifting rule for {cls.__name__}"


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
    from pyg_accel.rewrite.rules import written  # and all others, which register themselves

    if conv.decomposed_layers > 1:
        raise NotLifted("decomposed_layers > 1")
    if conv.explain:
        raise NotLifted("an explainer is active")
    rule, reason = _rule_of(type(conv))  # type: ignore[arg-type]
    if rule is not None:
        return rule(conv, call)
    if type(conv).__module__.startswith("torch_geometric."):
        raise NotLifted(reason)
    return written(conv, call)
