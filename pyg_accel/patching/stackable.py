"""The layers whose relations HeteroConv runs at once, and when two of them can be stacked.

Each of them adds up three things at a target: an aggregation over the edges of its relation, a
matrix times the target's own features, and a bias. :func:`parts_of` names them, :func:`aggregate`
computes the first for all relations in one set of kernels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GATConv, GATv2Conv, GraphConv, SAGEConv, TransformerConv
from torch_geometric.nn.dense import Linear

from pyg_accel.ops import attention
from pyg_accel.ops.relations import (
    AttentionRelations,
    PairFeatures,
    Relations,
    features_of_pairs,
    sums_of_relations,
)
from pyg_accel.patching.relations import reduce_of

__all__ = ["Parts", "aggregate", "formula_of", "parts_of"]

FLOW = "source_to_target"


class Attention(NamedTuple):
    """The options of an attention layer: all that its formula and shapes depend on."""

    layer: type
    heads: int
    width: int
    concat: bool
    slope: float


class Parts(NamedTuple):
    """What a layer computes with.

    Attributes:
        options: how neighbours are reduced, or attended to.
        linears: what their features are multiplied by; for attention, those of scores too.
        vectors: of scores, [1, heads, width].
        root: of the target's own features; if it has a bias, that is ``bias``.
        bias: of the result.
        loops: every node gets an edge from itself.
    """

    options: str | Attention
    linears: tuple[Any, ...]
    vectors: tuple[Tensor, ...]
    root: Any
    bias: Tensor | None
    loops: bool = False

    @property
    def weight(self) -> Tensor:
        """Of the first of the linears."""
        weight: Tensor = self.linears[0].weight
        return weight

    def kind(self) -> tuple[Any, ...]:
        """What parts of layers that run together have in common."""
        shapes = [(lin.weight.shape, lin.bias is None) for lin in self.linears]
        root = None if self.root is None else self.root.weight.shape
        return (self.options, root, self.bias is None, *shapes)


def parts_of(conv: Any) -> Parts | None:
    """Return the parts of a layer; None for one that computes something else."""
    parts = _PARTS[type(conv)](conv) if type(conv) in _PARTS else None
    if parts is None or conv.flow != FLOW:
        return None
    linears = [*parts.linears, *([] if parts.root is None else [parts.root])]
    if any(type(lin) is not Linear or is_lazy(lin.weight) for lin in linears):
        return None
    if parts.root is not None and parts.root.bias is not None and parts.root.bias is not parts.bias:
        return None
    first = parts.weight
    tensors = [*conv._parameters.values(), *[lin.weight for lin in linears]]
    if any(t is not None and t.dtype != first.dtype for t in tensors):
        return None
    return parts if all(lin.weight.size(1) == first.size(1) for lin in linears) else None


def formula_of(parts: Parts) -> str:
    """Return the formula of the aggregation, for the report."""
    if not isinstance(parts.options, Attention):
        return f"{parts.options}_j u0"
    score, value = _formulas(parts.options)
    return f"sum_j mul(softmax_j({score}),{value})"


def aggregate(
    parts: Sequence[Parts], relations: Relations | AttentionRelations, x: Tensor
) -> Tensor:
    """Aggregate over the edges of each relation.

    Args:
        parts: of a layer for every relation, all of one kind.
        relations: their graphs.
        x: [num nodes, F], the nodes of all types.

    Returns:
        [P, H], a row for each pair of a relation and a target with edges.
    """
    options = parts[0].options
    if isinstance(relations, Relations):
        weight = torch.stack([part.weight.t() for part in parts])
        return sums_of_relations(relations, x, weight, reduce=str(options))
    assert isinstance(options, Attention)
    if any(lin.bias is not None for lin in parts[0].linears):
        x = pad(x, (0, 1), value=1.0)  # a bias is one row more of its matrix
    sources = features_of_pairs(relations.sources, x)
    targets = features_of_pairs(relations.targets, x)
    operands = _OPERANDS[options.layer](parts, options, sources, targets)
    out = attention(relations.into, *_formulas(options), operands)
    return out.flatten(1) if options.concat else out.mean(dim=1)


def _of_sage(conv: SAGEConv) -> Parts | None:
    if (reduce := reduce_of(conv)) is None or conv.project or conv.normalize:
        return None
    root = conv.lin_r if conv.root_weight else None
    return Parts(reduce, (conv.lin_l,), (), root, conv.lin_l.bias)


def _of_graph_conv(conv: GraphConv) -> Parts | None:
    if (reduce := reduce_of(conv)) is None:
        return None
    return Parts(reduce, (conv.lin_rel,), (), conv.lin_root, conv.lin_rel.bias)


def _attention_of(conv: Any) -> Attention | None:
    """The options of a layer; None if it drops weights, or does not add up."""
    if reduce_of(conv) != "sum" or (conv.dropout > 0 and conv.training):
        return None
    slope = float(getattr(conv, "negative_slope", 0.0))
    return Attention(type(conv), conv.heads, conv.out_channels, conv.concat, slope)


def _of_gat(conv: GATConv) -> Parts | None:
    if (options := _attention_of(conv)) is None:
        return None
    both = (conv.lin_src, conv.lin_dst) if conv.lin is None else (conv.lin, conv.lin)
    vectors = (conv.att_src, conv.att_dst)
    return Parts(options, both, vectors, conv.res, conv.bias, conv.add_self_loops)


def _of_gatv2(conv: GATv2Conv) -> Parts | None:
    if (options := _attention_of(conv)) is None:
        return None
    both = (conv.lin_r, conv.lin_l)
    return Parts(options, both, (conv.att,), conv.res, conv.bias, conv.add_self_loops)


def _of_transformer(conv: TransformerConv) -> Parts | None:
    options = _attention_of(conv)
    if options is None or conv.lin_beta is not None or conv.lin_edge is not None:
        return None
    root = conv.lin_skip if conv.root_weight else None
    bias = None if root is None else root.bias
    return Parts(options, (conv.lin_query, conv.lin_key, conv.lin_value), (), root, bias)


_PARTS: dict[type, Callable[[Any], Parts | None]] = {
    SAGEConv: _of_sage,
    GraphConv: _of_graph_conv,
    GATConv: _of_gat,
    GATv2Conv: _of_gatv2,
    TransformerConv: _of_transformer,
}


def _formulas(options: Attention) -> tuple[str, str]:
    """The score and the value, of the operands that :data:`_OPERANDS` makes."""
    if options.layer is GATConv:
        return f"leaky_relu(add(u0,v1),{options.slope!r})", "u2"
    if options.layer is GATv2Conv:
        return f"sum(mul(leaky_relu(add(v0,u1),{options.slope!r}),v2))", "u1"
    return f"div(sum(mul(v0,u1)),{math.sqrt(options.width)!r})", "u2"


def _gat(
    parts: Sequence[Parts], options: Attention, sources: PairFeatures, targets: PairFeatures
) -> list[Tensor]:
    """Scores of sources and targets [P, heads], and values [P, heads, width].

    A score is a vector times W x. Here x is multiplied by the product of the vector and W, so that
    no W is applied to targets.
    """
    shape = (len(parts), -1, options.heads, options.width)
    matrices = [_matrices(parts, side) for side in (0, 1)]
    scores = []
    for side, pairs in enumerate((sources, targets)):
        vectors = torch.cat([part.vectors[side] for part in parts]).unsqueeze(1)
        scores.append(pairs.matmul((matrices[side].reshape(shape) * vectors).sum(dim=-1)))
    return [*scores, _heads(sources.matmul(matrices[0]), options)]


def _gatv2(
    parts: Sequence[Parts], options: Attention, sources: PairFeatures, targets: PairFeatures
) -> list[Tensor]:
    features = [t.matmul(_matrices(parts, i)) for i, t in enumerate((targets, sources))]
    vectors = targets.repeated(torch.cat([part.vectors[0] for part in parts]).flatten(1))
    return [_heads(t, options) for t in (*features, vectors)]


def _transformer(
    parts: Sequence[Parts], options: Attention, sources: PairFeatures, targets: PairFeatures
) -> list[Tensor]:
    sides = (targets, sources, sources)
    return [_heads(t.matmul(_matrices(parts, i)), options) for i, t in enumerate(sides)]


_OPERANDS = {GATConv: _gat, GATv2Conv: _gatv2, TransformerConv: _transformer}


def _matrices(parts: Sequence[Parts], index: int) -> Tensor:
    """The matrices of one of the linears, [R, F, H], with its bias as the last row if any has."""
    linears = [part.linears[index] for part in parts]
    weight = torch.stack([lin.weight for lin in linears]).mT
    if all(lin.bias is None for lin in parts[0].linears):
        return weight
    if linears[0].bias is None:
        return pad(weight, (0, 0, 0, 1))
    return torch.cat([weight, torch.stack([lin.bias for lin in linears]).unsqueeze(1)], dim=1)


def _heads(rows: Tensor, options: Attention) -> Tensor:
    return rows.view(-1, options.heads, options.width)
