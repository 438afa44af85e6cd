"""Layers with a nonlinearity of their own between the products: ARMA."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import ARMAConv

from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.ir import Expr, Leaf, Map
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import ExprBuilder, add, need_sum, symmetric


@lifts(ARMAConv)
def arma(conv: ARMAConv, call: Call) -> Algebra:
    """The mean over stacks of act(D A D X W + drop(X) V + b), layer after layer."""
    need_sum(conv)
    parts = ExprBuilder()
    hop = symmetric(parts, call, loops=False)
    x: Expr = parts.sources(call)
    if conv.act is not None:
        parts.maps["act"] = conv.act
    stacks = [_stack(conv, parts, hop, x, stack) for stack in range(conv.num_stacks)]
    if len(stacks) == 1:
        return parts.algebra(stacks[0])
    parts.maps["mean_stacks"] = lambda t: t / conv.num_stacks
    return parts.algebra(Map("mean_stacks", add(*stacks)))


def _stack(
    conv: ARMAConv, parts: ExprBuilder, hop: Callable[[Expr], Expr], x: Expr, stack: int
) -> Expr:
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
