"""Layers whose code does the same in every call of a kind: it is recorded once.

These are layers of PyG that were looked through: what their code does depends on their options and
on what kinds of arguments there are. Their leaves are found again in each call, by where they come
from: an argument, a parameter, or what a function of torch makes of these.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    GCNConv,
    GINConv,
    GraphConv,
    LGConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.models import MLP

from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.patching.edge_tensors import name_of
from pyg_accel.patching.lazy import LazyTensor, Unrecognised
from pyg_accel.patching.reasons import modules_in
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.copies import clone
from pyg_accel.rewrite.deferred import ABOUT, Deferred, Unfit
from pyg_accel.rewrite.features import Entry
from pyg_accel.rewrite.following import followed
from pyg_accel.rewrite.ir import Expr, Map
from pyg_accel.rewrite.record import record_of
from pyg_accel.rewrite.recorder import Recorder, Scaled
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import cached, symmetric

__all__ = ["record"]

_MAXK = (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)
_NORMALISES = "gcn_norm"
# Functions of parameters that are called again.
_REPEATED = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


@lifts(GCNConv, SAGEConv, GraphConv, LGConv, GINConv, SGConv, SSGConv, TAGConv, APPNP, *_MAXK)
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


class _Recording(Recorder):
    """One run of the code of a layer, without data.

    Attributes:
        made: tensors that the code makes of parameters, and how.
        doing: the name of the function that runs.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.made: dict[int, tuple[Any, ...]] = {}
        self.doing = ""

    def algebra(self, forward: Any) -> Algebra:
        """Return what the code of a layer computes."""
        call = self.call
        given = {**call.given, call.features: self._features(call)}
        layer = self.layer = followed(call.conv, self.propagate, alone=True)
        before: dict[str, Any] = {name: None if name.startswith("_cached") else value
                                  for name, value in vars(layer).items()}  # fmt: skip
        vars(layer).update(before)
        vars(layer)["_modules"] = {n: self._standing_in(m) for n, m in before["_modules"].items()}
        names = {_NORMALISES: self.normalised} if _NORMALISES in forward.__globals__ else {}
        code = FunctionType(forward.__code__, forward.__globals__ | names, forward.__name__,
                            forward.__defaults__, forward.__closure__)  # fmt: skip
        code.__kwdefaults__ = forward.__kwdefaults__
        try:
            with self:
                out = code(layer, **given)
        except (Unrecognised, Unfit) as reason:
            raise NotLifted(f"the code of {self._name} cannot be followed: {reason}") from None
        if any(isinstance(vars(layer).get(name), Deferred) for name in before):
            raise NotLifted(f"{self._name} keeps features (cached=True; see static=)")
        if not isinstance(out, Deferred):
            raise NotLifted(f"{self._name} does not return features")
        found = record_of(self, out.expr)
        values = {name: self._fetch(entry) for name, entry in found.entries.items()}
        learned = tuple(name for name, entry in found.entries.items()
                        if entry.leaf.kind == "diagonal" and entry.tensors)  # fmt: skip
        return found.algebra(self, values, owners=("edge_weight",), learned=learned,
                             compiles=self.parts.compiles)  # fmt: skip

    def _features(self, call: Call) -> Any:
        """The features without data, as the layer is given them."""

        def features(tensor: Tensor | None) -> Any:
            if tensor is None:
                return None
            expr = self.expr_of(tensor)
            if expr is not None and not getattr(call.conv, "project", False):
                expr = self.parts.selected(call.conv, call, expr)
            made = self.defer(expr, tuple(tensor.shape), self._refuse, (tensor,))
            if made is None:
                raise NotLifted("targets that are not one matrix [N, F]")
            return made

        if not call.bipartite:
            return features(call.x)
        return features(call.x), features(call.x_dst)

    def _standing_in(self, module: Any) -> Any:
        """What takes the place of a module inside of the layer."""
        plain = isinstance(module, (torch.nn.ModuleList, Aggregation)) or _is_linear(module)
        return module if module is None or plain else _Network(self, module)

    def _refuse(self) -> Tensor:
        raise NotLifted(f"{self._name} does more than products with its features: '{self.doing}'")

    def computed(self, item: Deferred) -> Tensor:
        """Refuse: there are no data."""
        return self._refuse()

    def dtype_of(self, *values: Any) -> torch.dtype | None:
        """Return that of the features: a call on one node tells what comes out of several."""
        return self.call.x.dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Defer what can be; take a note of what is made of parameters."""
        kwargs = kwargs or {}
        if func not in ABOUT:
            self.doing = name_of(func)
            found = self.deferred(func, args, kwargs)
            if found is None and self.doing in ("relu", "normalize") and _is_features(args[:1]):
                found = self._mapped(self.doing, func, args, kwargs)
            if found is not None:
                return found
        result = func(*args, **kwargs)
        if func in _REPEATED and type(result) is Tensor:
            self.made[id(result)] = result, func, args, kwargs
        return result

    def _mapped(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        features: Deferred = args[0]
        expr = features.expr
        if name == "relu":  # MaxK takes its place
            expr = self.parts.selected(self.call.conv, self.call, expr)
        if expr is features.expr:
            expr = self.map(name, lambda t: func(t, *args[1:], **kwargs), features.expr)
        return self.defer(expr, tuple(features.shape), self._refuse, (features,))

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
        return edge_index, Scaled.of(hop, (edge_index.size(1),), call.x)

    def propagate(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the layer's ``propagate``."""
        trace, message, mean = self.message(edge_index, args, kwargs)
        with torch._C.DisableTorchFunction():
            expr = self.aggregated(trace, message, mean)
            if expr is None or not isinstance(message, LazyTensor):
                raise NotLifted(f"the message of {self._name} is not linear in its features")
            shape = (self.call.num_rows, message.size(1))
            return self.defer(expr, shape, self._refuse, tuple(trace.operands))

    def _fetch(self, entry: Entry) -> Callable[[Call], Value]:
        origins = [self._origin(tensor) for tensor in entry.tensors]
        make = entry.make
        if not origins:
            return lambda call: make(call)
        if len(origins) > 1:
            return lambda call: make(call, *[origin(call) for origin in origins])
        (only,) = origins
        return lambda call: make(call, only(call))

    def _origin(self, tensor: Any) -> Callable[[Call], Any]:
        """Where a tensor comes from in any call."""
        call = self.call
        if tensor is call.x:
            return lambda call: call.x
        if tensor is call.x_dst:
            return lambda call: call.x_dst
        for module in modules_in(call.conv):
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is tensor:
                        return _attribute(module, name)
        if id(tensor) in self.made:
            _, func, args, kwargs = self.made[id(tensor)]
            inner = [self._origin(a) if isinstance(a, Tensor) else _constant(a) for a in args]
            return lambda call: func(*[one(call) for one in inner], **kwargs)
        raise NotLifted(f"{self._name} multiplies with what is neither parameter nor argument")


def _attribute(module: torch.nn.Module, name: str) -> Callable[[Call], Any]:
    return lambda call: getattr(module, name)


def _constant(value: Any) -> Callable[[Call], Any]:
    return lambda call: value


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
        return recording.defer(expr, shape, recording._refuse, (features,))


def _split(network: Any) -> tuple[Any, Any]:
    """The first linear layer of a network, if it begins with one, and a function for the rest."""
    if isinstance(network, torch.nn.Linear):
        return network, _same
    if type(network) is MLP and len(network.lins):
        rest = clone(network)
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
