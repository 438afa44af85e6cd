"""Sparse times dense: aggregation with at most one weight per edge, head or feature."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyg_accel.graph import Graph, check_graph
from pyg_accel.ops.gspmm import gspmm

__all__ = ["spmm"]


def spmm(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str | Sequence[str] = "sum",
    edge_order: bool = False,
) -> Any:
    """Aggregate the features of source nodes: ``out[i] = reduce_j weight_ij * x[j]``.

    Copy-reduce of the DGL paper on x86 (section 3.1); with weights, its most used binary-reduce.

    Args:
        graph: the graph.
        x: [num_cols, F] or [num_cols, H, F].
        weight: [E], one per edge; [E, H] with x [num_cols, H, F], one per edge and head; or [E, F]
            (or [E, H, F]), one per edge and feature.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``, ``"sqsum"`` (sum of
            squares), or ``"none"`` for the messages themselves; or several of them in one pass.
        edge_order: weights, and messages for ``"none"``, are in the order of the edge list; by
            default in CSR order.

    Returns:
        [num_rows, F] or [num_rows, H, F] (E rows for ``"none"``), or a list of them for a list of
        reductions.

    Raises:
        ValueError: for shapes that do not fit, or unknown reductions.
        BackendNotSupported: if no backend can run it.
    """
    if type(graph) is not Graph:
        check_graph(graph)
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise ValueError("expected 'x' to be a tensor [N, F] or [N, H, F]")
    if weight is None:
        return gspmm(graph, "u0", (x,), reduce=reduce, edge_order=edge_order)
    if not isinstance(weight, Tensor) or weight.dim() == 0 or weight.size(0) != graph.col.size(0):
        raise ValueError(f"expected 'weight' to be a tensor with {graph.num_edges} rows")
    while 1 < weight.dim() < x.dim():
        weight = weight.unsqueeze(-1)
    plain = weight.numel() == weight.size(0)
    if not plain and any(
        mine > max(full, 1) for mine, full in zip(weight.shape[1:], x.shape[1:], strict=False)
    ):
        raise ValueError(
            f"expected 'weight' to have no more features than 'x' (got {list(weight.shape)} and "
            f"{list(x.shape)})"
        )
    return gspmm(graph, "mul(u0,e1)", (x, weight), reduce=reduce, edge_order=edge_order)
