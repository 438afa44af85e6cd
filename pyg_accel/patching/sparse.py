"""Layers that are given a sparse matrix instead of an edge_index.

A layer with a ``message_and_aggregate`` multiplies with the matrix, by PyG's ``spmm`` or
``torch.sparse.mm``; that product runs on our kernels. Any other layer gets the edges and values of
the matrix, as PyG itself would take them out of it, and is traced like one that was given an
edge_index.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_accel.formula import Computation, parse
from pyg_accel.graph.matrices import (
    edges_of_matrix,
    graph_of_matrix,
    is_sparse_matrix,
    num_edges,
    tensor_reasons,
    values_of,
)
from pyg_accel.patching.running import Unrecognised
from pyg_accel.patching.sampling import aggregate
from pyg_accel.patching.watch import Watch
from pyg_accel.record.recorder import quiet

__all__ = ["SparseTrace", "as_edge_index"]

# PyG's names of reductions.
_REDUCES = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
            "amin": "min"}  # fmt: skip


class SparseTrace(Watch):
    """One accelerated call of a layer that multiplies: takes the products over."""

    watched = frozenset({torch.sparse.mm.__name__})
    network_bytes = 0  # of networks on edges, as of other traces

    def see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a torch function."""
        out = self.multiply(*args) if func is torch.sparse.mm and not kwargs else None
        return func(*args, **kwargs) if out is None else out

    def multiply(self, adj: Any, x: Tensor, reduce: str = "sum") -> Tensor | None:
        """Return the product of a matrix with features; None if that is left to PyG."""
        reduce = _REDUCES.get(reduce, "")
        if not reduce or not is_sparse_matrix(adj) or x.layout != torch.strided or x.dim() != 2:
            return None
        if num_edges(adj) == 0 or (isinstance(adj, Tensor) and tensor_reasons(adj, x.dtype)):
            return None
        with quiet():
            try:
                graph, values = graph_of_matrix(adj), values_of(adj)
            except (IndexError, ValueError) as error:
                raise Unrecognised(str(error), permanent=False) from error
            if values is not None:
                if values.dim() != 1:
                    return None
                values = values.to(x.dtype).unsqueeze(-1)  # as torch_sparse does
            operands = [x] if values is None else [x, values]
            formula = parse("u0" if values is None else "mul(u0,e1)")
            (out,), note = aggregate(graph, formula, operands, [reduce])
        self.formulas.append(Computation(formula, (reduce,), note=note))
        return out


def as_edge_index(
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
