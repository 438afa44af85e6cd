"""Sampled dense-dense product: a value for every edge from the features of its two ends."""

from torch import Tensor

from pyg_accel.graph import Graph, check_graph
from pyg_accel.ops.gspmm import gspmm
from pyg_accel.runtime.checks import shown

__all__ = ["sddmm"]

_FORMULAS = {
    "dot": "sum(mul(u1,v0))",
    "add": "add(v0,u1)",
    "sub": "sub(v0,u1)",
    "mul": "mul(v0,u1)",
    "div": "div(v0,u1)",
}


def sddmm(
    graph: Graph,
    x_target: Tensor,
    x_source: Tensor,
    op: str = "dot",
    *,
    edge_order: bool = False,
) -> Tensor:
    """Combine target and source features along every edge.

    Args:
        graph: the graph.
        x_target: [num_rows, F] or [num_rows, H, F].
        x_source: [num_cols, F] or [num_cols, H, F].
        op: ``"dot"`` over the last dimension, or elementwise ``"add"``, ``"sub"``, ``"mul"``,
            ``"div"`` (target op source).
        edge_order: the result is in the order of the edge list; by default in CSR order.

    Returns:
        [E] or [E, H] for ``"dot"``; otherwise [E, F] or [E, H, F].

    Raises:
        ValueError: for an unknown op or shapes that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    check_graph(graph)
    for name, x in (("x_target", x_target), ("x_source", x_source)):
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError(f"expected '{name}' to be [N, F] or [N, H, F] (got {shown(x)})")
    if not isinstance(op, str) or op not in _FORMULAS:
        raise ValueError(f"expected 'op' of {', '.join(_FORMULAS)} (got {op!r})")
    result: Tensor = gspmm(
        graph, _FORMULAS[op], [x_target, x_source], reduce="none", edge_order=edge_order
    )
    return result
