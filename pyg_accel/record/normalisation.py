"""Moves the normalisation of GCN from the edges to the nodes in programs for a GPU.

``gcn_norm`` writes a list of edges with one self-loop for every node, and weights: products of
D^-1/2 of both nodes. Instead, messages read D^-1/2 and the original edge list, which saves a copy
of a new graph: self-loops are replaced while edges are read
(:class:`~pyg_accel.graph.csr.Edges`), also for attention.
"""

import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_accel import ops
from pyg_accel.formula import Binary, Formula, Operand, map_operands, operands_of, parse
from pyg_accel.graph import Graph, for_autograd
from pyg_accel.graph.derived import derived
from pyg_accel.graph.memo import remembered
from pyg_accel.ops.by_edge import degrees_of
from pyg_accel.ops.csr import graph_of
from pyg_accel.ops.layout import per_target
from pyg_accel.record.dims import expect
from pyg_accel.record.metadata import FACTS
from pyg_accel.record.split import DERIVED

__all__ = ["node_scales", "on_nodes"]

_SIGNATURE = inspect.Signature([  # of gcn_norm()
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for name, default in (("edge_index", None), ("edge_weight", None), ("num_nodes", None),
                          ("improved", False), ("add_self_loops", True),
                          ("flow", "source_to_target"), ("dtype", None))
])  # fmt: skip


def node_scales(matrix: Graph, loops: bool, dtype: torch.dtype) -> Tensor:
    """Return 1 / sqrt(degree) of every node, [N, 1]; 0 for nodes without edges.

    Args:
        matrix: the graph, of as many sources as targets.
        loops: all nodes have one.
        dtype: of the result.
    """

    @for_autograd
    def make() -> Tensor:
        scale = degrees_of(matrix, dtype).to(dtype).rsqrt()
        return scale if loops else scale.masked_fill_(scale == float("inf"), 0.0)

    return derived((matrix,), ("node scales", dtype), make)


def on_nodes(graph: fx.Graph, constants: dict[str, Any]) -> fx.Graph:
    """Return a recording with degrees in place of weights, and without new lists of edges.

    Args:
        graph: the recording.
        constants: values that it reads, by name.
    """
    out = fx.Graph()
    out.output(out.graph_copy(graph, {}))
    for norm in [node for node in out.nodes if _is_plain_norm(node, constants)]:
        sums = _sums(norm, constants)
        if sums:
            _replace(out, norm, sums, constants)
    for node in [*out.nodes]:
        _replace_loops(node, constants)
    for node in reversed(out.nodes):
        if not node.users and node.op.startswith("call") and _is_of_edges(node):
            out.erase_node(node)
    return out


def _is_plain_norm(node: fx.Node, constants: dict[str, Any]) -> bool:
    """Whether a node is gcn_norm() of an edge_index without weights."""
    if not _is_call(node, constants, gcn_norm):
        return False
    arguments = _arguments(node)
    return arguments["edge_weight"] is None and arguments["num_nodes"] is not None and (
        arguments["dtype"] in (torch.float32, torch.float64)
    )  # fmt: skip


def _is_call(node: Any, constants: dict[str, Any], function: Any) -> bool:
    """Whether a node calls a function of PyG on edges, or its replacement."""
    if not isinstance(node, fx.Node) or node.target is not remembered:
        return False
    called = constants.get(str(getattr(node.args[0], "target", "")))
    return getattr(called, "__wrapped__", called) is function or (
        getattr(called, "__qualname__", "") == function.__qualname__
    )


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
    nodes = _recorded(_arguments(norm)["num_nodes"])
    if nodes is None or any(
        m.target is not graph_of or {*map(_recorded, m.args[1:3])} != {nodes} for m in matrices
    ):
        return []
    sums = [*dict.fromkeys(node for matrix in matrices for node in matrix.users)]
    if {user for weight in weights for user in weight.users} != {*sums}:
        return []
    return sums if all(_is_weighted(node, constants, weights) for node in sums) else []


def _recorded(size: Any) -> int | None:
    """Return a number of nodes in the recorded call; None if it is unknown."""
    if isinstance(size, int):
        return size
    if size.target != "size" or len(size.args) != 2:
        return None
    tensor, dim = size.args
    return tensor.meta[FACTS].shape[dim] if FACTS in tensor.meta else None


def _views(node: fx.Node) -> list[fx.Node]:
    """Return a node if it is the weights as a column."""
    reshapes = node.target in (Tensor.view, Tensor.reshape, Tensor.unsqueeze)
    is_column = reshapes and node.args[1:] in ((-1, 1), (-1,))
    return [node] if is_column else [node.args[0]]  # type: ignore[list-item]


def _is_weighted(node: fx.Node, constants: dict[str, Any], weights: list[fx.Node]) -> bool:
    """Whether a node reduces features of nodes, with one weight per edge and no edge features."""
    if node.target is not ops.gspmm or not node.kwargs.get("edge_order"):
        return False
    if node.kwargs["reduce"] == "none" or len(node.kwargs) != 2:
        return False
    formula, operands = _message_of(node, constants)
    of_edges = {operands[o.index] for o in operands_of(formula) if o.side == "e"}
    others = [x.meta.get(FACTS) for x in operands if x not in of_edges]
    return len(of_edges) == 1 and of_edges <= {*weights} and all(
        facts is not None and len(facts.shape) == 2 for facts in others
    )  # fmt: skip


def _message_of(node: fx.Node, constants: dict[str, Any]) -> tuple[Formula, list[fx.Node]]:
    """Return the formula and the operands of a reduction."""
    _, formula, operands = node.args
    return parse(str(constants[str(formula.target)])), list(operands)  # type: ignore[union-attr, arg-type]


def _replace(out: fx.Graph, norm: fx.Node, sums: list[fx.Node], constants: dict[str, Any]) -> None:
    args = _arguments(norm)
    edges, nodes, loops = args["edge_index"], args["num_nodes"], args["add_self_loops"]
    target = 1 if args["flow"] == "source_to_target" else 0
    with out.inserting_before(norm):
        self_loops = nodes if loops else None
        matrix = out.call_function(graph_of, (edges, nodes, nodes, target, self_loops))
        scale = out.call_function(node_scales, (matrix, loops, args["dtype"]))
        matrix.meta[DERIVED] = scale.meta[DERIVED] = True
    matrices: Any = dict.fromkeys(node.args[0] for node in sums)
    for listed in matrices:
        with out.inserting_before(listed):  # ahead of effects, as checks_first() does
            for size in {*listed.args[1:3]} - {nodes}:
                equal = out.call_function(operator.eq, (size, nodes))
                out.call_function(expect, (equal, True))
    for node in sums:
        formula, operands = _message_of(node, constants)
        (weight,) = {o.index for o in operands_of(formula) if o.side == "e"}
        product = Binary("mul", Operand("v", weight), Operand("u", len(operands)))
        formula = map_operands(formula, lambda o, by=product: by if o.side == "e" else o)  # type: ignore[misc]
        operands[weight] = scale
        kwargs = {"reduce": node.kwargs["reduce"]}
        with out.inserting_before(node):
            result = out.call_function(
                ops.gspmm, (matrix, str(formula), [*operands, scale]), kwargs
            )
        result.meta |= node.meta
        node.replace_all_uses_with(result)


def _replace_loops(added: fx.Node, constants: dict[str, Any]) -> None:
    """Move the self-loops that a node adds to a list of edges into the graph."""
    listed: Any = _first_result(added.args[1]) if len(added.args) > 1 else None
    nodes, removes = added.kwargs.get("num_nodes"), _is_call(listed, constants, remove_self_loops)
    if nodes is None or not (removes and _is_call(added, constants, add_self_loops)):
        return
    lists = added, listed
    features = any(argument is not None for node in lists for argument in node.args[2:])
    if features or any(_first_result(u) is None and u.users for node in lists for u in node.users):
        return
    users = [user for part in added.users for user in part.users]
    matrices = [user for user in users if user.target is graph_of]
    others = [user for user in users if user.target is not graph_of]
    numbers = [size for user in others for size in user.users]
    if not (
        all(_reads_no_edges(user, constants) for matrix in matrices for user in matrix.users)
        and all(user.target is Tensor.__getitem__ for user in others)
        and all(map(_is_only_asked_for_zero, numbers))
    ):
        return
    for matrix in matrices:
        matrix.args = (listed.args[1], *matrix.args[1:4], nodes)
    for number in numbers:  # of edges; there are none if there are no nodes
        for user in [*number.users]:
            user.args = tuple(nodes if a is number else a for a in user.args)


def _first_result(node: Any) -> Any:
    """Return the node whose first result this is; None if it is not one."""
    is_first = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0
    return node.args[0] if is_first else None


def _reads_no_edges(user: fx.Node, constants: dict[str, Any]) -> bool:
    """Whether a node calls an operator on a graph without features of edges."""
    if user.target is per_target:
        return True
    if user.target not in (ops.gspmm, ops.attention) or user.kwargs.get("reduce") == "none":
        return False
    formulas = [constants.get(str(a.target)) if isinstance(a, fx.Node) else a
                for a in user.args[1:-1]]  # fmt: skip
    return not any(o.side == "e" for f in formulas for o in operands_of(parse(str(f))))


def _is_only_asked_for_zero(number: fx.Node) -> bool:
    """Whether a number is only compared with zero."""
    if number.op != "call_method" or number.target != "size":
        return False
    pending = [*number.users]
    while pending:
        user = pending.pop()
        if user.target is operator.mul and 1 in user.args:
            pending += user.users
        elif user.target is not operator.eq or user.args[1] != 0:
            return False
    return True


def _is_of_edges(node: fx.Node) -> bool:
    return node.target in (
        remembered, graph_of, operator.getitem, ops.gspmm, Tensor.view, Tensor.reshape,
        Tensor.unsqueeze, Tensor.__getitem__, "size",
    )  # fmt: skip
