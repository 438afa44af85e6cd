"""Message formula plus reduction: the operator that every aggregation comes down to.

``pyg_accel::gspmm`` takes plain tensors, so that torch.compile, autograd and other transforms see
an ordinary operator; :func:`gspmm` is its friendly face. Its gradient is itself with another
formula: for a source operand on the transposed graph, for a target operand on the same graph, for
an edge operand without a reduction. So it can be differentiated any number of times.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.formula import Formula, Sum, operands_of, parse, shape_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.gspmm_backward import backward, setup_context
from pyg_accel.ops.layout import find_layout
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.steps import shapes_of

__all__ = ["REDUCES", "check_operands", "gspmm"]

REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")


def gspmm(
    graph: Graph,
    formula: Formula | str,
    operands: Sequence[Tensor],
    *,
    reduce: str | Sequence[str] = "sum",
    edge_order: bool = False,
) -> Any:
    """Compute the message of every edge and reduce the messages of every target node.

    Binary-reduce of the DGL paper on x86 (section 2.1), for any elementwise formula. No E x F
    tensor is made unless ``reduce="none"`` asks for it.

    Args:
        graph: the graph.
        formula: the message, e.g. ``"relu(add(u0,e1))"``: operand 0 at the source node, operand 1
            at the edge. See :mod:`pyg_accel.formula`.
        operands: by operand index: [num_cols, ...] for ``u``, [num_rows, ...] for ``v``, [E, ...]
            for ``e``. What trails the rows broadcasts, aligned on the right.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``, ``"sqsum"`` (sum of
            squares), or ``"none"`` for the messages themselves; or several of them, computed in
            one pass.
        edge_order: edge operands, and messages for ``"none"``, are in the order of the edge list
            that the graph was built from; by default in that of the CSR.

    Returns:
        [num_rows, ...] ([E, ...] for ``"none"``), or a list of them for a list of reductions.
        Targets without edges get 0 (1 for ``"prod"``). Of several equal maxima the first entry of
        the row, that of the lowest source id, receives the gradient.

    Raises:
        ValueError: for operands that do not fit the graph or one another, or unknown reductions.
        BackendNotSupported: if no backend can run it.
    """
    text = formula if isinstance(formula, str) else str(formula)
    read, summed = _read(text)
    reduces = [reduce] if isinstance(reduce, str) else list(reduce)
    operands = list(operands)
    check_operands(graph, text, read, operands)
    if not reduces or not set(reduces) <= set(REDUCES):
        raise ValueError(f"expected reductions of {', '.join(REDUCES)} (got {reduces})")
    dtype = operands[0].dtype
    for t in operands[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    operands = [t.to(dtype) for t in operands]

    layout = find_layout(tuple(tuple(map(int, t.shape[1:])) for t in operands), keep_last=summed)
    folded = [layout.fold(t) for t in operands]
    outs = _launch(graph, text, read, folded, reduces, edge_order=edge_order)
    results = [layout.unfold_summed(t) if summed else layout.unfold(t) for t in outs]
    return results[0] if isinstance(reduce, str) else results


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read(text: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Return the (side, index) of every operand, and whether the message is a sum over the width.

    While torch.compile traces, this is evaluated and its result is a constant of the graph.
    """
    formula = parse(text)
    read = tuple(dict.fromkeys((o.side, o.index) for o in operands_of(formula)))
    return read, isinstance(formula, Sum)


def _launch(
    graph: Graph,
    text: str,
    read: tuple[tuple[str, int], ...],
    operands: list[Tensor],
    reduces: list[str],
    *,
    edge_order: bool,
) -> list[Tensor]:
    """Call the operator with folded operands, and the transpose if it will be needed."""
    needs = [torch.is_grad_enabled() and t.requires_grad for t in operands]
    csr = graph.csr(edge_order=edge_order)
    transposed: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[index] for side, index in read if side == "u"):
        transposed = graph.transposed(edge_order=edge_order)[:3]
    want_arg = any(needs) and bool({"max", "min"} & set(reduces))
    arrays = (*csr[:3], *transposed, csr.num_cols, csr.sorted)
    outs: list[Tensor] = call("gspmm", *arrays, operands, text, reduces, want_arg)
    return outs[: len(reduces)]


def check_operands(
    graph: Graph, text: str, read: tuple[tuple[str, int], ...], operands: list[Tensor]
) -> None:
    """Raise ValueError for operands that a formula does not read, or that do not fit the graph."""
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
    if len({index for _, index in read}) != len(read):
        raise ValueError(f"expected {text} to read each operand at one side (pass it twice)")
    if not operands or {index for _, index in read} != set(range(len(operands))):
        raise ValueError(f"expected {text} to use operands 0 to {len(operands) - 1}")
    for side, index in read:
        t, name = operands[index], f"operand {side}{index}"
        if not isinstance(t, Tensor):
            raise ValueError(f"expected {name} to be a tensor (got {type(t).__name__})")
        if t.dim() == 0 or t.size(0) != rows[side]:
            raise ValueError(
                f"expected {name} to have {rows[side]} rows (got shape {list(t.shape)})"
            )
        if t.device != graph.device:
            raise ValueError(f"expected {name} on {graph.device} (got {t.device})")
        if not t.is_floating_point():
            raise ValueError(f"expected {name} to be floating-point features (got {t.dtype})")
    if torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        raise NotImplementedError("pyg_accel operators have no forward-mode derivatives")


def _gspmm(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    rowptr_t: Tensor | None,
    col_t: Tensor | None,
    eid_t: Tensor | None,
    num_cols: int,
    sorted: bool,
    operands: list[Tensor],
    formula: str,
    reduces: list[str],
    want_arg: bool,
) -> list[Tensor]:
    csr = CSR(rowptr, col, eid, num_cols, sorted)
    message = parse(formula)
    heads, width = 1, 1
    for h, f in shapes_of(operands):
        heads, width = max(heads, h), max(width, f)
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    spec = OpSpec("gspmm", rowptr.device.type, dtype, rowptr.dtype, csr.num_rows, num_cols,
                  col.numel(), heads, width, formula, tuple(reduces))  # fmt: skip
    backend = choose(spec).backend
    return backend.gspmm(csr, message, operands, reduces, want_arg=want_arg)


def _gspmm_fake(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    rowptr_t: Tensor | None,
    col_t: Tensor | None,
    eid_t: Tensor | None,
    num_cols: int,
    sorted: bool,
    operands: list[Tensor],
    formula: str,
    reduces: list[str],
    want_arg: bool,
) -> list[Tensor]:
    heads, width = shape_of(parse(formula), dict(enumerate(shapes_of(operands))))
    like = next(t for t in operands if t.is_floating_point())
    rows, edges = rowptr.size(0) - 1, col.size(0)
    outs = [like.new_empty(edges if reduce == "none" else rows, heads, width) for reduce in reduces]
    if want_arg:
        outs += [rowptr.new_empty(rows, heads, width) for r in reduces if r in ("max", "min")]
    return outs


define(
    "gspmm(Tensor rowptr, Tensor col, Tensor? eid, Tensor? rowptr_t, Tensor? col_t, Tensor? eid_t, "
    "SymInt num_cols, bool sorted, Tensor[] operands, str formula, str[] reduces, bool want_arg) "
    "-> Tensor[]",
    _gspmm,
    _gspmm_fake,
    backward,
    setup_context,
)
