"""The registry of rules, and common functions that move work from edges to nodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Formula, Operand, map_operands
from pyg_accel.ops.csr import IdleRows, idle_rows_of
from pyg_accel.patching.lazy import IDENTITY, LazyTensor, first_operand, is_single_side
from pyg_accel.record.edge_tensors import DeferredOperand, name_of, plain_shape
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.state import running

__all__ = [
    "MAX_MATERIALIZED_WIDTH",
    "RULES",
    "Args",
    "Declined",
    "Kwargs",
    "Rule",
    "hoist",
    "map_operands_of",
    "need_formula",
    "rule",
    "share",
    "with_formula",
    "without_idle_rows",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]

RULES: dict[str, Rule] = {}

# Functions with a constant derivative.
_FLAT = frozenset({
    "relu", "leaky_relu", "neg", "abs", "__neg__", "__abs__", "sum", "mean", "view", "reshape",
    "unsqueeze", "squeeze", "expand", "__getitem__", "select", "narrow", "chunk", "split",
    "unbind", "flatten", "unflatten", "transpose", "t", "permute", "movedim", "clone",
    "contiguous", "detach", "to", "float", "double", "half", "bfloat16", "type", "type_as",
})  # fmt: skip

# Largest materialised elements per edge: attention scores of that many heads.
MAX_MATERIALIZED_WIDTH = 16


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions by name, in any module."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class Declined(Exception):
    """A rule does not cover these arguments."""


def hoist(func: Callable[..., Any], lazy: LazyTensor, args: Args, kwargs: Kwargs) -> Any:
    """Apply a row-wise function to the operand of a lazy tensor instead of to the edges.

    The operand has its rows where the lazy tensor has its edges (dimension 0), so the arguments
    keep their meaning.
    """
    if not is_single_side(lazy) or lazy.edge_dim != 0:
        raise Declined
    trace = lazy.tracer
    if name_of(func) not in _FLAT and trace.records_gradients:
        read = [first_operand(lazy), *args, *kwargs.values()]
        tensors = [t for t in read if isinstance(t, Tensor)]
        waits = any(isinstance(t, DeferredOperand) for t in tensors)  # or it would be computed
        if not waits and any(t.requires_grad for t in tensors):
            lazy = without_idle_rows(lazy)
    operand = lazy.formula
    assert isinstance(operand, Operand)
    features = trace.operands[operand.index]
    if isinstance(features, DeferredOperand):
        result = features.hoisted(func, args, kwargs)
    else:
        if name_of(func) not in _FLAT:
            features = trace.protected(features)
        result = trace.apply(func, features, *args, **kwargs)

    def wrap(value: Tensor) -> LazyTensor:
        shape = [trace.num_edges, *value.shape[1:]]
        repeated = trace.repeated[operand.index]
        return trace.leaf(operand.side, value, shape, 0, repeated=repeated)

    return type(result)(map(wrap, result)) if isinstance(result, (list, tuple)) else wrap(result)


def without_idle_rows(lazy: LazyTensor) -> LazyTensor:
    """Put ones in the rows that no edge reads: features there may be infinite, or NaN.

    The gradients of these rows are 0, but not times an infinite derivative.
    """
    trace, features, operand = lazy.tracer, first_operand(lazy), lazy.formula
    assert isinstance(operand, Operand)
    # Dense products by optimize() read all rows anyway.
    if isinstance(features, DeferredOperand) or running.unconditional:
        return lazy
    if operand.side == "e" or trace.repeated[operand.index]:  # all rows are read
        return lazy
    row = trace.end_of(operand.side)
    idle = perform(idle_rows_of, trace.edge_index, row, features.size(0), borrows=True)
    return trace.leaf(operand.side, perform(_with_ones, features, idle), plain_shape(lazy), 0)


def _with_ones(features: Tensor, idle: IdleRows) -> Tensor:
    if idle.mask is None:
        return features.view_as(features)
    return features.masked_fill(idle.mask.view(-1, *(1,) * (features.dim() - 1)), 1.0)


def with_formula(lazy: LazyTensor, formula: Formula) -> LazyTensor:
    """Return a lazy tensor of the same shape with another formula."""
    return LazyTensor(
        lazy.tracer, formula, lazy.shape, lazy.edge_dim, lazy.dtype, None, lazy.later,
        lazy.summed,
    )  # fmt: skip


def share(source: LazyTensor, result: Any) -> Any:
    """Note that a lazy tensor is a view of another one."""
    for value in result if isinstance(result, (list, tuple)) else (result,):
        source.shared = value.shared = True
    return result


def need_formula(lazy: Any, *, later: bool = False, summed: bool = False) -> LazyTensor:
    """Return the argument if it is a lazy tensor of floating-point features; otherwise decline.

    ``later`` admits tensors with a function after the reduction, ``summed`` formulas with a sum
    over the width.
    """
    if not isinstance(lazy, LazyTensor) or lazy.parts is not None:
        raise Declined
    if not summed and lazy.summed:
        raise Declined
    if not later and lazy.later is not IDENTITY:
        raise Declined
    if not lazy.dtype.is_floating_point:
        raise Declined
    return lazy


def map_operands_of(
    lazy: LazyTensor, change: Callable[[Tensor], Tensor], shape: torch.Size
) -> LazyTensor:
    """Return a lazy tensor of the same formula over changed operands."""
    trace = lazy.tracer

    def replace(operand: Operand) -> Formula:
        number = trace.add_operand(
            operand.side,
            change(trace.operands[operand.index]),
            repeated=trace.repeated[operand.index],
        )
        return Operand(operand.side, number)

    with torch._C.DisableTorchFunctionSubclass():
        formula = map_operands(lazy.formula, replace)
        return LazyTensor(trace, formula, shape, lazy.edge_dim, lazy.dtype)
