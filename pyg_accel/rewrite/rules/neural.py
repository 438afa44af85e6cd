"""Layers with a network or a nonlinearity of their own around the products: GIN, ARMA."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import ARMAConv, GINConv
from torch_geometric.nn.models import MLP

from pyg_accel.layers import MaxKGINConv
from pyg_accel.rewrite.copies import clone
from pyg_accel.rewrite.ir import Expr, Leaf, Map
from pyg_accel.rewrite.lift import Algebra, Call, NotLifted, lifts
from pyg_accel.rewrite.rules.common import Parts, add, edges, need_sum, symmetric


@lifts(GINConv, MaxKGINConv)
def gin(conv: GINConv, call: Call) -> Algebra:
    """nn((A X + (1 + ε) X)): the first linear layer of nn takes part; of X through MaxK."""
    need_sum(conv)
    parts = Parts()
    x: Expr = parts.selected(conv, parts.sources(call))
    out: Expr = edges(parts, call, "") @ x
    if call.x_dst is not None:
        y: Expr = x
        if call.bipartite:
            y = parts.leaf(Leaf("Y", "N", "F", "data"), lambda call: _need(call.x_dst))
            y = parts.selected(conv, y)
        one = Leaf("(1+ε)", "N", "N", "diagonal", number=True)
        out = out + parts.leaf(one, lambda call: 1 + call.conv.eps) @ y
    first, rest = _split(conv.nn)
    if first is None:
        parts.maps["nn"] = conv.nn
        out = Map("nn", out)
    else:
        out = add(out @ parts.linear("W", first), *parts.bias("b", first))
        parts.maps["rest"] = rest
        out = Map("rest", out)
    return parts.algebra(out, learned=("(1+ε)",))  # it may change, learned or loaded


def _need(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _split(network: Any) -> tuple[Any, Any]:
    """The first linear layer of a network and a function that does the rest, if it has one."""
    if isinstance(network, torch.nn.Linear):
        return network, _same
    if any(m._forward_hooks or m._forward_pre_hooks for m in network.modules()):
        return None, None
    if type(network) is MLP and len(network.lins):
        rest = clone(network)
        rest._modules["lins"] = torch.nn.ModuleList([torch.nn.Identity(), *list(network.lins)[1:]])
        first = network.lins[0]
    elif type(network) is torch.nn.Sequential and len(network) and _is_linear(network[0]):
        rest = torch.nn.Sequential(*list(network)[1:])
        first = network[0]
    else:
        return None, None

    def run(t: Tensor) -> Any:
        rest.training = network.training  # its children are the network's own
        return rest(t)

    return first, run


def _is_linear(module: torch.nn.Module) -> bool:
    from torch_geometric.nn import Linear

    return type(module) in (torch.nn.Linear, Linear)


def _same(t: Tensor) -> Tensor:
    return t


@lifts(ARMAConv)
def arma(conv: ARMAConv, call: Call) -> Algebra:
    """act(D A D X W + drop(X) V + b), layer after layer."""
    need_sum(conv)
    if conv.num_stacks > 1:
        raise NotLifted("several stacks")
    parts = Parts()
    hop = symmetric(parts, call, loops=False)
    x: Expr = parts.sources(call)
    out = x
    if conv.act is not None:
        parts.maps["act"] = conv.act
    for t in range(conv.num_layers):
        u = 0 if conv.shared_weights else t
        if t == 0:
            w = parts.leaf(Leaf("W0", "F", "H", "weight"), lambda call: call.conv.init_weight[0])
        else:
            which = 0 if conv.shared_weights else t - 1
            w = parts.leaf(Leaf(f"W{t}", "H", "H", "weight"), _indexed("weight", which))
        root = x
        if conv.dropout > 0:  # each layer draws its own
            root = Map(f"dropout{t}", x)
            parts.maps[f"dropout{t}"] = lambda v: F.dropout(v, conv.dropout, conv.training)
        v = parts.leaf(Leaf(f"V{t}", "F", "H", "weight"), _indexed("root_weight", u))
        out = hop(out @ w) + root @ v
        if conv.bias is not None:
            b = Leaf(f"b{t}", "1", "H", "bias")
            out = out + parts.leaf(b, _indexed("bias", u, rows=1))
        if conv.act is not None:
            out = Map("act", out)
    return parts.algebra(out)


def _indexed(name: str, number: int, *, rows: int = 0) -> Any:
    """A layer's own part of a stacked parameter [T, 1, ...]."""

    def value(call: Call) -> Tensor:
        found: Tensor = getattr(call.conv, name)[number, 0]
        return found[0] if rows else found

    return value
