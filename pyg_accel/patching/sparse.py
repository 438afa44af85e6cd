"""Layers that are given a sparse matrix or an EdgeIndex instead of an edge_index.

A layer with a ``message_and_aggregate`` multiplies with the matrix, by PyG's ``spmm``; that product
runs on our kernels. Any other layer gets the edges and values of the matrix, as PyG itself would
take them out of it, and is recorded like one that was given an edge_index.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_accel.formula import parse
from pyg_accel.graph.matrices import (
    edges_of_matrix,
    graph_of_matrix,
    is_sparse_matrix,
    num_edges,
    tensor_reasons,
    values_of,
)
from pyg_accel.patching import gate
from pyg_accel.patching.running import Unrecognised, running
from pyg_accel.patching.sampling import aggregate

__all__ = ["multiplied", "spmm", "with_edges"]

# PyG's names of reductions.
_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
            "amin": "min"}  # fmt: skip


def multiplied(call: gate.Call) -> tuple[Any, list[str]]:
    """Make a call of a layer that multiplies: its result and formulas."""
    before, running.products = running.products, []
    try:
        return call.stock(), running.products
    finally:
        running.products = before


def spmm(function: Callable[..., Any], src: Any, other: Any, reduce: str = "sum") -> Any:
    """Stand in for ``torch_geometric.utils.spmm`` inside a call with a sparse matrix."""
    products = None if torch.compiler.is_dynamo_compiling() else running.products
    out = None if products is None else _product(products, src, other, reduce)
    return function(src, other, reduce) if out is None else out


def _product(formulas: list[str], adj: Any, x: Tensor, reduce: str) -> Tensor | None:
    """Return the product of a matrix with features; None if that is left to PyG."""
    reduce = _REDUCES.get(reduce, "")
    if not reduce or not is_sparse_matrix(adj) or x.layout != torch.strided or x.dim() != 2:
        return None
    if num_edges(adj) == 0 or (isinstance(adj, Tensor) and tensor_reasons(adj, x.dtype)):
        return None
    try:
        graph, values = graph_of_matrix(adj), values_of(adj)
    except (IndexError, ValueError):  # no indices of a matrix, of which PyG makes what it can
        return None
    if values is not None:
        if values.dim() != 1:
            return None
        values = values.to(x.dtype).unsqueeze(-1)  # as torch_sparse does
    operands = [x] if values is None else [x, values]
    formula = parse("u0" if values is None else "mul(u0,e1)")
    (out,), note = aggregate(graph, formula, operands, [reduce])
    formulas.append(f"{reduce}_j {formula}{note}")
    return out


def with_edges(call: gate.Call) -> gate.Call:
    """Return a call with a plain edge_index in place of a matrix or an EdgeIndex.

    Raises:
        Unrecognised: if PyG hands what it is given on to the message, or would not take it.
    """
    module, (graph,), kwargs = call.owner, call.args, call.kwargs
    assert isinstance(module, MessagePassing)
    if is_sparse_matrix(graph):
        plain, kwargs = _as_edge_index(call.original, module, graph, kwargs)
        return call._replace(args=(plain,), kwargs=kwargs)
    if not isinstance(graph, EdgeIndex):
        raise Unrecognised(f"a {type(graph).__name__} as edge_index", permanent=False)
    read = module.inspector.get_flat_param_names(["message", "aggregate", "update", "edge_update"])
    if any(name.startswith("edge_index") for name in read):
        raise Unrecognised("the message reads the EdgeIndex itself")
    kwargs = kwargs | {"size": (graph.num_rows, graph.num_cols)}  # PyG ignores a given size
    return call._replace(args=(graph.as_tensor(),), kwargs=kwargs)


def _as_edge_index(
    original: Callable[..., Any], module: MessagePassing, adj: Any, kwargs: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the edge_index and arguments by which a call does what it does for a matrix.

    As in PyG's template, values become the argument that the message asks for, if it was None.

    Raises:
        Unrecognised: if PyG would not take the matrix, or hands it on to the message.
    """
    inspector = module.inspector
    names = (
        inspector.get_param_names("edge_update")
        if original.__name__ == "edge_updater"
        else inspector.get_flat_param_names(["message", "aggregate", "update"])
    )
    reasons = [f"a message that asks for '{n}'" for n in ("edge_index", "adj_t") if n in names]
    if isinstance(adj, Tensor):
        reasons += tensor_reasons(adj) + ["a CSC matrix"] * (adj.layout == torch.sparse_csc)
    if module.flow != "source_to_target":
        reasons.append("a sparse matrix in the other flow")
    given = dict(kwargs)
    name = next((n for n in ("edge_weight", "edge_attr", "edge_type") if n in names), None)
    if name is not None and name not in given:
        reasons.append(f"a message that asks for '{name}' and is not given one")
    if reasons:
        raise Unrecognised("; ".join(reasons), permanent=False)
    if name is not None and given[name] is None:
        values = values_of(adj)
        given[name] = None if name == "edge_attr" and values is not None and values.dim() == 1 \
            else values  # fmt: skip
    given["size"] = (adj.size(1), adj.size(0))
    return edges_of_matrix(adj), given
