"""Layers called with a sparse matrix or an EdgeIndex instead of an edge_index.

A layer with a ``message_and_aggregate`` multiplies with the matrix by PyG's ``spmm``, which runs
our kernels. Any other layer gets the edges and values of the matrix, as in PyG, and is recorded
like a call with an edge_index.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_accel.formula import Computation, Operand, parse
from pyg_accel.graph.matrices import (
    edges_of_matrix,
    graph_of_matrix,
    is_sparse_matrix,
    num_edges,
    tensor_reasons,
    values_of,
)
from pyg_accel.patching import gate
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.sampling import aggregate
from pyg_accel.runtime.state import during, running

__all__ = ["PRODUCT", "multiplied", "spmm", "with_edges"]

_WEIGHTED = parse("mul(u0,e1)")
PRODUCT = Computation(_WEIGHTED, ("sum",))

# PyG's names of reductions.
_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
            "amin": "min"}  # fmt: skip


def multiplied(call: gate.Call) -> tuple[Any, list[Computation]]:
    """Make a call of a layer with a product; return its result and formulas."""
    products: list[Computation] = []
    with during(products=products):
        return call.stock(), products


def spmm(function: Callable[..., Any], src: Any, other: Any, reduce: str = "sum") -> Any:
    """Replace ``torch_geometric.utils.spmm`` inside a call with a sparse matrix."""
    products = None if torch.compiler.is_dynamo_compiling() else running.products
    out = None if products is None else _product(products, src, other, reduce)
    return function(src, other, reduce) if out is None else out


def _product(products: list[Computation], adj: Any, x: Tensor, reduce: str) -> Tensor | None:
    """Return the product of a matrix and features; None to leave it to PyG."""
    reduce = _REDUCES.get(reduce, "")
    if not reduce or not is_sparse_matrix(adj) or x.layout != torch.strided or x.dim() != 2:
        return None
    if num_edges(adj) == 0 or (isinstance(adj, Tensor) and tensor_reasons(adj, x.dtype)):
        return None
    try:
        graph, values = graph_of_matrix(adj), values_of(adj)
    except (IndexError, ValueError):  # invalid indices are left to PyG
        return None
    if values is not None:
        if values.dim() != 1:
            return None
        values = values.to(x.dtype).unsqueeze(-1)  # as torch_sparse does
    operands = [x] if values is None else [x, values]
    formula = Operand("u", 0) if values is None else _WEIGHTED
    (out,), note = aggregate(graph, formula, operands, [reduce])
    products.append(Computation(formula, (reduce,), note=note))
    return out


def with_edges(call: gate.Call) -> gate.Call:
    """Return a call with a plain edge_index in place of a matrix or an EdgeIndex.

    As in PyG's template, values of a matrix become the argument of the message, if it is None.

    Raises:
        Unrecognised: if PyG does not accept the graph, or passes it to the message.
    """
    module, (graph,), kwargs = call.owner, call.args, dict(call.kwargs)
    assert isinstance(module, MessagePassing)
    updates = call.original.__name__ == "edge_updater"
    parts: list[Any] = ["edge_update"] if updates else ["message", "aggregate", "update"]
    names = module.inspector.get_flat_param_names(parts)
    matrix = is_sparse_matrix(graph)
    if not matrix and not isinstance(graph, EdgeIndex):
        raise Unrecognised(f"a {type(graph).__name__} as edge_index", permanent=False)
    reasons = [f"a message that asks for '{n}'" for n in names if n in ("edge_index", "adj_t")
               or (not matrix and n.startswith("edge_index"))]  # fmt: skip
    name = next((n for n in ("edge_weight", "edge_attr", "edge_type") if n in names), "")
    if matrix and isinstance(graph, Tensor):
        reasons += tensor_reasons(graph) + ["a CSC matrix"] * (graph.layout == torch.sparse_csc)
    if matrix and module.flow != "source_to_target":
        reasons.append("a sparse matrix in the other flow")
    if matrix and name and name not in kwargs:
        reasons.append(f"a message that asks for '{name}' and is not given one")
    if reasons:
        raise Unrecognised("; ".join(reasons), permanent=False)
    if matrix and name and kwargs[name] is None:
        values = values_of(graph)
        kwargs[name] = None if name == "edge_attr" and values is not None and values.dim() == 1 \
            else values  # fmt: skip
    # PyG ignores a size from the caller.
    kwargs["size"] = (graph.size(1), graph.size(0)) if matrix else (graph.num_rows, graph.num_cols)
    plain = edges_of_matrix(graph) if matrix else graph.as_tensor()
    return call._replace(args=(plain,), kwargs=kwargs)
