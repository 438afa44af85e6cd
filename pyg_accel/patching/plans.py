"""Calls that were traced before, made again without a trace.

The first call of a kind is traced. If all that it did is one reduction of a formula, one softmax,
or one softmax and the sum that it weighs, over tensors that the call was given, and nothing else
can change that (:mod:`.readable`), the formulas are kept with the places of their operands, and the
next call of the kind goes straight to the kernel.

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
from pyg_accel.formula import Formula
from pyg_accel.ops.csr import graph_of
from pyg_accel.ops.layout import Layout
from pyg_accel.patching.attention import Source, Weights, Where, attend
from pyg_accel.patching.kinds import Key, reads_of, tensors_of
from pyg_accel.patching.reductions import combine
from pyg_accel.patching.trace import VIEWS, Done, Made, Trace

__all__ = ["Plan", "find", "forget", "learn"]

_MOST = 64  # kinds of call of one layer
# A function with its arguments, to be called with what the one before it returned.
_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_THE_LAYER, _THE_SOFTMAX = "the layer", "the softmax"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor of a call comes from.

    Attributes:
        name: of an argument of ``propagate`` or of an attribute of the layer, ``lin.weight`` say.
        place: in a pair of tensors, 0 or 1; or what has the attribute; None for an argument.
        steps: what the message made of it, views say, or dropout of attention weights; arguments
            that are tensors too have origins of their own.
        row: row of edge_index that gathers it; -1 for what has a row an edge.
        repeated: it has one row, which all targets share.
    """

    name: str
    place: int | str | None
    steps: tuple[_Step, ...]
    row: int
    repeated: bool


_CONSTANTS = frozenset({_Origin, type(None), bool, int, float})  # arguments of a step


class _Call:
    """A call that is being made: what it was given, and what was made of that."""

    def __init__(self, module: MessagePassing, kwargs: dict[str, Any]) -> None:
        self.module, self.kwargs = module, kwargs
        self.weights: Weights | None = None
        self._made: dict[int, Any] = {}  # by the identity of steps, which tensors may share

    def take(self, origin: _Origin) -> Any:
        """Return a tensor of this call."""
        if origin.place == _THE_SOFTMAX:
            value: Any = self.weights
        elif origin.place == _THE_LAYER:
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
                args = tuple(self.take(a) if type(a) is _Origin else a for a in args)
                found = self._made[id(step)] = function(value, *args, **kwargs)
            value = found
        return value


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Attention weights.

    Attributes:
        score: formula of the scores.
        operands: of the formula.
        layout: in which they meet; None where the formula sums over the width.
        dtype: of the weights.
        trailing: shape of the weights of an edge.
    """

    score: Formula
    operands: tuple[_Origin, ...]
    layout: Layout | None
    dtype: torch.dtype
    trailing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of call.

    Attributes:
        text: for the report.
        target: row of edge_index with the target nodes.
        gathered: (argument, row of edge_index) of node features that are no pair: they tell how
            many nodes there are. Of pairs both do.
        softmax: attention weights that the call makes.
        formula: of the messages that it reduces; None if it returns the attention weights.
        reduce: of the messages; ``"attention"`` where they are weighted; several where the layer's
            aggregation combines them.
        operands: of the formula; or the weights to return.
        assigned: attributes of the layer that weights are assigned to.
    """

    text: str
    target: int
    gathered: tuple[tuple[str, int], ...]
    softmax: _Softmax | None
    formula: Formula | str | None
    reduce: str | tuple[str, ...]
    operands: tuple[_Origin, ...]
    assigned: tuple[tuple[str, _Origin], ...]

    def run(self, module: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> Any:
        """Make a call; None if its sizes do not agree, which PyG's own path explains."""
        sizes = _sizes(self.gathered, self.target, kwargs)
        if sizes is None:
            return None
        rows, cols = sizes
        call = _Call(module, kwargs)
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
        """Put the softmax off; returns whether it can be made."""
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
        call.weights = Weights(
            Source(where.owner, where.target, graph, softmax.score, operands, repeated,
                   softmax.dtype, shape)
        )  # fmt: skip
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
        out = ops.gspmm(graph, self.formula, operands, reduce=self.reduce, edge_order=True)
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


def _fit(origins: tuple[_Origin, ...], operands: list[Any], where: Where) -> bool:
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


def _sizes(
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
_known: "weakref.WeakKeyDictionary[MessagePassing, dict[Key, Plan | None]]" = (
    weakref.WeakKeyDictionary()
)


def forget() -> None:
    """Drop all plans."""
    _known.clear()


def find(module: MessagePassing, kind: Key | None) -> Plan | None:
    """Return the plan of a kind of call, if there is one."""
    return None if kind is None else _known.get(module, {}).get(kind)


def learn(
    module: MessagePassing, kind: Key | None, kwargs: dict[str, Any], trace: Any, out: Any
) -> None:
    """Keep what a call did, if it can be done again."""
    if kind is None:
        return
    plans = _known.setdefault(module, {})
    if kind in plans:
        return
    if len(plans) >= _MOST:
        plans.clear()
    plans[kind] = _Learner(module, kwargs, trace).plan(out) if type(trace) is Trace else None


class _Learner:
    """Finds out where the tensors of a traced call came from."""

    def __init__(self, module: MessagePassing, kwargs: dict[str, Any], trace: Trace) -> None:
        self.module, self.kwargs, self.trace = module, kwargs, trace
        self.made = {id(made.result): made for made in trace.made}
        self._steps: dict[int, _Step | None] = {}

    def plan(self, out: Any) -> Plan | None:
        """Return the plan of the call; None if it has none."""
        trace, done, made = self.trace, self.trace.done, self.trace.softmaxed
        if trace.others or trace.edge_index is not trace.owner:
            return None
        gathered: dict[tuple[str, int], None] = {}
        for tensor, row in trace.gathered:
            origin = self._origin(tensor, row)
            if origin is None or origin.steps or origin.place not in (None, 0, 1):
                return None
            gathered[origin.name, row] = None
        softmax = None
        if made is not None:
            softmax = self._softmax(made)
            if softmax is None:
                return None
        formula: Formula | str | None = None
        reduce: str | tuple[str, ...] = ""
        if done is not None and out is done.result:
            operands = [self._origin(*operand) for operand in done.operands]
            formula, reduce = done.formula, done.reduce
            if reduce != "attention":
                formula = str(formula)
        elif isinstance(out, Weights):
            operands = [self._origin(out, -1)]
        else:
            return None
        assigned = [(name, self._assigned(name)) for name in reads_of(type(self.module)).assigned]
        sizes = _sizes(tuple(gathered), trace.target, self.kwargs)
        rows = out.source.graph.num_rows if isinstance(out, Weights) else out.size(0)
        if (
            None in operands
            or any(origin is None for _, origin in assigned)
            or len(trace.formulas) != 1
            or trace.drawn != self._draws()
            or sizes is None
            or sizes[0] != rows
        ):
            return None
        return Plan(
            trace.formulas[0], trace.target, tuple(gathered), softmax, formula, reduce,
            tuple(operands), tuple(assigned),  # type: ignore[arg-type]
        )  # fmt: skip

    def _softmax(self, made: Done) -> _Softmax | None:
        operands = [self._origin(*operand) for operand in made.operands]
        weights = made.result
        if None in operands or not isinstance(weights, Weights):
            return None
        source = weights.source
        trailing = tuple(source.shape[1:])
        folded = [t.shape[1:] for t, _, _ in made.operands] != [
            t.shape[1:] for t in source.operands
        ]
        layout = Layout(trailing, len(trailing)) if folded else None
        return _Softmax(source.score, tuple(operands), layout, source.dtype, trailing)  # type: ignore[arg-type]

    def _assigned(self, name: str) -> _Origin | None:
        value = vars(self.module).get(name)
        return self._origin(value, -1) if isinstance(value, Weights) else None

    def _origin(self, tensor: Tensor, row: int, repeated: bool = False) -> _Origin | None:
        """Where a tensor comes from. Of a pair, PyG gathers the one whose place is the row."""
        if isinstance(tensor, Weights):
            return self._of_weights(tensor)
        steps: list[_Step] = []
        while id(tensor) in self.made:
            step = self._made_by(self.made[id(tensor)])
            if step is None:
                return None
            steps.insert(0, step)
            tensor = self.made[id(tensor)].args[0]
        found: list[tuple[str, int | str | None]] = [
            (name, row if type(value) is tuple else None)
            for name, value in self.kwargs.items()
            if value is tensor or (type(value) is tuple and row >= 0 and value[row] is tensor)
        ]
        found += [
            (path, _THE_LAYER)
            for name in reads_of(type(self.module)).attributes
            for path, value in tensors_of(name, getattr(self.module, name))
            if value is tensor
        ]
        if len(found) != 1:  # one tensor may be several arguments
            return None
        return _Origin(*found[0], tuple(steps), row, repeated)

    def _made_by(self, made: Made) -> _Step | None:
        """The step that makes an ordinary tensor of its first argument; None if none can."""
        key = id(made.result)
        if key not in self._steps:
            self._steps[key] = self._repeatable(made)
        return self._steps[key]

    def _repeatable(self, made: Made) -> _Step | None:
        function, given, kwargs = made.function, made.args[1:], made.kwargs
        if function is None or not made.args or not isinstance(made.args[0], Tensor):
            return None
        if function in VIEWS:
            return _for_any_size((function, given, kwargs), -1)
        args = [self._origin(a, -1) if isinstance(a, Tensor) else a for a in given]
        for now, then in zip(args, given, strict=True):
            if type(now) not in _CONSTANTS or (now is None and then is not None):
                return None
        known = made.result.dim() and all(type(v) in _CONSTANTS for v in kwargs.values())
        return (function, tuple(args), kwargs) if known else None

    def _of_weights(self, weights: Weights) -> _Origin | None:
        """Where attention weights come from: this call, or an argument that another call made."""
        origins = [
            (name, None, value) for name, value in self.kwargs.items() if isinstance(value, Weights)
        ]
        softmaxed = self.trace.softmaxed
        if softmaxed is not None and isinstance(softmaxed.result, Weights):
            origins.append(("", _THE_SOFTMAX, softmaxed.result))  # type: ignore[arg-type]
        for name, place, first in origins:
            count = len(first.made)
            if first.source is weights.source and weights.made[:count] == first.made:
                steps = [self._step(step) for step in weights.made[count:]]
                if None not in steps:
                    return _Origin(name, place, tuple(steps), -1, repeated=False)  # type: ignore[arg-type]
        return None

    def _draws(self) -> int:
        """How many masks the plan draws; more than one might come in another order."""
        drawn = sum(
            step is not None and step[0].__name__ == "dropout" for step in self._steps.values()
        )
        return drawn if drawn <= 1 else -1

    def _step(self, step: _Step) -> _Step | None:
        """The step for any number of edges; steps that tensors share stay one."""
        if id(step) not in self._steps:
            self._steps[id(step)] = _for_any_size(step, self.trace.num_edges)
        return self._steps[id(step)]


def _for_any_size(step: _Step, num_edges: int) -> _Step | None:
    """A step that does the same for any number of edges; None if it names another number."""
    function, args, kwargs = step
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = tuple(args[0])
    if not all(type(a) in (int, float, bool) for a in (*args, *kwargs.values())):
        return None
    if function.__name__ not in ("view", "reshape"):
        return function, args, kwargs
    if kwargs or not args or args[0] not in (-1, num_edges) or -1 in args[1:]:
        return None
    return function, (-1, *args[1:]), kwargs
