"""One aggregation, one product with a weight: GCN, SAGE, GraphConv, LightGCN."""

import torch.nn.functional as F
from torch_geometric.nn import GCNConv, GraphConv, LGConv, SAGEConv

from pyg_accel.layers import MaxKGCNConv, MaxKSAGEConv
from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.ir import Broadcast, Expr, Map
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import (
    Parts,
    add,
    cached,
    edges,
    inverse_count,
    need_sum,
    need_sum_or_mean,
    symmetric,
)


@lifts(GCNConv, MaxKGCNConv)
def gcn(conv: GCNConv, call: Call) -> Algebra:
    """D A D X W + b, with self-loops in A; of X through MaxK."""
    need_sum(conv)
    parts = Parts()
    if conv.normalize and conv.cached:
        aggregate = cached(parts, conv, call)
    elif conv.normalize:
        fill = 2.0 if conv.improved else 1.0
        aggregate = symmetric(parts, call, loops=conv.add_self_loops, fill=fill)
    else:
        a = edges(parts, call)
        aggregate = a.__matmul__
    x = parts.selected(conv, call, parts.sources(call))
    product = aggregate(x @ parts.linear("W", conv.lin))
    return parts.algebra(add(product, *parts.bias("b", conv)))


@lifts(LGConv)
def lightgcn(conv: LGConv, call: Call) -> Algebra:
    """D A D X."""
    need_sum(conv)
    parts = Parts()
    if conv.normalize:
        aggregate = symmetric(parts, call, loops=False)
    else:
        aggregate = edges(parts, call).__matmul__
    return parts.algebra(aggregate(parts.sources(call)))


@lifts(SAGEConv, MaxKSAGEConv)
def sage(conv: SAGEConv, call: Call) -> Algebra:
    """D⁻¹ A X W + X V + b, or without D⁻¹ for sums; of X through MaxK."""
    mean = need_sum_or_mean(conv)
    parts = Parts()
    x: Expr = parts.sources(call)
    y: Expr = parts.targets(call)
    if conv.project:
        x = x @ parts.linear("P", conv.lin, "F", "F")
        x = add(x, *parts.bias("p", conv.lin, "F"))
        if isinstance(conv, MaxKSAGEConv):
            x = parts.selected(conv, call, x)
        else:
            x = Map("relu", x)
            parts.maps["relu"] = F.relu
    else:
        x, y = parts.selected(conv, call, x), parts.selected(conv, call, y)
    out: Expr = edges(parts, call, "") @ x
    if mean:
        out = Broadcast(inverse_count(parts), out)
    out = out @ parts.linear("W", conv.lin_l)
    if conv.root_weight and call.x_dst is not None:
        out = out + y @ parts.linear("V", conv.lin_r, y.cols)
    out = add(out, *parts.bias("b", conv.lin_l))
    if conv.normalize:
        out = Map("normalize", out)
        parts.maps["normalize"] = lambda t: F.normalize(t, p=2.0, dim=-1)
    return parts.algebra(out)


@lifts(GraphConv)
def graph_conv(conv: GraphConv, call: Call) -> Algebra:
    """A X W + X V + b, with weighted edges; D⁻¹ A X W for means."""
    mean = need_sum_or_mean(conv)
    parts = Parts()
    out: Expr = edges(parts, call) @ parts.sources(call)
    if mean:
        out = Broadcast(inverse_count(parts), out)
    out = out @ parts.linear("W", conv.lin_rel)
    if call.x_dst is not None:
        y = parts.targets(call)
        out = out + y @ parts.linear("V", conv.lin_root, y.cols)
    return parts.algebra(add(out, *parts.bias("b", conv.lin_rel)))
