"""Calls that were traced before, made again without a trace.

The first call of a kind is traced. If all that it did is one reduction of a formula, one softmax,
or one softmax and the sum that it weighs, over tensors that the call was given, and nothing else
can change that (:mod:`.readable`), the formulas are kept with the places of their operands, and the
next call of the kind goes straight to the kernel, that of a sample of edges where one is asked for.

A kind of call (:mod:`.kinds`) is everything that a trace looks at: what is known of each argument
beside its numbers, modes of torch, and the attributes that the layer's methods read.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel import ops
from pyg_accel.cache import Bounded
from pyg_accel.formula import Formula, parse
from pyg_accel.ops.csr import graph_of
from pyg_accel.ops.layout import Layout
from pyg_accel.patching.attention import Source, Weights, Where, attend
from pyg_accel.patching.kinds import Key
from pyg_accel.patching.reductions import combine
from pyg_accel.patching.sampling import aggregate, in_force
from pyg_accel.patching.steps import Step
from pyg_accel.record.edge_tensors import materialize

__all__ = [
    "THE_LAYER", "THE_SOFTMAX", "Origin", "Plan", "Softmax", "find", "forget", "keep", "sizes_of",
]  # fmt: skip

_MOST = 64  # kinds of call of one layer
THE_LAYER, THE_SOFTMAX = "the layer", "the softmax"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor of a call comes from.

    Attributes:
        name: of an argument of ``propagate`` or of an attribute of the layer, ``lin.weight`` say.
        place: in a pair of tensors, 0 or 1; or what has the attribute; None for an argument.
        steps: what the message made of it, views say, or dropout of attention weights; arguments
            that are tensors too have origins of their own.
        row: row of edge_index that gathers it; -1 for what has a row per edge.
        repeated: it has one row, which all targets share.
    """

    name: str
    place: int | str | None
    steps: tuple[Step, ...]
    row: int
    repeated: bool


class _Call:
    """A call that is being made: what it was given, and what was made of that."""

    def __init__(self, module: MessagePassing, kwargs: dict[str, Any]) -> None:
        self.module, self.kwargs = module, kwargs
        self.weights: Tensor | None = None
        self._made: dict[int, Any] = {}  # by the identity of steps, which tensors may share

    def take(self, origin: Origin) -> Any:
        """Return a tensor of this call."""
        if origin.place == THE_SOFTMAX:
            value: Any = self.weights
        elif origin.place == THE_LAYER:
            value = self.module
            for name in origin.name.split("."):
                value = getattr(value, name)
        else:
            value = self.kwargs[origin.name]
            if origin.place is not None:
                value = value[origin.place]
        for step in origin.steps:
            found = self._made.get(id(step))
            if found is None:
                function, args, kwargs = step
                args = tuple(self.take(a) if type(a) is Origin else a for a in args)
                found = self._made[id(step)] = function(value, *args, **kwargs)
            value = found
        return value


@dataclass(frozen=True, slots=True)
class Softmax:
    """Attention weights.

    Attributes:
        score: formula of the scores.
        operands: of the formula.
        layout: in which they meet; None where the formula sums over the width.
        dtype: of the weights.
        trailing: shape of the weights of an edge.
        written: whether they are an ordinary tensor.
    """

    score: Formula
    operands: tuple[Origin, ...]
    layout: Layout | None
    dtype: torch.dtype
    trailing: tuple[int, ...]
    written: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of call.

    Attributes:
        text: for the report.
        target: row of edge_index with the target nodes.
        gathered: (argument, row of edge_index) of node features that are no pair: they tell how
            many nodes there are. Of pairs both do.
        softmax: attention weights that the call makes.
        formula: of the messages that it reduces; None if it returns attention weights.
        reduce: of the messages; ``"attention"`` where they are weighted; several where the layer's
            aggregation combines them.
        operands: of the formula; or the weights to return.
        assigned: attributes of the layer that weights are assigned to.
        order: tensors to make first, where the trace made them in another order than operands do: a
            checkpoint expects that a call which is made again saves its tensors in the same order.
    """

    text: str
    target: int
    gathered: tuple[tuple[str, int], ...]
    softmax: Softmax | None
    formula: Formula | str | None
    reduce: str | tuple[str, ...]
    operands: tuple[Origin, ...]
    assigned: tuple[tuple[str, Origin], ...]
    order: tuple[Origin, ...]

    def run(self, module: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        """Make a call; None if its sizes do not agree, which PyG's own path explains."""
        sizes = sizes_of(self.gathered, self.target, kwargs)
        if sizes is None:
            return None
        rows, cols = sizes
        call = _Call(module, kwargs)
        for origin in self.order:
            call.take(origin)
        where = Where(edge_index, self.target, rows, cols)
        if self.softmax is not None and not self._weigh(call, where):
            return None
        operands = [call.take(origin) for origin in self.operands]
        if self.formula is None:
            out = operands[0]
        else:
            if not _fit(self.operands, operands, where):
                return None
            out = self._reduce(module, where, operands)
        if out is not None:
            for name, origin in self.assigned:
                vars(module)[name] = call.take(origin)
        return out

    def _weigh(self, call: _Call, where: Where) -> bool:
        """Put the softmax off, unless its result is asked for; returns whether it can be made."""
        softmax = self.softmax
        assert softmax is not None
        graph = _graph(where)
        operands = [call.take(origin) for origin in softmax.operands]
        if graph is None or not _fit(softmax.operands, operands, where):
            return False
        if softmax.layout is not None:
            operands = [softmax.layout.fold(t) for t in operands]
        shape = (graph.num_edges, *softmax.trailing)
        repeated = [origin.repeated for origin in softmax.operands]
        source = Source(where.owner, where.target, graph, softmax.score, operands, repeated,
                        softmax.dtype, shape)  # fmt: skip
        call.weights = source.written() if softmax.written else Weights(source)
        return True

    def _reduce(self, module: MessagePassing, where: Where, operands: list[Any]) -> Tensor | None:
        if self.reduce == "attention":
            assert isinstance(self.formula, Formula)
            repeated = [origin.repeated for origin in self.operands]
            attended = attend(self.formula, operands, repeated, where)
            return None if attended is None else attended[0]
        graph = _graph(where)
        if graph is None:
            return None
        for place, origin in enumerate(self.operands):
            if origin.repeated:
                operands[place] = operands[place].expand(where.num_rows, *operands[place].shape[1:])
        assert isinstance(self.formula, str)
        out: Any
        if in_force() is None:
            out = ops.gspmm(graph, self.formula, operands, reduce=self.reduce, edge_order=True)
        else:
            reduces = (self.reduce,) if isinstance(self.reduce, str) else self.reduce
            operands = [materialize(t) for t in operands]
            out, _ = aggregate(graph, parse(self.formula), operands, reduces)
            out = out[0] if isinstance(self.reduce, str) else out
        if not isinstance(self.reduce, str):
            got = dict(zip(self.reduce, out, strict=True))
            out = combine(module.aggr_module, got, lambda: graph.degree, 0)
        reduced: Tensor = out
        return reduced


def _graph(where: Where) -> Any:
    """The CSR form of a call's graph; None if its edges do not fit the numbers of nodes."""
    try:
        return graph_of(where.owner, where.num_rows, where.num_cols, where.target)
    except (IndexError, ValueError):
        return None


def _fit(origins: tuple[Origin, ...], operands: list[Any], where: Where) -> bool:
    """Whether operands have the rows that their places ask for."""
    for origin, t in zip(origins, operands, strict=True):
        if origin.repeated:
            rows = 1
        elif origin.row < 0:
            rows = where.owner.size(1)
        else:
            rows = where.num_rows if origin.row == where.target else where.num_cols
        if t.size(0) != rows:
            return False
    return True


def sizes_of(
    gathered: tuple[tuple[str, int], ...], target: int, kwargs: dict[str, Any]
) -> tuple[int, int] | None:
    """The numbers of targets and sources, as PyG finds them; None if they do not agree."""
    given = kwargs.get("size")
    sizes: list[int | None] = [None, None] if given is None else list(given)
    for name, row in gathered:
        value = kwargs[name]
        pair = enumerate(value) if type(value) is tuple else ((row, value),)
        for place, tensor in pair:
            if tensor is None:
                continue
            if sizes[place] is None:
                sizes[place] = tensor.size(0)
            elif sizes[place] != tensor.size(0):
                return None
    rows, cols = sizes[target], sizes[1 - target]
    rows, cols = cols if rows is None else rows, rows if cols is None else cols
    return None if rows is None or cols is None else (rows, cols)


# Of each layer: its plans, None for kinds of call that have none.
_known: "weakref.WeakKeyDictionary[MessagePassing, Bounded[Key, Plan | None]]" = (
    weakref.WeakKeyDictionary()
)


def forget() -> None:
    """Drop all plans."""
    _known.clear()


def find(module: MessagePassing, kind: Key | None) -> Plan | None:
    """Return the plan of a kind of call, if there is one."""
    known = None if kind is None else _known.get(module)
    return None if known is None or kind is None else known.get(kind)


def keep(module: MessagePassing, kind: Key, make: Callable[[], Plan | None]) -> None:
    """Keep what is made for a kind of call, if nothing is known of it yet."""
    known = _known.setdefault(module, Bounded(_MOST))
    if kind not in known:
        known[kind] = make()
