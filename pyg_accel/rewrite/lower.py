"""Lowering: an association tree becomes nodes in the graph of a program.

Every primitive is a call of :mod:`pyg_accel.ops` or of torch. Nodes that only depend on the graph
and on static features are marked as derived, and computed once (:mod:`pyg_accel.record.split`).
"""

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyg_accel import ops
from pyg_accel.graph import CBSR, Graph
from pyg_accel.record.metadata import FACTS
from pyg_accel.rewrite.attention import Attention
from pyg_accel.rewrite.builder import Builder, Edges
from pyg_accel.rewrite.ir import Leaf, is_ones
from pyg_accel.rewrite.lift import Region
from pyg_accel.rewrite.tree import WRITTEN, Node, Tree, folded_nodes, nodes_of, static_nodes

__all__ = ["lower"]


def lower(
    builder: Builder, region: Region, tree: Tree, static: frozenset[str], *, cast: bool
) -> fx.Node:
    """Add the nodes of a tree to a new graph.

    Args:
        builder: of the new graph.
        region: the region that the tree computes.
        tree: an association of its expression.
        static: leaves that are the same in every call with the same graph.
        cast: cast the result to the dtype of the root, because several precisions meet.

    Returns:
        The node that replaces the root of the region.
    """
    out = _Lowering(builder, region, tree, static).value(tree)
    assert isinstance(out, fx.Node)
    shape = region.root.meta[FACTS].shape
    if len(shape) == 3 and tree.heads == 1:
        out = builder.call(Tensor.unflatten, out, 1, (1, -1))
    if cast:
        out = builder.call(Tensor.to, out, region.root.meta[FACTS].dtype)
    return out


class _Weighted(NamedTuple):
    """A matrix of edges whose values are the softmax of scores that are not computed yet."""

    edges: Edges
    attention: Attention
    operands: dict[int, fx.Node]


class _Lowering:
    def __init__(
        self, builder: Builder, region: Region, tree: Tree, static: frozenset[str]
    ) -> None:
        self._b, self._region = builder, region
        self._static = static_nodes(tree, static)
        self._folded = folded_nodes(tree)
        self._values: dict[Tree, Any] = {}
        args = [a for node in nodes_of(tree) for a in node.args]
        self._read_once = {item for item in args if args.count(item) <= 1}

    def value(self, item: Tree) -> Any:
        """Return the node, number or edges that compute a part of the tree."""
        if item not in self._values:
            if isinstance(item, Leaf):
                self._values[item] = self._region.sources[item.name].emit(self._b)
            else:
                self._values[item] = getattr(self, f"_{item.op}")(item, *item.args)
        return self._values[item]

    def _call(self, node: Node, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._b.call(function, *args, derived=node in self._static, **kwargs)

    def _gemm(self, node: Node, left: Tree, right: Tree) -> fx.Node:
        data, weight = self.value(left), self.value(right)
        if node.heads == 1 or node.kind == "weight":  # weights stay matrices, heads side by side
            return self._call(node, torch.matmul, data, weight)
        if left.heads > 1:
            return self._call(node, _gemm_in_heads, data, weight, node.heads)
        out = self._call(node, torch.matmul, data, weight)
        return self._call(node, Tensor.unflatten, out, 1, (node.heads, -1))

    def _spmm(self, node: Node, left: Tree, right: Tree) -> fx.Node:
        matrix, data = self.value(left), self.value(right)
        reduce = "mean" if node.mean else "sum"
        if isinstance(matrix, _Weighted):
            return self._weighed(node, matrix, right, data)
        graph, weight, edge_order = matrix
        data = self._exchanged(node, data)
        if right.kind == "cbsr":
            return self._call(node, ops.cbsr_spmm, graph, data, weight, reduce=reduce,
                              edge_order=edge_order)  # fmt: skip
        if self._region.sample is not None:
            how = dict(self._region.sample) | ({"rescale": "none"} if node.mean else {})
            return self._call(node, ops.sampled_spmm, graph, data, weight, reduce=reduce,
                              edge_order=edge_order, **how)  # fmt: skip
        if weight is None:
            return self._call(node, ops.gspmm, graph, "u0", (data,), reduce=reduce)
        return self._call(node, _weighted_spmm, graph, data, weight, reduce, edge_order)

    def _exchanged(self, node: Node, data: fx.Node) -> fx.Node:
        """Append rows of other processes to features that a matrix of edges multiplies."""
        if (exchange := self._region.exchange) is None:
            return data
        halo, name, _ = exchange.args
        return self._call(node, exchange.target, halo, name, data)

    def _weighed(self, node: Node, matrix: _Weighted, right: Tree, data: fx.Node) -> fx.Node:
        """Sum features with the weights of attention."""
        attention, operands = matrix.attention, dict(matrix.operands)
        if right.heads == 1:  # every head weighs the same features
            data = self._b.call(Tensor.unsqueeze, data, 1)
        same = [n for n in attention.sources if operands[n] is data]
        index = same[0] if same else attention.features_index
        if not same and index in operands:
            index = max(operands) + 1
        operands[index] = data
        in_order = [operands.get(n, data) for n in range(max(operands) + 1)]
        out = self._call(node, ops.attention, matrix.edges.graph, attention.score,
                         attention.values_of(index), in_order, edge_order=True)  # fmt: skip
        return out if node.heads > 1 else self._call(node, Tensor.flatten, out, 1)

    def _attend(self, node: Node, matrix: Tree, *args: Tree) -> _Weighted:
        attention = self._region.attentions[node.name]
        operands: dict[int, fx.Node] = {}
        for origin, item in zip(attention.origins, args, strict=True):
            scores = [o for o in attention.operands if o.origin is origin]
            if item in self._folded and isinstance(item, Node):
                data, weight = (self.value(a) for a in item.args)
                weight = self._b.call(_in_heads, weight, node.heads)
                parts = [
                    self._b.call(Tensor.flatten, self._chain(o.chain, weight), 1) for o in scores
                ]
                if len(parts) == 1:
                    products = [self._b.call(torch.matmul, data, *parts)]
                else:  # one product with all weights
                    joint = self._b.call(torch.matmul, data, self._b.call(torch.cat, parts, 1))
                    chunks = self._b.call(Tensor.chunk, joint, len(parts), 1)
                    products = [self._b.call(getitem, chunks, n) for n in range(len(parts))]
                for operand, product in zip(scores, products, strict=True):
                    shape = (-1, *operand.node.meta[FACTS].shape[1:])
                    operands[operand.index] = self._b.call(Tensor.reshape, product, shape)
            else:
                data = self.value(item)
                if item.heads == 1:
                    data = self._b.call(Tensor.unsqueeze, data, 1)
                for operand in scores:
                    operands[operand.index] = self._chain(operand.chain, data)
        for operand in attention.operands:
            if operand.origin is None:
                operands[operand.index] = operand.node
        return _Weighted(self.value(matrix), attention, operands)

    def _chain(self, chain: tuple[fx.Node, ...], features: fx.Node) -> fx.Node:
        for link in chain:
            args = tuple(features if n is link.args[0] else n for n in link.args)
            features = self._b.call(link.target, *args, **link.kwargs)  # type: ignore[arg-type]
        return features

    def _scale_rows(self, node: Node, left: Tree, right: Tree) -> fx.Node:
        diagonal, data = self.value(left), self.value(right)
        assert isinstance(left, Leaf)
        if isinstance(diagonal, (int, float)):
            if right.kind != "cbsr":
                return self._call(node, Tensor.mul, data, diagonal**left.power)
            return self._call(node, _scaled, data, diagonal**left.power)
        if left.power > 1:
            diagonal = self._call(node, Tensor.pow, diagonal, left.power)
        if not left.number:
            trailing = (1, 1) if right.heads > 1 else (1,)
            diagonal = self._call(node, Tensor.reshape, diagonal, (-1, *trailing))
        return self._call(node, _scaled if right.kind == "cbsr" else Tensor.mul, data, diagonal)

    def _scale_edges(self, node: Node, *args: Tree) -> Edges:
        """Multiply the entries of a matrix by diagonals on its left and right."""
        factors = [self.value(item) for item in args]
        (edges,) = (factor for factor in factors if isinstance(factor, Edges))
        operands: list[fx.Node] = []
        formula, side = "", "v"
        for item, diagonal in zip(args, factors, strict=True):
            if diagonal is edges:
                side = "u"
                continue
            assert isinstance(item, Leaf)
            if side == "u" and not item.number:
                diagonal = self._exchanged(node, diagonal)
            operands.append(self._call(node, _column, diagonal, edges.graph, side, item.power))
            leaf = f"{side}{len(operands) - 1}"
            formula = f"mul({formula},{leaf})" if formula else leaf
        if edges.weight is not None:
            operands.append(self._call(node, Tensor.unsqueeze, edges.weight, -1))
            formula = f"mul({formula},e{len(operands) - 1})"
        values = self._call(node, ops.gspmm, edges.graph, formula, operands, reduce="none",
                            edge_order=edges.edge_order)  # fmt: skip
        weight = self._call(node, Tensor.squeeze, values, -1)
        return Edges(edges.graph, weight, edges.edge_order)

    def _map(self, node: Node, arg: Tree) -> fx.Node:
        return self._call(node, _MAPS[node.name], self.value(arg))

    def _select(self, node: Node, arg: Tree) -> fx.Node:
        return self._call(node, ops.maxk, self.value(arg), self._region.sizes["k"])

    def _add(self, node: Node, *args: Tree) -> fx.Node:
        """Add the terms; matrix products among them are accumulated with ``addmm``."""
        total: fx.Node | None = None
        others: list[fx.Node] = []
        products: list[Node] = []
        ones: Tree | None = None
        once = self._read_once.__contains__

        def plus(first: fx.Node | None, second: fx.Node) -> fx.Node:
            return second if first is None else self._call(node, Tensor.add, first, second)

        for item in args:
            match item:
                case Leaf(kind="bias"):
                    total = plus(total, self.value(item))
                case Node(op="gemm", args=(left, row)) if once(item) and is_ones(left):  # a bias
                    ones = left
                    total = plus(total, self._b.call(Tensor.squeeze, self.value(row), 0))
                case Node(op="gemm", args=(left, _)) if once(item) and left.heads == 1:
                    products.append(item)
                case _:
                    others.append(self.value(item))
        for item in products:
            data, weight = (self.value(a) for a in item.args)
            if total is None:
                total = self._call(item, torch.matmul, data, weight)
            else:
                total = self._call(node, torch.addmm, total, data, weight)
        if node.heads > 1 and total is not None:
            total = self._call(node, Tensor.unflatten, total, -1, (node.heads, -1))
        if ones is not None and total is not None and not products and not others:
            total = self._call(node, _repeated, total, self.value(ones))
        for other in others:
            total = plus(total, other)
        assert total is not None
        return total


def _mean_of_heads(data: Tensor) -> Tensor:
    return data.mean(dim=1) if data.dim() == 3 else data


def _concat(data: Tensor) -> Tensor:
    return data.flatten(1)


# Functions of features by the names of maps.
_MAPS = {WRITTEN: CBSR.dense, "concat": _concat, "mean_heads": _mean_of_heads}


def _in_heads(weight: Tensor, heads: int) -> Tensor:
    return weight.reshape(weight.size(0), heads, -1)


def _repeated(row: Tensor, ones: Tensor) -> Tensor:
    return row.expand(ones.size(0), *row.shape)


def _gemm_in_heads(data: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Multiply [N, heads, F] with a weight [F, heads x H] head by head."""
    return torch.einsum("nhf,fhc->nhc", data, weight.reshape(weight.size(0), heads, -1))


def _scaled(data: CBSR, diagonal: Tensor | float) -> CBSR:
    return CBSR(data.values * diagonal, data.indices, data.width)


def _column(diagonal: Tensor, graph: Graph, side: str, power: int) -> Tensor:
    """Return a diagonal as an operand [N, 1] at one side of the edges."""
    rows = graph.num_rows if side == "v" else graph.num_cols
    diagonal = diagonal.pow(power) if power > 1 else diagonal
    return (diagonal.expand(rows) if diagonal.numel() == 1 else diagonal).unsqueeze(-1)


def _weighted_spmm(
    graph: Graph, data: Tensor, weight: Tensor, reduce: str, edge_order: bool
) -> Tensor:  # fmt: skip
    """Sum features [N, F] or [N, heads, F] of neighbours, with weights [E] or [E, heads]."""
    if weight.dtype != data.dtype and not weight.requires_grad:
        weight = weight.to(data.dtype)
    weight = weight.view(*weight.shape, *[1] * (data.dim() - weight.dim()))
    out: Tensor = ops.gspmm(graph, "mul(u0,e1)", [data, weight], reduce=reduce,
                            edge_order=edge_order)  # fmt: skip
    return out
