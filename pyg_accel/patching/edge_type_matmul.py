"""Messages times the matrix of their relation: ``bmm(x_j, weight[edge_type])``.

PyG gathers a matrix for every edge. Edges of one relation and one source node have the same
product, so products are computed for the pairs of a relation and a node
(:func:`~pyg_accel.ops.relations.pairs_of`), and a reduction over the targets reads them like
features of source nodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Formula, Operand, map_operands, operands_of
from pyg_accel.graph import Graph
from pyg_accel.ops.relations import Pairs, graph_of_pairs, multiply_pairs, pairs_of
from pyg_accel.record.edge_tensors import DeferredOperand, plain_shape
from pyg_accel.record.recorder import perform

__all__ = ["Matrices", "Products", "multiply", "with_pairs_as_sources"]


class Matrices(DeferredOperand):
    """``weight[edge_type]``: a matrix for every edge; everything but a product materialises it.

    Attributes:
        weight: [R, ...].
        edge_type: [E].
    """

    weight: Tensor
    edge_type: Tensor

    @classmethod
    def of(cls, weight: Tensor, edge_type: Tensor) -> "Matrices":
        """Defer the selection."""
        shape = (edge_type.numel(), *weight.shape[1:])
        return cls(shape, weight.dtype, weight.device, weight=weight, edge_type=edge_type)

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        return self.weight.index_select(0, self.edge_type)

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return self.weight.requires_grad


class Products(DeferredOperand):
    """Products [E, ...] of features with the matrix of the relation of an edge.

    Attributes:
        rows: [P, ...], for pairs of a relation and a node.
        pairs: the pairs.
        edge_index: the edges.
    """

    rows: Tensor
    pairs: Pairs
    edge_index: Tensor

    @classmethod
    def of(cls, rows: Tensor, pairs: Pairs, edge_index: Tensor) -> "Products":
        """Spread rows over the edges, later."""
        shape = (pairs.pair.numel(), *rows.shape[1:])
        return cls(shape, rows.dtype, rows.device, rows=rows, pairs=pairs, edge_index=edge_index)

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        return self.rows.index_select(0, self.pairs.pair)

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return self.rows.requires_grad

    def hoisted(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.hoisted`."""
        if func is torch.Tensor.reshape:
            args = (self.rows.size(0), *args[1:])
        result = func(self.rows, *args, **kwargs)
        if isinstance(result, Tensor):
            return Products.of(result, self.pairs, self.edge_index)
        return type(result)(Products.of(t, self.pairs, self.edge_index) for t in result)


def multiply(
    x: Tensor, weight: Tensor, edge_type: Tensor, edge_index: Tensor, row: int
) -> Products:
    """Multiply the features of the nodes at one end of each edge by the matrix of its relation.

    Args:
        x: [N, B, K].
        weight: [R, B, K, M].
        edge_type: [E].
        edge_index: the edges.
        row: of edge_index, with these nodes.

    Returns:
        [E, B, M], later.
    """
    args = edge_index, row, edge_type, x.size(0), weight.size(0)
    pairs: Pairs = perform(pairs_of, *args, borrows=True)
    return Products.of(perform(multiply_pairs, pairs, x, weight), pairs, edge_index)


def with_pairs_as_sources(
    formula: Formula, operands: Sequence[Tensor], target: int, num_rows: int
) -> tuple[Graph, Formula, list[Tensor]] | None:
    """Read the products in a formula from pairs instead of edges.

    Returns:
        The graph from pairs to targets, the formula and its operands; None without products, or
        if the formula reads features of source nodes, which are not in that graph.
    """
    products = [t for t in operands if isinstance(t, Products)]
    if not products or any(o.side == "u" for o in operands_of(formula)):
        return None
    widest = max(products, key=lambda t: plain_shape(t)[1:].numel())
    stand_in = {
        i for i, t in enumerate(operands) if isinstance(t, Products) and t.pairs is widest.pairs
    }
    formula = map_operands(
        formula, lambda o: Operand("u" if o.index in stand_in else o.side, o.index)
    )
    rows = [t.rows if i in stand_in else t for i, t in enumerate(operands)]  # type: ignore[attr-defined]
    args = widest.pairs, widest.edge_index, target, num_rows
    return perform(graph_of_pairs, *args, borrows=True), formula, rows
