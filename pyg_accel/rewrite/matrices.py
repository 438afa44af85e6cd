"""The matrices that expressions name: graphs, degrees and weights, each computed once a graph."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops

from pyg_accel import derived as store
from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.ops.csr import CompiledGraph, graph_of

__all__ = [
    "Matrix", "Scores", "degree_of", "derived", "in_order_of", "inverse_degree", "inverse_root",
    "looped", "plain", "weighted",
]  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """Scores of the edges, whose softmax over each row is the values of a matrix.

    Attributes:
        formula: of the scores.
        operands: of the formula, in the order of the CSR.
        dropout: probability that a value is zero in training.
        training: whether that is what happens.
    """

    formula: str
    operands: tuple[Tensor, ...]
    dropout: float = 0.0
    training: bool = False

    def values(self, graph: Graph) -> Tensor:
        """Return the values, [E, heads]."""
        scores = ops.gspmm(graph, self.formula, [*self.operands], reduce="none")
        weights = ops.edge_softmax(graph, scores)
        return F.dropout(weights, self.dropout, self.training)

    def sum(self, graph: Graph, data: Tensor) -> Tensor:
        """Return the sums of features [N, F] or [N, heads, F] that the values weigh."""
        data = data.unsqueeze(1) if data.dim() == 2 else data
        operands, value = [*self.operands, data], f"u{len(self.operands)}"
        if self.dropout and self.training:
            heads = max(t.size(1) for t in self.operands if t.dim() > 1)
            ones = data.new_ones(graph.num_edges, heads)
            operands.append(F.dropout(ones, self.dropout))
            value = f"mul({value},e{len(operands) - 1})"
        return ops.attention(graph, self.formula, value, operands).squeeze(1)


@dataclass(frozen=True)
class Matrix:
    """A matrix of edges.

    Attributes:
        graph: where its entries are.
        weight: [E] or [E, heads], their values; None if they are 1.
        edge_order: the values are in the order of the edge list, else in that of the CSR.
        spare: rows of the graph behind those of the matrix (a compiled graph with self-loops).
        scores: what its values are made of, where they are not there yet.
    """

    graph: Graph
    weight: Tensor | None = None
    edge_order: bool = False
    spare: int = 0
    scores: Scores | None = None

    def targets(self, data: Tensor) -> Tensor:
        """Return what belongs to rows of the matrix, one [N, ...] each, for those of the graph."""
        if not self.spare:
            return data
        return torch.cat([data, data.new_zeros(self.spare, *data.shape[1:])])

    def rows(self, data: Tensor) -> Tensor:
        """Return rows of the matrix from those of the graph."""
        return data[: data.size(0) - self.spare] if self.spare else data


def derived(graph: Graph, key: Hashable, owners: tuple[Tensor, ...], compute: Callable[[], T]) -> T:
    """Return what ``compute`` returns, from memory if nothing has changed since.

    Args:
        graph: it is forgotten together with this graph.
        key: what it is.
        owners: tensors it is computed from; another tensor, or a change in place, is noticed.
        compute: makes it.
    """
    # Compiled code looks nothing up.
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return compute()
    return store.derived((graph, *owners), key, compute)


def plain(edge_index: Tensor, num_rows: int, num_cols: int, target: int) -> Graph:
    """Return the graph of an edge_index as it is."""
    if torch.compiler.is_compiling():
        return CompiledGraph(edge_index, num_rows, num_cols, target)
    return graph_of(edge_index, num_rows, num_cols, target)


def in_order_of(graph: Graph, values: Tensor) -> Tensor:
    """Return values [E, ...] of an edge list in the order of the entries of its graph."""
    return values if graph.perm is None else values.index_select(0, graph.perm)


def looped(
    edge_index: Tensor,
    weight: Tensor | None,
    num_nodes: int,
    target: int,
    fill: float,
    num_cols: int | None = None,
) -> Matrix:
    """Return a graph with a self-loop at every node, as GCN's normalisation has it.

    Args:
        edge_index: [2, E].
        weight: [E] or None.
        num_nodes: N.
        target: row of edge_index with the target nodes.
        fill: weight of the loops that are not there yet; without weights every edge has 1, loops
            too, as in PyG.
        num_cols: number of source nodes, of which those behind N get no loop; by default N.
    """
    num_cols = num_nodes if num_cols is None else num_cols
    if torch.compiler.is_compiling():
        compiled = CompiledGraph(edge_index, num_nodes, num_nodes, target, loops=True)
        if weight is None:
            return Matrix(compiled, spare=1)
        nobody = torch.full_like(edge_index[0], num_nodes)
        ends = torch.where(edge_index[0] == edge_index[1], edge_index[0], nobody)
        filled = weight.new_full((num_nodes + 1,), fill).scatter(0, ends.long(), weight)
        values = torch.cat([weight, filled[:num_nodes]])
        return Matrix(compiled, in_order_of(compiled, values), spare=1)

    def make() -> Graph:
        loops, _ = add_remaining_self_loops(edge_index, None, fill, num_nodes)
        flow = "source_to_target" if target == 1 else "target_to_source"
        return Graph.from_edge_index(loops, (num_cols, num_nodes), flow)

    graph = store.derived((edge_index,), ("looped", target, num_nodes, num_cols), make)
    if weight is None:
        return Matrix(graph)

    def stored() -> Tensor:
        return in_order_of(graph, add_remaining_self_loops(edge_index, weight, fill, num_nodes)[1])

    return Matrix(graph, derived(graph, ("looped", fill), (edge_index, weight), stored))


def weighted(graph: Graph, weight: Tensor) -> Matrix:
    """Return the matrix of a graph with values [E] that come in the order of the edge list."""
    if graph.perm is None:
        return Matrix(graph, weight)
    if weight.requires_grad:
        return Matrix(graph, weight, edge_order=True)
    return Matrix(graph, derived(graph, "weights", (weight,), lambda: in_order_of(graph, weight)))


def degree_of(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Return the row sums of a matrix, [num_rows]."""
    graph, weight = matrix.graph, matrix.weight
    if weight is None:
        return matrix.rows(graph.degree).to(dtype)
    sums: Tensor = ops.gspmm(graph, "e0", [weight.unsqueeze(-1)], edge_order=matrix.edge_order)
    return matrix.rows(sums.squeeze(-1)).to(dtype)


def inverse_degree(graph: Graph, dtype: torch.dtype) -> Tensor:
    """Return what sums over the entries of rows are multiplied with to make means, [num_rows]."""
    return derived(graph, ("D⁻¹", dtype), (), lambda: 1 / graph.degree.clamp(min=1).to(dtype))


def inverse_root(degree: Tensor) -> Tensor:
    """Return ``degree ** -1/2``, 0 where that is infinite."""
    root = degree.pow(-0.5)
    return root.masked_fill(root == float("inf"), 0)
