"""Products of features with one matrix per edge, the output of a linear layer.

The matrix of an edge with hidden features h is ``W h + b``, so the sum over the edges of a target

    sum_j x_j (W h_j + b) = (sum_j h_j (x) x_j) W + (sum_j x_j) b

is the product of an aggregated outer product [N, H * I] and the reordered weights: no matrix per
edge is written.
"""

import torch
from torch import Tensor

from pyg_accel.ops.blocks import Block

__all__ = ["edge_product", "summed_products"]


def edge_product(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply row by row: [E, O].

    Args:
        x: [E, I].
        hidden: [E, H].
        weight: [I * O, H], of the linear layer.
        bias: [I * O], or None.
    """
    matrices = torch.nn.functional.linear(hidden, weight, bias)
    inputs = x.size(1)
    shape = (-1, inputs, weight.size(0) // inputs)  # explicit width: there may be no edges
    return torch.bmm(x.unsqueeze(1), matrices.view(shape)).squeeze(1)


def summed_products(
    block: Block,
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    of_sources: bool,
) -> Tensor:
    """Sum the products over the edges of every target: [rows of the block, O].

    Args:
        block: targets of the same padded degree.
        x: [sources of the block, I], or [E, I].
        hidden: [E, H], for the edges of the block.
        weight: [I * O, H].
        bias: [I * O], or None.
        of_sources: x has a row per source, not a row per edge.
    """
    graph, width = block.graph, x.size(1)
    if not graph.num_edges:
        return x.new_zeros(graph.num_rows, weight.size(0) // max(width, 1))
    if graph.num_edges == graph.num_rows * block.degree:  # no padding
        x = x.index_select(0, graph.col) if of_sources else x
    else:
        places = graph.rowptr[:-1, None] + torch.arange(block.degree, device=x.device)
        filled = places < graph.rowptr[1:, None]
        edges = torch.where(filled, places, graph.num_edges).view(-1)
        hidden = _with_zeros(hidden).index_select(0, edges)
        if of_sources:  # zeros too: the features of another target's source may be infinite
            last = graph.col.new_full((1,), graph.num_cols)
            edges = torch.cat([graph.col, last]).index_select(0, edges)
        x = _with_zeros(x).index_select(0, edges)
    shape = (graph.num_rows, block.degree, -1)
    hidden, x = hidden.view(shape), x.view(shape)
    outer = torch.bmm(hidden.mT, x).flatten(1)  # [rows, H * I]
    matrices = weight.view(width, -1, weight.size(1)).permute(2, 0, 1)  # [H, I, O]
    out = outer @ matrices.reshape(outer.size(1), -1)
    return out if bias is None else out + x.sum(1) @ bias.view(width, -1)


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.size(1))])
