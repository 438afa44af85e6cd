"""Layers whose code does the same in every call of a kind: it is recorded once.

These are layers of PyG that were looked through: what their code does depends on their options and
on what kinds of arguments there are. Their leaves are found again in each call, by where they come
from: an argument, a parameter, or what a function of torch makes of these.
"""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import MLP

from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.patching.running import Unrecognised
from pyg_accel.record.edge_tensors import name_of
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.deferred import ABOUT, Deferred, Unfit
from pyg_accel.rewrite.features import Entry
from pyg_accel.rewrite.guards import with_propagate
from pyg_accel.rewrite.ir import Expr, Map
from pyg_accel.rewrite.record import record_of
from pyg_accel.rewrite.recorder import Scaled
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.attention import AttentionRecorder
from pyg_accel.rewrite.rules.common import cached, symmetric

__all__ = ["record"]

_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)


@lifts(GCNConv, SAGEConv, GraphConv, LGConv, GINConv, SGConv, SSGConv, TAGConv, APPNP, GATConv,
       GATv2Conv, TransformerConv, *_MAXK)  # fmt: skip
def record(conv: Any, call: Call) -> Algebra:
    """Record the code of a layer, or of the layer of PyG that it is on features through MaxK.

    It is a rule for layers whose code depends on their options and on the kinds of their arguments
    alone, not on numbers in tensors, sizes, modes, or anything outside: ``lifts(Layer)(record)``.

    Raises:
        NotLifted: with the reason, if it does what no expression says.
    """
    cls: Any = type(conv)
    if isinstance(conv, _MAXK):
        cls = next(c for c in cls.__mro__ if c.__module__.startswith("torch_geometric."))
    return _Recording(call).algebra(cls.forward)


class _Recording(AttentionRecorder):
    """One run of the code of a layer, without data.

    Attributes:
        doing: the name of the function that runs.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.doing = ""

    def algebra(self, forward: Any) -> Algebra:
        """Return what the code of a layer computes."""
        call = self.call
        given = {**call.given, call.features: self._features(call)}
        if "edge_attr" in given:
            given["edge_attr"] = self.edge_attributes(given["edge_attr"])
        layer = self.layer = with_propagate(call.conv, self.propagate, alone=True)
        before: dict[str, Any] = {name: None if name.startswith("_cached") else value
                                  for name, value in vars(layer).items()}  # fmt: skip
        vars(layer).update(before)
        vars(layer)["_modules"] = {n: self._standing_in(m) for n, m in before["_modules"].items()}
        vars(layer)["edge_updater"] = self.edge_updater
        try:
            with self:
                out = self._code(forward)(layer, **given)
        except (Unrecognised, Unfit, AssertionError, TypeError) as reason:
            raise NotLifted(f"the code of {self._name} cannot be followed: {reason}") from None
        if any([isinstance(vars(layer).get(name), Deferred) for name in before]):
            raise NotLifted(f"{self._name} keeps features (cached=True; see static=)")
        expr = self._result(out)
        found = record_of(self, expr)
        values = {name: self._fetch(entry) for name, entry in found.entries.items()}
        learned = tuple(name for name, entry in found.entries.items()
                        if entry.leaf.kind == "diagonal" and entry.tensors)  # fmt: skip
        return found.algebra(self, values, owners=("edge_weight",), learned=learned,
                             compiles=self.parts.compiles)  # fmt: skip

    def _result(self, out: Any) -> Expr:
        """What the layer returns: an expression, or functions of the one that is aggregated."""
        if isinstance(out, Deferred):
            return out.expr
        if id(out) not in self.followed:
            raise NotLifted(f"{self._name} does not return features")
        sources = {id(t): t for t in self.sources_of(out)}
        (source,) = sources.values() if len(sources) == 1 else (None,)
        if source is None or out.dim() != 2 or out.size(0) != source.size(0):
            raise NotLifted(f"{self._name} combines several sums over its edges")
        make, heads = self.replay(out, source), source.shape[1:]

        def tail(call: Call, total: Tensor) -> Any:
            return make(call, total.reshape(total.size(0), *heads))

        self.parts.calls["tail"] = tail
        expr, symbol = source.expr if isinstance(source, Deferred) else self.exprs[id(source)], ""
        if out.shape[1:] != heads:
            self.widths[symbol := f"w{len(self.widths)}"] = out.size(1)
        return Map("tail", expr, symbol)

    def stand_ins(self) -> dict[str, tuple[Any, Callable[..., Any]]]:
        """See :meth:`AttentionRecorder.stand_ins`."""
        return super().stand_ins() | {"gcn_norm": (gcn_norm, self.normalised)}

    def _code(self, function: Any) -> Callable[..., Any]:
        """A method of the layer with stand-ins for functions that it calls."""
        known = function.__globals__  # patch() wraps some of them
        names = {n: mine for n, (theirs, mine) in self.stand_ins().items()
                 if unwrap(known.get(n)) is unwrap(theirs)}  # fmt: skip
        code = FunctionType(function.__code__, known | names, function.__name__,
                            function.__defaults__, function.__closure__)  # fmt: skip
        code.__kwdefaults__ = function.__kwdefaults__
        return code

    def method(self, name: str) -> Callable[..., Any]:
        """See :meth:`Recorder.method`."""
        return partial(self._code(getattr(type(self.call.conv), name)), self.layer)

    def _features(self, call: Call) -> Any:
        """The features without data, as the layer is given them."""

        def features(tensor: Tensor | None) -> Any:
            if tensor is None:
                return None
            expr = self.expr_of(tensor)
            if expr is not None and not getattr(call.conv, "project", False):
                expr = self.parts.selected(call.conv, call, expr)
            made = self.defer(expr, tuple(tensor.shape), self.refuse, (tensor,))
            if made is None:
                raise NotLifted("targets that are not one matrix [N, F]")
            self.inputs[id(made)] = self.inputs[id(tensor)]
            return made

        if not call.bipartite:
            return features(call.x)
        return features(call.x), features(call.x_dst)

    def _standing_in(self, module: Any) -> Any:
        """What takes the place of a module inside of the layer."""
        plain = isinstance(module, (torch.nn.ModuleList, Aggregation)) or _is_linear(module)
        return module if module is None or plain else _Network(self, module)

    def refuse(self) -> Tensor:
        """Refuse to compute data: there are none."""
        raise NotLifted(f"{self._name} does more than products with its features: '{self.doing}'")

    def computed(self, item: Deferred) -> Tensor:
        """Refuse: there are no data."""
        return self.refuse()

    def dtype_of(self, *values: Any) -> torch.dtype | None:
        """Return that of the features: a call on one node tells what comes out of several."""
        return self.call.x.dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer what can be; take a note of everything else."""
        kwargs = kwargs or {}
        if func is Tensor.numel:  # other calls of the kind have edges, if this one has none
            return max(args[0].numel(), 1)
        if func in ABOUT:
            return func(*args, **kwargs)
        self.doing = name_of(func)
        found = None
        if not any(id(a) in self.followed for a in args):
            found = self.deferred(func, args, kwargs)
        if found is None and self.doing in ("relu", "normalize") and _is_features(args[:1]):
            return self._mapped(self.doing, func, args, kwargs)
        if found is None and (followed := self.follow(func, args, kwargs)) is not None:
            return followed
        found = func(*args, **kwargs) if found is None else found
        self.keep(found, func, args, kwargs)
        return found

    def _mapped(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        features: Deferred = args[0]
        expr = features.expr
        if name == "relu":  # MaxK takes its place
            expr = self.parts.selected(self.call.conv, self.call, expr)
        if expr is features.expr:
            expr = self.map(name, lambda t: func(t, *args[1:], **kwargs), features.expr)
        return self.defer(expr, tuple(features.shape), self.refuse, (features,))

    def map(self, name: str, function: Callable[[Tensor], Any], expr: Expr) -> Expr:
        """Return a function of features."""
        self.parts.maps[name] = function
        return Map(name, expr)

    def normalised(
        self,
        edge_index: Any,
        edge_weight: Any = None,
        num_nodes: Any = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: Any = None,
    ) -> tuple[Any, Any]:
        """Stand in for ``gcn_norm``."""
        call, conv = self.call, self.call.conv
        if edge_index is not call.edge_index or edge_weight is not call.given.get("edge_weight"):
            raise NotLifted(f"{self._name} normalises another graph than that of the call")
        fill = 2.0 if improved else 1.0
        hop = cached(self.parts, conv, call)
        if hop is None:
            hop = symmetric(self.parts, call, loops=add_self_loops, fill=fill)
        return edge_index, Scaled.of(call.x, (edge_index.size(1),), hop)

    def propagate(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the layer's ``propagate``."""
        trace, message, mean = self.message(edge_index, args, kwargs)
        with torch._C.DisableTorchFunction():
            expr = self.aggregated(trace, message, mean)
            if expr is None or not isinstance(message, LazyTensor):
                raise NotLifted(f"the message of {self._name} is not linear in its features")
            shape = (self.call.num_rows, *message.shape[1:])
            if len(shape) == 3:
                return self.without_data(shape, expr)
            return self.defer(expr, shape, self.refuse, tuple(trace.operands))

    def _fetch(self, entry: Entry) -> Callable[[Call], Value]:
        makers = [self.replay(tensor) for tensor in entry.tensors]
        make = entry.make
        if not makers:
            return lambda call: make(call)
        return lambda call: make(call, *[one(call, None) for one in makers])


def _is_features(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], Deferred)


def _is_linear(module: Any) -> bool:
    from torch_geometric.nn import Linear

    return type(module) in (torch.nn.Linear, Linear)


class _Network(torch.nn.Module):
    """Stands in for a network inside of a layer: its first linear layer takes part."""

    def __init__(self, recording: _Recording, network: torch.nn.Module) -> None:
        super().__init__()
        vars(self).update(recording=recording, network=network)

    def forward(self, features: Any) -> Any:
        """Return what the network makes of features."""
        recording: _Recording = vars(self)["recording"]
        first, rest = _split(vars(self)["network"])
        name = "nn"
        if first is not None:
            features, name = F.linear(features, first.weight, first.bias), "rest"
        expr = recording.map(name, rest, features.expr)
        shape = tuple(features.shape)
        return recording.defer(expr, shape, recording.refuse, (features,))


def _split(network: Any) -> tuple[Any, Any]:
    """The first linear layer of a network, if it begins with one, and a function for the rest."""
    if isinstance(network, torch.nn.Linear):
        return network, _same
    if type(network) is MLP and len(network.lins):
        rest: torch.nn.Module = MLP.__new__(MLP)
        vars(rest).update(vars(network), _modules=dict(network._modules))
        rest._modules["lins"] = torch.nn.ModuleList([torch.nn.Identity(), *list(network.lins)[1:]])
        first = network.lins[0]
    elif type(network) is torch.nn.Sequential and len(network) and _is_linear(network[0]):
        rest = torch.nn.Sequential(*list(network)[1:])
        first = network[0]
    else:
        return None, network

    def run(t: Tensor) -> Any:
        rest.training = network.training  # its children are the network's own
        return rest(t)

    return first, run


def _same(t: Tensor) -> Tensor:
    return t
