"""What a layer computes in one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_accel.rewrite.halos import halos_of
from pyg_accel.rewrite.ir import Expr
from pyg_accel.rewrite.matrices import Matrix, Scores

__all__ = ["Algebra", "Call", "NotLifted", "Value"]


class NotLifted(Exception):
    """A layer, or a call of it, that is left as it is; the text says why."""


class Call:
    """One call of a layer.

    Attributes:
        conv: the layer.
        given: its arguments by name, defaults included.
        features: name of the argument with the features: ``x``, or the first matrix.
        x: features of the sources.
        x_dst: features of the targets, if there are any.
        edge_index: [2, E].
        num_rows: number of targets.
        num_cols: number of sources, those of other processes included.
        target: row of edge_index with the targets.
        memo: for rules, what several leaves are parts of.
        halos: rows of other processes that the edges read, if there are any.
        static: the features are the same tensors in every call.
    """

    static = False

    def __init__(self, conv: Any, given: Mapping[str, Any]) -> None:
        """Look at the arguments.

        Raises:
            NotLifted: for arguments of a kind that no rule is for.
        """
        self.conv, self.given = conv, given
        self.memo: dict[str, Any] = {}
        self.features = _name_of("x", given, _is_features)
        x = given.get(self.features)
        edge_index = given.get(_name_of("edge_index", given, _is_graph))
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
        self.halos = halos_of(edge_index)
        self._whole: dict[int, tuple[Any, Any]] = {}
        self.num_cols = source.size(0)
        size = given.get("size")
        rows = self.x_dst.size(0) if self.x_dst is not None else None
        if size is not None and size[1] is not None:
            rows = size[1]
        self.num_rows: int = self.num_cols if rows is None else rows
        self.target = 1 if conv.flow == "source_to_target" else 0
        if self.target == 0:  # PyG's propagate gathers from the first, and returns as many
            self.num_rows = self.num_cols
        if self.target == 0 and size is not None:
            raise NotLifted("a size together with the flow 'target_to_source'")
        if self.halos is not None:
            given_rows = source.size(0) if targets is None else targets.size(0)
            self.num_cols, self.num_rows = self.halos.rows, self.halos.targets
            if source.size(0) != self.halos.own or given_rows != self.num_rows:
                raise NotLifted("features of other nodes than this rank's")

    @property
    def bipartite(self) -> bool:
        """Sources and targets are two sets of nodes."""
        return isinstance(self.given.get(self.features), (tuple, list))

    def is_one_of(self, tensors: tuple[Any, ...]) -> bool:
        """Whether all features are among some tensors."""
        given = self.given.get(self.features)
        features = given if isinstance(given, (tuple, list)) else (given,)
        return bool(tensors) and all(any(x is t for t in tensors) for x in features)

    def whole(self, data: Any) -> Any:
        """Return what a matrix of edges is multiplied with, for all of its columns."""
        if self.halos is None:
            return data
        if id(data) not in self._whole:
            self._whole[id(data)] = data, self.halos.whole(data)
        return self._whole[id(data)][1]


def _name_of(usual: str, given: Mapping[str, Any], is_one: Callable[[Any], bool]) -> str:
    """The name of an argument: the usual one, or that of the first that may be it."""
    if usual in given:
        return usual
    return next((name for name, value in given.items() if is_one(value)), usual)


def _is_graph(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() != 2 or value.size(0) != 2:
        return False
    return value.dtype in (torch.int32, torch.int64)


def _is_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()


Value = Tensor | Matrix | float


@dataclass(frozen=True)
class Algebra:
    """What a layer computes.

    Attributes:
        expr: the expression, as the layer writes it.
        values: of every leaf, by name, how its value is found for a call.
        maps: of every map, by name, what it does.
        scores: of every attention, by name, how it computes the weights of the edges from the
            matrix and the features; or their scores alone, which one kernel goes on with.
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
    scores: Mapping[str, Callable[..., Tensor | Scores]] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    also: tuple[Expr, ...] = ()
    calls: Mapping[str, Callable[[Call, Tensor], Any]] = field(default_factory=dict)
    facts: tuple[Any, ...] = ()
    sampled: bool = True
    compiles: bool = True
