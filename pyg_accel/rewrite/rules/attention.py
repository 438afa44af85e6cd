"""Attention: its scores are a barrier, what they weigh is not (paper, section 5.2).

``α (X W)`` uses the product that the scores were made of again; ``(α X) W`` aggregates the narrower
input and multiplies once more.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.ir import Attend, Expr, Leaf, Map
from pyg_accel.rewrite.matrices import Matrix, Scores, derived, looped
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import Parts, add, edges, need_sum

Projected = Tensor | tuple[Tensor, Tensor]  # features [N, heads, H], or [N, F] and a weight


def _matrix(parts: Parts, conv: Any, call: Call) -> Leaf:
    if call.given.get("return_attention_weights") is not None:
        raise NotLifted("attention weights that are returned")
    if not getattr(conv, "add_self_loops", False):
        return edges(parts, call, "")
    if call.bipartite or call.given.get("size") is not None:
        raise NotLifted("self-loops of a bipartite graph")
    return parts.leaf(
        Leaf("A", "N", "N", "sparse"),
        lambda call: looped(call.edge_index, None, call.num_rows, call.target, 1.0),
    )


def _takes_edge_attr(parts: Parts, conv: Any, call: Call) -> bool:
    """Whether scores are made of attributes of the edges too."""
    attr = call.given.get("edge_attr")
    if attr is None:
        return False
    if conv.lin_edge is None:
        raise NotLifted("edge attributes without edge_dim")
    if not isinstance(attr, Tensor) or not attr.is_floating_point() or attr.dim() not in (1, 2):
        raise NotLifted("edge attributes that are not [E, D]")
    # Those of the loops are means, say, of the others, once the loops that are there are left out.
    parts.compiles = not conv.add_self_loops
    return True


def _edge_attr(call: Call, matrix: Matrix) -> Tensor:
    """[entries of the matrix, D]: attributes in its order, with those of self-loops."""
    conv, perm = call.conv, matrix.graph.perm
    given: Tensor = call.given["edge_attr"]

    def stored() -> Tensor:
        attr = given.view(-1, 1) if given.dim() == 1 else given
        if conv.add_self_loops:
            rest, attr = remove_self_loops(call.edge_index, attr)
            attr = add_self_loops(rest, attr, conv.fill_value, call.num_rows)[1]
        return attr if perm is None else attr.index_select(0, perm)

    if given.requires_grad:
        return stored()
    key = ("edge_attr", conv.add_self_loops, str(conv.fill_value))
    return derived(matrix.graph, key, (given,), stored)


def _finish(parts: Parts, conv: Any, call: Call, out: Expr) -> Expr:
    """Concatenate or average the heads, add the residual and the bias."""
    heads = conv.heads
    if conv.concat:
        parts.maps["concat"] = lambda t: t.flatten(1)
        out = Map("concat", out, "O", free=True)
        parts.sizes["O"] = heads * conv.out_channels
    else:
        parts.maps["mean_heads"] = lambda t: t.mean(dim=1) if t.dim() == 3 else t
        out = Map("mean_heads", out, "O")
        parts.sizes["O"] = conv.out_channels
    if getattr(conv, "res", None) is not None and call.x_dst is not None:
        y = parts.targets(call)
        out = out + y @ parts.linear("R", conv.res, y.cols, "O")
    return add(out, *(parts.bias("b", conv, "O") if "bias" in conv._parameters else ()))


@lifts(GATConv)
def gat(conv: GATConv, call: Call) -> Algebra:
    """α (X W), α from X W."""
    need_sum(conv)
    parts = Parts()
    a = _matrix(parts, conv, call)
    x = parts.sources(call)
    w = parts.linear("W", conv.lin if conv.lin is not None else conv.lin_src, heads=conv.heads)
    theta = x @ w
    args: tuple[Expr, ...] = (theta,)
    if call.bipartite and call.x_dst is None:
        raise NotLifted("attention without targets")
    if call.bipartite or conv.lin is None:
        y = parts.targets(call)
        if conv.lin is None:
            v = parts.linear("V", conv.lin_dst, y.cols, heads=conv.heads)
        else:
            v = parts.linear("W'", conv.lin, y.cols, heads=conv.heads)
        args = (theta, y @ v)
    alpha = Attend("softmax", a, args, conv.heads, folds=True)
    attributed = conv.lin_edge is not None and _takes_edge_attr(parts, conv, call)
    parts.scores["softmax"] = _gat_scores_of_edges if attributed else _gat_scores
    return parts.algebra(_finish(parts, conv, call, alpha @ x @ w))


def _gat_scores_of_edges(call: Call, matrix: Matrix, *features: Projected) -> Scores:
    weight = _folded(call.conv.lin_edge.weight.t(), call.conv.att_edge)
    return _gat_scores(call, matrix, *features, e=_edge_attr(call, matrix) @ weight)


def _gat_scores(
    call: Call,
    matrix: Matrix,
    source: Projected,
    target: Projected | None = None,
    *,
    e: Tensor | None = None,
) -> Scores:
    """Scores from both ends, and ``e`` from the edge itself."""
    conv = call.conv
    if target is None and isinstance(source, tuple):  # both of them in one product
        x, w = source
        both = torch.cat([_folded(w, conv.att_src), _folded(w, conv.att_dst)], dim=1)
        left, right = (x @ both).chunk(2, dim=1)
    else:
        left = _scores(source, conv.att_src)
        right = _scores(source if target is None else target, conv.att_dst)
    operands = [left, matrix.targets(right), *(() if e is None else (e,))]
    ends = "add(u0,v1)" if e is None else "add(add(u0,v1),e2)"
    formula = f"leaky_relu({ends},{float(conv.negative_slope)!r})"
    return _scored(conv, formula, *operands)


def _folded(weight: Tensor, att: Tensor) -> Tensor:
    """The weight times the attention vector of every head, [F, heads]."""
    return (weight.reshape(weight.size(0), *att.shape[1:]) * att).sum(dim=-1)


def _scores(features: Projected, att: Tensor) -> Tensor:
    if isinstance(features, tuple):
        x, w = features
        return x @ _folded(w, att)
    return (features.reshape(features.size(0), *att.shape[1:]) * att).sum(dim=-1)


def _scored(conv: Any, formula: str, *operands: Tensor) -> Scores:
    return Scores(formula, operands, conv.dropout, conv.training)


@lifts(GATv2Conv)
def gatv2(conv: GATv2Conv, call: Call) -> Algebra:
    """α (X W + p), α from X W + p and X V + q."""
    need_sum(conv)
    parts = Parts()
    a = _matrix(parts, conv, call)
    if call.x_dst is None:
        raise NotLifted("attention without targets")
    if conv.share_weights and call.bipartite:
        raise NotLifted("shared weights on a bipartite graph")
    theta = parts.affine("W", conv.lin_l, parts.sources(call), conv.heads)
    args: tuple[Expr, ...] = (theta,)
    if not conv.share_weights:
        args = (theta, parts.affine("V", conv.lin_r, parts.targets(call), conv.heads))
    alpha = Attend("softmax", a, args, conv.heads)
    _takes_edge_attr(parts, conv, call)
    parts.scores["softmax"] = _gatv2_scores
    return parts.algebra(_finish(parts, conv, call, alpha @ theta))


def _gatv2_scores(
    call: Call, matrix: Matrix, source: Tensor, target: Tensor | None = None
) -> Scores:
    conv, graph = call.conv, matrix.graph
    shape = conv.att.shape[1:]
    left = source.reshape(source.size(0), *shape)
    right = matrix.targets(left if target is None else target.reshape(target.size(0), *shape))
    operands = [left, right, conv.att.expand(graph.num_rows, *shape)]
    ends = "add(u0,v1)"
    if call.given.get("edge_attr") is not None:
        operands.append(conv.lin_edge(_edge_attr(call, matrix)).view(-1, *shape))
        ends = "add(add(u0,v1),e3)"
    formula = f"sum(mul(leaky_relu({ends},{float(conv.negative_slope)!r}),v2))"
    return _scored(conv, formula, *operands)


@lifts(TransformerConv)
def transformer(conv: TransformerConv, call: Call) -> Algebra:
    """α (X W + p), α from keys and queries, and a gate behind it: the attention of GaAN."""
    need_sum(conv)
    if call.given.get("edge_attr") is not None:
        raise NotLifted("edge attributes that are a part of what is summed up")
    if conv.lin_edge is not None:
        raise NotLifted("edge_dim without edge attributes")
    if call.x_dst is None:
        raise NotLifted("attention without targets")
    parts = Parts()
    a = _matrix(parts, conv, call)
    x, y = parts.sources(call), parts.targets(call)
    keys = parts.affine("K", conv.lin_key, x, conv.heads)
    queries = parts.affine("Q", conv.lin_query, y, conv.heads)
    alpha = Attend("softmax", a, (keys, queries), conv.heads)
    parts.scores["softmax"] = _dot_scores
    out = _finish(parts, conv, call, alpha @ parts.affine("W", conv.lin_value, x, conv.heads))
    if conv.lin_beta is not None:
        parts.calls["gate"] = _gated
        out = Map("gate", out)
    elif conv.root_weight:
        skip = conv.lin_skip
        out = add(out + y @ parts.linear("S", skip, y.cols, "O"), *parts.bias("s", skip, "O"))
    return parts.algebra(out)


def _gated(call: Call, out: Tensor) -> Tensor:
    """What comes between the result and the features of the node."""
    conv, x = call.conv, call.conv.lin_skip(call.x_dst)
    beta = conv.lin_beta(torch.cat([out, x, out - x], dim=-1)).sigmoid()
    gated: Tensor = beta * x + (1 - beta) * out
    return gated


def _dot_scores(call: Call, matrix: Matrix, keys: Tensor, queries: Tensor) -> Scores:
    conv = call.conv
    shape = (conv.heads, conv.out_channels)
    left = queries.reshape(queries.size(0), *shape) / conv.out_channels**0.5
    right = keys.reshape(keys.size(0), *shape)
    return _scored(conv, "sum(mul(v0,u1))", matrix.targets(left), right)
