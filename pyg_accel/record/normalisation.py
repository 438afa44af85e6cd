"""Moves the normalisation of GCN from the edges to the nodes in programs for a GPU.

``gcn_norm`` makes a list of edges without self-loops and with one for every node, and a weight for
each. A sum with these weights is D^-1/2 A D^-1/2 x without the loops of A, plus x / D. So it takes
the degrees of nodes, and reads the edge list as it is, which spares a new graph a copy.
"""

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_accel import ops
from pyg_accel.graph import for_autograd
from pyg_accel.graph.derived import derived
from pyg_accel.graph.memo import remembered
from pyg_accel.ops.csr import graph_of
from pyg_accel.record.about import ABOUT
from pyg_accel.record.split import DERIVED

__all__ = ["node_scales", "on_nodes"]

_WEIGHTED, _SCALED = "mul(e0,u1)", "mul(v0,mul(u1,u2))"
_SIGNATURE = inspect.Signature([  # of gcn_norm()
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for name, default in (("edge_index", None), ("edge_weight", None), ("num_nodes", None),
                          ("improved", False), ("add_self_loops", True),
                          ("flow", "source_to_target"), ("dtype", None))
])  # fmt: skip


def node_scales(
    edge_index: Tensor, num_nodes: int, target: int, loops: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what a sum over neighbours is scaled by, in place of weights of edges.

    Args:
        edge_index: [2, E].
        num_nodes: number of nodes, N.
        target: row of edge_index that holds the target nodes.
        loops: every node gets one self-loop in place of those that it has.
        dtype: of the results.

    Returns:
        [N, 1] 1 / sqrt(degree), 0 for a node without edges, and [N, 1] by how much the features of
        a node count beyond those of its entries in edge_index.
    """

    @for_autograd
    def make() -> tuple[Tensor, Tensor]:
        count = torch.zeros(2, num_nodes, dtype=dtype, device=edge_index.device)
        rows, cols = edge_index[target], edge_index[1 - target]
        count[0].index_add_(0, rows, count.new_ones(()).expand_as(rows))
        if loops:
            count[1].index_add_(0, rows, (rows == cols).to(dtype))
            own = 1 - count[1]
            scale = count[0].add_(own).rsqrt_()
            return scale.view(-1, 1), own.mul_(scale).mul_(scale).view(-1, 1)
        scale = count[0].pow_(-0.5)
        return scale.masked_fill_(scale == float("inf"), 0.0).view(-1, 1), count[1].view(-1, 1)

    key = "node scales", num_nodes, target, loops, dtype
    scales: tuple[Tensor, Tensor] = derived((edge_index,), key, make)
    return scales


def on_nodes(graph: fx.Graph, constants: dict[str, Any]) -> fx.Graph:
    """Return a recording whose normalised sums read degrees in place of weights of edges.

    Args:
        graph: the recording.
        constants: values that it reads, by name.
    """
    out = fx.Graph()
    out.output(out.graph_copy(graph, {}))
    for norm in [node for node in out.nodes if _is_plain_norm(node, constants)]:
        sums = _sums(norm, constants)
        if sums:
            _replace(out, norm, sums)
    for node in reversed(out.nodes):
        if not node.users and node.op.startswith("call") and _is_of_edges(node):
            out.erase_node(node)
    return out


def _is_plain_norm(node: fx.Node, constants: dict[str, Any]) -> bool:
    """Whether a node is gcn_norm() of an edge_index without weights."""
    if node.target is not remembered or not isinstance(node.args[0], fx.Node):
        return False
    function = constants.get(str(node.args[0].target))
    if getattr(function, "__wrapped__", function) is not gcn_norm and (
        getattr(function, "__qualname__", "") != "gcn_norm"
    ):
        return False
    given = _arguments(node)
    return given["edge_weight"] is None and given["num_nodes"] is not None and (
        given["dtype"] in (torch.float32, torch.float64)
    )  # fmt: skip


def _arguments(norm: fx.Node) -> dict[str, Any]:
    """Return the arguments of gcn_norm() by name."""
    bound = _SIGNATURE.bind(*norm.args[1:], **norm.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _sums(norm: fx.Node, constants: dict[str, Any]) -> list[fx.Node]:
    """Return the sums that alone read the results of a normalisation; none if others do."""
    parts = {part.args[1]: part for part in norm.users if part.target is operator.getitem}
    if len(parts) != len(norm.users) or parts.keys() != {0, 1}:
        return []
    matrices = [*parts[0].users]
    weights = [w for view in parts[1].users for w in _views(view)]
    nodes = _arguments(norm)["num_nodes"]
    if any(m.target is not graph_of or m.args[1:3] != (nodes, nodes) for m in matrices):
        return []
    sums = [*dict.fromkeys(node for matrix in matrices for node in matrix.users)]
    if {user for weight in weights for user in weight.users} != {*sums}:
        return []
    return sums if all(_is_weighted(node, constants, weights) for node in sums) else []


def _views(node: fx.Node) -> list[fx.Node]:
    """Return a node if it is the weights as a column."""
    is_column = node.target in (Tensor.view, Tensor.unsqueeze) and node.args[1:] in ((-1, 1), (-1,))
    return [node] if is_column else [node.args[0]]  # type: ignore[list-item]


def _is_weighted(node: fx.Node, constants: dict[str, Any], weights: list[fx.Node]) -> bool:
    """Whether a node is a sum of features of neighbours, with a weight for each edge."""
    if node.target is not ops.gspmm or node.kwargs != {"reduce": "sum", "edge_order": True}:
        return False
    _, formula, operands = node.args
    text = str(constants.get(str(getattr(formula, "target", ""))))
    (weight, x) = operands if len(operands) == 2 else (None, None)  # type: ignore[arg-type, misc]
    about = x.meta.get(ABOUT) if isinstance(x, fx.Node) else None
    return text == _WEIGHTED and weight in weights and about is not None and len(about.shape) == 2


def _replace(out: fx.Graph, norm: fx.Node, sums: list[fx.Node]) -> None:
    given = _arguments(norm)
    edges, nodes, loops = given["edge_index"], given["num_nodes"], given["add_self_loops"]
    target = 1 if given["flow"] == "source_to_target" else 0
    with out.inserting_before(norm):
        scales = out.call_function(node_scales, (edges, nodes, target, loops, given["dtype"]))
        scales.meta[DERIVED] = True
        scale, own = (out.call_function(operator.getitem, (scales, i)) for i in (0, 1))
        matrix = out.call_function(graph_of, (edges, nodes, nodes, target))
        matrix.meta[DERIVED] = True
    for node in sums:
        x = node.args[2][1]  # type: ignore[index]
        with out.inserting_before(node):
            result = out.call_function(ops.gspmm, (matrix, _SCALED, [scale, scale, x]))
            if loops:
                result = out.call_function(torch.addcmul, (result, own, x))
        result.meta |= node.meta
        node.replace_all_uses_with(result)


def _is_of_edges(node: fx.Node) -> bool:
    return node.target in (
        remembered, graph_of, operator.getitem, ops.gspmm, Tensor.view, Tensor.unsqueeze
    )  # fmt: skip
