"""Layers with a network or a nonlinearity of their own around the products: GIN, ARMA."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import ARMAConv, GINConv
from torch_geometric.nn.models import MLP

from pyg_accel.layers import MaxKGINConv
from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.copies import clone
from pyg_accel.rewrite.ir import Expr, Leaf, Map
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import Parts, add, edges, need_sum, symmetric


@lifts(GINConv, MaxKGINConv)
def gin(conv: GINConv, call: Call) -> Algebra:
    """nn((A X + (1 + ε) X)): the first linear layer of nn takes part; of X through MaxK."""
    need_sum(conv)
    parts = Parts()
    x: Expr = parts.selected(conv, call, parts.sources(call))
    out: Expr = edges(parts, call, "") @ x
    if call.x_dst is not None:
        y: Expr = x
        if call.bipartite:
            y = parts.leaf(Leaf("Y", "N", "F", "data"), lambda call: _need(call.x_dst))
            y = parts.selected(conv, call, y)
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
    """The mean over stacks of act(D A D X W + drop(X) V + b), layer after layer."""
    need_sum(conv)
    parts = Parts()
    hop = symmetric(parts, call, loops=False)
    x: Expr = parts.sources(call)
    if conv.act is not None:
        parts.maps["act"] = conv.act
    stacks = [_stack(conv, parts, hop, x, stack) for stack in range(conv.num_stacks)]
    if len(stacks) == 1:
        return parts.algebra(stacks[0])
    parts.maps["mean_stacks"] = lambda t: t / conv.num_stacks
    return parts.algebra(Map("mean_stacks", add(*stacks)))


def _stack(conv: ARMAConv, parts: Parts, hop: Callable[[Expr], Expr], x: Expr, stack: int) -> Expr:
    """One stack of layers; what they draw for dropout is the same in all."""
    out = x
    own = f".{stack}" if conv.num_stacks > 1 else ""
    for t in range(conv.num_layers):
        u = 0 if conv.shared_weights else t
        if t == 0:
            first = Leaf(f"W0{own}", "F", "H", "weight")
            w = parts.leaf(first, lambda call: call.conv.init_weight[stack])
        else:
            which = 0 if conv.shared_weights else t - 1
            inner = Leaf(f"W{t}{own}", "H", "H", "weight")
            w = parts.leaf(inner, _indexed("weight", which, stack))
        root = x
        if conv.dropout > 0:  # each layer draws its own
            root = Map(f"dropout{t}", x)
            parts.maps[f"dropout{t}"] = lambda v: F.dropout(v, conv.dropout, conv.training)
        v = parts.leaf(Leaf(f"V{t}{own}", "F", "H", "weight"), _indexed("root_weight", u, stack))
        out = hop(out @ w) + root @ v
        if conv.bias is not None:
            b = Leaf(f"b{t}{own}", "1", "H", "bias")
            out = out + parts.leaf(b, _indexed("bias", u, stack, rows=1))
        if conv.act is not None:
            out = Map("act", out)
    return out


def _indexed(name: str, number: int, stack: int, *, rows: int = 0) -> Any:
    """The part of a stacked parameter [T, K, ...] that a layer of a stack has."""

    def value(call: Call) -> Tensor:
        found: Tensor = getattr(call.conv, name)[number, stack]
        return found[0] if rows else found

    return value
