"""Calls that were traced before, made again without a trace.

The first call of a kind is traced. If all that it did is one reduction of a formula over tensors
that it was given, and nothing else can change that (:mod:`.readable`), the formula is kept with the
places of its operands, and the next call of the kind goes straight to the kernel.

A kind of call is everything that a trace looks at: what is known of each argument beside its
numbers, modes of torch, and the attributes that the layer's methods read. The layer's methods,
hooks and aggregation are looked at in every call.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing

from pyg_accel import ops
from pyg_accel.backends.dispatch import situation
from pyg_accel.ops.csr import graph_of
from pyg_accel.patching.readable import METHODS, attributes_read
from pyg_accel.patching.reasons import has_hooks
from pyg_accel.patching.seam import is_hooked
from pyg_accel.patching.trace import Trace

__all__ = ["Plan", "find", "forget", "learn"]

_MOST = 64  # kinds of call of one layer
_VIEWS = frozenset({"view", "unsqueeze"})


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an operand comes from.

    Attributes:
        name: of an argument of ``propagate``.
        place: in a pair of tensors, 0 or 1; -1 for a tensor by itself.
        views: (method, arguments) of what the message made of it.
    """

    name: str
    place: int
    views: tuple[tuple[str, tuple[Any, ...]], ...]

    def take(self, kwargs: dict[str, Any]) -> Tensor:
        """Return the operand of a call."""
        found: Any = kwargs[self.name]
        tensor: Tensor = found if self.place < 0 else found[self.place]
        for name, args in self.views:
            tensor = getattr(tensor, name)(*args)
        return tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """A kind of call.

    Attributes:
        formula: of the messages.
        reduce: of the messages.
        sources: of its operands.
        gathered: (argument, row of edge_index) of node features by themselves: they tell how many
            nodes there are. Of pairs both do.
        target: row of edge_index with the target nodes.
        text: for the report.
    """

    formula: str
    reduce: str
    sources: tuple[_Source, ...]
    gathered: tuple[tuple[str, int], ...]
    target: int
    text: str

    def run(self, edge_index: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Make a call; None if its sizes do not agree, which PyG's own path explains."""
        sizes = self._sizes(kwargs)
        if sizes is None:
            return None
        target, source = sizes[self.target], sizes[1 - self.target]
        rows = source if target is None else target
        cols = target if source is None else source
        if rows is None or cols is None:
            return None
        try:
            graph = graph_of(edge_index, rows, cols, self.target)
        except (IndexError, ValueError):
            return None
        operands = [source.take(kwargs) for source in self.sources]
        out: Tensor = ops.gspmm(graph, self.formula, operands, reduce=self.reduce, edge_order=True)
        return out

    def _sizes(self, kwargs: dict[str, Any]) -> list[int | None] | None:
        given = kwargs.get("size")
        sizes: list[int | None] = [None, None] if given is None else list(given)
        for name, row in self.gathered:
            value = kwargs[name]
            pair = ((row, value),) if isinstance(value, Tensor) else enumerate(value)
            for place, tensor in pair:
                if tensor is None:
                    continue
                if sizes[place] is None:
                    sizes[place] = tensor.size(0)
                elif sizes[place] != tensor.size(0):
                    return None
        return sizes


_Key = tuple[Any, ...]
# Of each layer: its plans, None for kinds of call that have none.
_known: "weakref.WeakKeyDictionary[MessagePassing, dict[_Key, Plan | None]]" = (
    weakref.WeakKeyDictionary()
)
_missing: Any = object()


def forget() -> None:
    """Drop all plans."""
    _known.clear()


def key_of(
    original: Callable[..., Any], module: MessagePassing, edge_index: Any, kwargs: dict[str, Any]
) -> _Key | None:
    """Return the kind of a call; None for those that are traced each time."""
    cls = type(module)
    read = _attributes(cls)
    if read is None or type(edge_index) is not Tensor or edge_index.dim() != 2:
        return None
    own = vars(module)
    aggregation = module.aggr_module
    if (
        is_hooked(module)
        or aggregation is None
        or has_hooks(aggregation)
        or not own.keys().isdisjoint(METHODS)
        or not vars(aggregation).keys().isdisjoint(_RUN)
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return None
    device = edge_index.device
    key: list[Any] = [
        original, module.training, type(aggregation), module.flow, module.node_dim,
        edge_index.dtype, edge_index.size(0), device, torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type), cls.message, cls.edge_update, situation(),
    ]  # fmt: skip
    for name in read:
        value = getattr(module, name, None)
        if type(value) not in _CONSTANTS:
            return None
        key.append((type(value), value))
    for name, value in kwargs.items():
        fact = _fact(value) if name != "size" else value is None
        if fact is None:
            return None
        key.append((name, fact))
    return tuple(key)


_RUN = frozenset({"forward", "reduce"})
_CONSTANTS = (bool, int, float, str, type(None))
_NONE = ("None",)


def _fact(value: Any) -> Any:
    """What is known of an argument beside its numbers; None for what has no plan."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return (value.dtype, value.shape[1:], value.device, value.requires_grad, value.dim() > 0)
    if value is None:
        return _NONE
    if kind is tuple and len(value) == 2:
        pair = (_fact(value[0]), _fact(value[1]))
        return None if None in pair else pair
    return (kind, value) if kind in _CONSTANTS else None


def _attributes(cls: type[MessagePassing]) -> frozenset[str] | None:
    """As :func:`attributes_read`, found again while the methods of a class are the same."""
    methods = tuple(getattr(cls, name) for name in METHODS)
    found = _read.get(cls)
    if found is None or found[0] != methods:
        found = _read[cls] = (methods, attributes_read(cls))
    return found[1]


_read: "weakref.WeakKeyDictionary[type, tuple[Any, frozenset[str] | None]]" = (
    weakref.WeakKeyDictionary()
)


def find(module: MessagePassing, key: _Key | None) -> Plan | None:
    """Return the plan of a kind of call, if there is one."""
    return None if key is None else _known.get(module, {}).get(key)


def learn(
    module: MessagePassing, key: _Key | None, kwargs: dict[str, Any], trace: Any, out: Any
) -> None:
    """Keep what a call did, if that is one reduction and nothing else."""
    if key is None:
        return
    plans = _known.setdefault(module, {})
    if plans.get(key, _missing) is not _missing:
        return
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = _plan(module, kwargs, trace, out) if isinstance(trace, Trace) else None


def _plan(module: MessagePassing, kwargs: dict[str, Any], trace: Trace, out: Any) -> Plan | None:
    done = trace.done
    if done is None or out is not done.result or len(trace.formulas) != 1 or trace.others:
        return None
    made = {id(result): (name, args) for name, args, result in trace.views}
    sources = []
    for operand, row in done.operands:
        source = _source_of(operand, row, kwargs, made)
        if source is None:
            return None
        sources.append(source)
    gathered = {}
    for tensor, row in trace.gathered:
        source = _source_of(tensor, row, kwargs, made)
        if source is None or source.views:
            return None
        gathered[source.name] = row
    return Plan(
        str(done.formula), done.reduce, tuple(sources), tuple(gathered.items()), trace.target,
        trace.formulas[0],
    )  # fmt: skip


def _source_of(
    tensor: Tensor,
    row: int,
    kwargs: dict[str, Any],
    made: dict[int, tuple[str, tuple[Any, ...]]],
) -> _Source | None:
    """Where a tensor comes from: an argument, or a view that the message made of one.

    Of a pair, PyG gathers the tensor whose place is the row of edge_index.
    """
    views: list[tuple[str, tuple[Any, ...]]] = []
    while id(tensor) in made:
        name, (tensor, *args) = made[id(tensor)]
        # A view that names the number of edges would hold for that number alone.
        plain = all(type(a) is int for a in args)
        if name not in _VIEWS or not plain or (name == "view" and args[:1] != [-1]):
            return None
        views.insert(0, (name, tuple(args)))
    found = [
        _Source(name, row if type(value) is tuple else -1, tuple(views))
        for name, value in kwargs.items()
        if value is tensor or (type(value) is tuple and row >= 0 and value[row] is tensor)
    ]
    return found[0] if len(found) == 1 else None  # one tensor may be several arguments
