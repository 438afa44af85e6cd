"""Message formula plus reduction: the operator of every aggregation.

``pyg_accel::gspmm`` takes plain tensors, so that torch.compile, autograd and other transforms see
an ordinary operator; :func:`gspmm` is the public function. Its gradient is itself with another
formula: for a source operand on the transposed graph, for a target operand on the same graph, for
an edge operand without a reduction. So it can be differentiated any number of times.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.spec import shapes_of
from pyg_accel.formula import Formula, has_sum, is_summed, operands_of, parse, shape_of
from pyg_accel.graph import Graph, check_graph
from pyg_accel.ops.arrays import ARRAYS, Arrays, csr_and_arguments
from pyg_accel.ops.by_edge import plan_by_edge
from pyg_accel.ops.launch import run_gspmm
from pyg_accel.ops.layout import find_layout
from pyg_accel.ops.operator import Recorded, call, define
from pyg_accel.ops.plan import run
from pyg_accel.ops.reduction import REDUCES, plan_of, reduction_on
from pyg_accel.ops.reduction_by_edge import edge_plan_of

__all__ = ["REDUCES", "check_operands", "gspmm"]


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
    tensor is allocated unless ``reduce="none"``.

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
            that the graph was built from; by default in CSR order.

    Returns:
        [num_rows, ...] ([E, ...] for ``"none"``), or a list of them for a list of reductions.
        Targets without edges get 0 (1 for ``"prod"``). Of several equal maxima, the one with the
        lowest source id receives the gradient.

    Raises:
        ValueError: for operands that do not fit the graph or one another, or unknown reductions.
        BackendNotSupported: if no backend can run it.
    """
    text = formula if isinstance(formula, str) else str(formula)
    if isinstance(operands, (list, tuple)) and isinstance(reduce, (str, tuple, list)):
        reduces = (reduce,) if isinstance(reduce, str) else tuple(reduce)
        kind = (text, reduces, edge_order, isinstance(reduce, str))
        outs = run(graph, plan_of, kind, operands, _by_edge)
        if outs is not None:
            return outs
    return _dispatched(graph, text, operands, reduce, edge_order)


_by_edge = functools.partial(plan_by_edge, make=edge_plan_of)


def _dispatched(graph: Graph, text: str, operands: Any, reduce: Any, edge_order: bool) -> Any:
    """Check a call, and run it through torch's dispatcher."""
    check_graph(graph)
    if not isinstance(reduce, (str, tuple, list)):
        raise ValueError(f"expected 'reduce' of {', '.join(REDUCES)} (got {reduce!r})")
    reduces = (reduce,) if isinstance(reduce, str) else tuple(reduce)
    if not isinstance(operands, (list, tuple)):
        raise ValueError(f"expected 'operands' to be a list (got {type(operands).__name__})")
    for index, t in enumerate(operands):
        if not isinstance(t, Tensor):
            raise ValueError(f"expected operand {index} to be a tensor (got {type(t).__name__})")
        if t.layout != torch.strided:
            raise ValueError(f"expected operand {index} to be strided (got {t.layout})")
    read, sums, summed = _read(text)
    dtype = check_operands(graph, text, read, operands)
    if not reduces or not set(reduces) <= set(REDUCES):
        raise ValueError(f"expected reductions of {', '.join(REDUCES)} (got {list(reduces)})")
    trailings = tuple([tuple(map(int, t.shape[1:])) for t in operands])
    layout = find_layout(trailings, keep_last=sums)
    folded = [layout.fold(t.to(dtype)) for t in operands]
    needs = [torch.is_grad_enabled() and t.requires_grad for t in folded]
    turns = any(needs[index] for side, index in read if side == "u")
    arrays = Arrays.of(graph, edge_order=edge_order, transposed=turns)
    want_arg = any(needs) and bool({"max", "min"} & set(reduces))
    outs: list[Tensor] = call("gspmm", *arrays, folded, text, list(reduces), want_arg)
    unfold = layout.unfold_summed if summed else layout.unfold
    results = [unfold(t) for t in outs[: len(reduces)]]
    return results[0] if isinstance(reduce, str) else results


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _read(text: str) -> tuple[tuple[tuple[str, int], ...], bool, bool]:
    """Return the (side, index) of every operand, whether it sums over the width, and nothing else.

    torch.compile evaluates it while it traces: the result is a constant of the graph.
    """
    formula = parse(text)
    read = tuple(dict.fromkeys((o.side, o.index) for o in operands_of(formula)))
    return read, has_sum(formula), is_summed(formula)


def check_operands(
    graph: Graph, text: str, read: tuple[tuple[str, int], ...], operands: Sequence[Tensor]
) -> torch.dtype:
    """Raise ValueError for operands that a formula does not read, or that do not fit the graph.

    Args:
        graph: the graph.
        text: the formula, for error messages.
        read: (side, index) of every operand.
        operands: of the formula.

    Returns:
        The dtype to which all are promoted.
    """
    rows = {"v": graph.num_rows, "u": graph.num_cols, "e": graph.num_edges}
    if len({index for _, index in read}) != len(read):
        raise ValueError(f"expected {text} to read each operand at one side (pass it twice)")
    if not operands or {index for _, index in read} != set(range(len(operands))):
        raise ValueError(f"expected {text} to use operands 0 to {len(operands) - 1}")
    for side, index in read:
        t, name = operands[index], f"operand {side}{index}"
        if t.dim() == 0 or t.size(0) != rows[side]:
            got = list(t.shape)
            raise ValueError(f"expected {name} to have {rows[side]} rows (got shape {got})")
        if t.device != graph.device:
            raise ValueError(f"expected {name} on {graph.device} (got {t.device})")
        if not t.is_floating_point():
            raise ValueError(f"expected {name} to be floating-point features (got {t.dtype})")
    return functools.reduce(torch.promote_types, [t.dtype for t in operands])


def _gspmm(*args: Any) -> list[Tensor]:
    csr, (operands, formula, reduces, want_arg) = csr_and_arguments(args)
    return run_gspmm(csr, (formula,), reduces, operands, want_arg=want_arg)


def _gspmm_fake(*args: Any) -> list[Tensor]:
    csr, (operands, formula, reduces, want_arg) = csr_and_arguments(args)
    heads, width = shape_of(parse(formula), dict(enumerate(shapes_of(operands))))
    like = next(t for t in operands if t.is_floating_point())
    rows, edges = csr.num_rows, csr.col.size(0)
    outs = [like.new_empty(edges if reduce == "none" else rows, heads, width) for reduce in reduces]
    if want_arg:
        outs += [csr.rowptr.new_empty(rows, heads, width) for r in reduces if r in ("max", "min")]
    return outs


def _record(*args: Any) -> Recorded:
    arrays, (operands, text, reduces, _) = Arrays.split(args)
    needs = tuple([t.requires_grad for t in operands])
    rule = reduction_on(text, tuple(reduces), needs, shapes_of(operands))
    return Recorded(rule, rule.keeps, arrays, len(reduces))


define(
    f"gspmm({ARRAYS}, Tensor[] operands, str formula, str[] reduces, bool want_arg) -> Tensor[]",
    _gspmm,
    _gspmm_fake,
    _record,
)
