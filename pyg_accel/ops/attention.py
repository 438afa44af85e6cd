"""Attention: scores, softmax over a target's edges and the weighted sum, as one operator.

``pyg_accel::attention`` keeps two numbers per target and head beside the result: no tensor of
E x heads is made. How it is differentiated is in :mod:`.attention_backward`. Where no backend has
the operator, :func:`attention` runs its parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.dispatch import is_fast, situation
from pyg_accel.backends.spec import shapes_of
from pyg_accel.cache import Bounded
from pyg_accel.checks import shown
from pyg_accel.column_reuse import kind_of
from pyg_accel.facts import Kind
from pyg_accel.formula import Formula, operands_of, parse
from pyg_accel.graph import Graph, check_graph
from pyg_accel.ops.arrays import ARRAYS, Arrays, csr_and_rest
from pyg_accel.ops.attention_backward import backward, is_backward_fast, setup_context
from pyg_accel.ops.attention_unfused import extent, unfused
from pyg_accel.ops.csr import CompiledGraph
from pyg_accel.ops.gspmm import check_operands
from pyg_accel.ops.launch import facts_of_operands, kernel_for
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define, is_eager

__all__ = ["attention"]


def attention(
    graph: Graph,
    score: Formula | str,
    value: Formula | str,
    operands: Sequence[Tensor],
    *,
    edge_order: bool = False,
) -> Tensor:
    """Sum up the values that reach each target, weighted by the softmax of their scores.

    ``out[i] = sum_j softmax_j(score_ij) * value_ij``, head by head. Dropout of the weights is a
    factor of the values: ``"mul(u0,e2)"`` with a mask for e2.

    Args:
        graph: the graph.
        score: one number per edge and head, e.g. ``"leaky_relu(add(u1,v2),0.2)"`` or
            ``"sum(mul(u0,v1))"``. See :mod:`pyg_accel.formula`.
        value: what is added up, e.g. ``"u0"``.
        operands: of both formulas, by operand index: [rows, H, F], [rows, H] (one number per
            head) or [rows]; H and F may be 1 and broadcast.
        edge_order: edge operands are in the order of the edge list that the graph was built from;
            by default in that of the CSR.

    Returns:
        [num_rows, H, F]; targets without edges get 0.

    Raises:
        ValueError: for operands that do not fit the graph or one another, or scores of more than
            one number per edge and head.
        BackendNotSupported: if no backend can run it.
    """
    check_graph(graph)
    score_text, value_text = str(score), str(value)
    if not isinstance(operands, (list, tuple)) or not all(isinstance(t, Tensor) for t in operands):
        raise ValueError(f"expected 'operands' to be a list of tensors (got {shown(operands)})")
    operands = list(operands)
    read, from_edges = _read(score_text, value_text)
    known = None
    if type(graph) is Graph and is_eager():
        known = _find_way(graph, score_text, value_text, read, operands)
    if known is not None:
        folded = [contiguous_rows(_folded(t)) for t in operands]
        edge_order = edge_order and from_edges
        if not known:
            return unfused(graph, score_text, value_text, folded, edge_order=edge_order)
        turned = torch.is_grad_enabled() and any(t.requires_grad for t in folded)
        arrays = Arrays.of(graph, edge_order=edge_order, transposed=turned)
        result: Tensor = call("attention", *arrays, folded, score_text, value_text)[0]
        return result
    what = f"the score {score_text} and the value {value_text}"
    sizes = (graph.num_rows, graph.num_cols, graph.num_edges)
    facts = [(t.shape, t.dtype, t.device) for t in operands]
    check_operands(what, read, sizes, graph.device, facts)
    dtype = operands[0].dtype
    for t in operands:
        dtype = torch.promote_types(dtype, t.dtype)
        if t.dim() > 3:
            raise ValueError(f"expected operands [rows, H, F] (got shape {list(t.shape)})")
    folded = [contiguous_rows(_folded(t.to(dtype))) for t in operands]
    heads, width = extent(score_text, value_text, shapes_of(folded))
    # Without edge operands the order of the CSR will do, in which they are neighbours.
    edge_order = edge_order and (from_edges or graph.in_edge_order)
    csr = graph.csr(edge_order=edge_order)
    needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in folded)
    shapes = tuple((int(h), int(f)) for h, f in shapes_of(folded))
    # A function that Dynamo does not look into runs with is_compiling() false in torch 2.11.
    known_by_shape = torch.compiler.is_compiling() or isinstance(graph, CompiledGraph)
    kind = None if known_by_shape else kind_of(csr)
    sharing = () if kind is None else kind.sharing
    sized = OpSpec.of_any_size(
        "attention", graph.device.type, dtype, int(heads), int(width),
        score=score_text, formula=value_text, shapes=shapes, sharing=sharing,
    )  # fmt: skip
    fused = is_fast(sized) and not (any(needs) and not is_backward_fast(sized, needs))
    if kind is not None and all(t.dtype == dtype for t in operands):
        _ways[_way(kind, score_text, value_text, operands)] = fused
    if not fused:
        return unfused(graph, score_text, value_text, folded, edge_order=edge_order)
    arrays = Arrays.of(graph, edge_order=edge_order, transposed=any(needs))
    out: Tensor = call("attention", *arrays, folded, score_text, value_text)[0]
    return out


# Whether calls of a kind are one operator, by everything that this depends on.
_ways: Bounded[tuple[Any, ...], bool] = Bounded(4096)


def _way(kind: Kind, score: str, value: str, operands: Sequence[Tensor]) -> tuple[Any, ...]:
    grad = torch.is_grad_enabled()
    facts = [(type(t), t.shape[1:], t.dtype, grad and t.requires_grad) for t in operands]
    return (kind, score, value, situation(), *facts)


def _find_way(
    graph: Graph,
    score: str,
    value: str,
    read: tuple[tuple[str, int], ...],
    operands: Sequence[Tensor],
) -> bool | None:
    """Whether a call is one operator; None where that is not known, or operands do not fit."""
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
    if any(
        index >= len(operands)
        or operands[index].size(0) != rows[side]
        or operands[index].device != graph.device
        for side, index in read
    ):
        return None
    return _ways.get(_way(kind_of(graph.csr()), score, value, operands))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read(score: str, value: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Return the (side, index) of every operand, and whether an edge operand is among them."""
    operands = [*operands_of(parse(score)), *operands_of(parse(value))]
    read = tuple(dict.fromkeys((o.side, o.index) for o in operands))
    return read, any(side == "e" for side, _ in read)


def _folded(operand: Tensor) -> Tensor:
    while operand.dim() < 3:
        operand = operand.unsqueeze(-1)
    return operand


def _attention(*args: Any) -> list[Tensor]:
    csr, (operands, score, value) = csr_and_rest(args)
    kind = kind_of(csr)

    def spec() -> OpSpec:
        shapes = shapes_of(operands)
        heads, width = extent(score, value, shapes)
        return OpSpec.on("attention", csr, operands[0], heads, width, score=score, formula=value,
                         shapes=shapes, sharing=kind.sharing)  # fmt: skip

    key = ("attention", kind, score, value, facts_of_operands(operands))
    run = kernel_for(key, spec).run
    outs: list[Tensor] = run(csr, parse(score), parse(value), operands)
    return outs


def _attention_fake(*args: Any) -> list[Tensor]:
    csr, (operands, score, value) = csr_and_rest(args)
    heads, width = extent(score, value, shapes_of(operands))
    rows, like = csr.num_rows, operands[0]
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return [like.new_empty(rows, heads, width), like.new_empty(rows, heads, dtype=wide)]


define(
    f"attention({ARRAYS}, Tensor[] operands, str score, str value) -> Tensor[]",
    _attention,
    _attention_fake,
    backward,
    setup_context,
)
