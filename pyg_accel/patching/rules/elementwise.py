"""Elementwise functions, in the formula or on the nodes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Binary, Const, Formula, Operand, Unary
from pyg_accel.formula.functions import FUNCTIONS, PARAMETRIC, UNARY
from pyg_accel.ops.layout import Layout, broadcast
from pyg_accel.patching.lazy import LazyTensor, Tracer, first_operand, is_single_side
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.rules.common import (
    RULES,
    Args,
    Declined,
    Kwargs,
    Rule,
    map_operands_of,
    need_formula,
    rule,
    with_formula,
    without_idle_rows,
)
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, plain_shape


def assign(target: LazyTensor, result: Any) -> LazyTensor:
    """Assign the result of an in-place function to its tensor."""
    if target.shared or not isinstance(result, LazyTensor):
        raise Unrecognised("an in-place change of an edge tensor that has views")
    if plain_shape(result) != plain_shape(target):
        raise Unrecognised("an in-place change of the shape of an edge tensor")
    if result.dtype != target.dtype:
        raise Unrecognised("an in-place change by a tensor of another dtype")
    target.formula, target.parts, target.summed = result.formula, result.parts, result.summed
    return target


def _unary(build: Callable[..., Formula]) -> Rule:
    """A function of one argument and numbers, in the formula."""

    def apply_rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        lazy = need_formula(args[0], summed=True)
        if any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
            raise Declined
        kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}
        if not all(_is_finite(value) for value in (*args[1:], *kwargs.values())):
            raise Declined
        try:
            return with_formula(lazy, build(lazy.formula, *args[1:], **kwargs))
        except TypeError:
            raise Declined from None

    return apply_rule


def _is_finite(value: Any) -> bool:
    """Whether formulas can express a number; True for None and other values."""
    return not isinstance(value, float) or math.isfinite(value)


def _leaky_relu(x: Formula, negative_slope: float = 0.01) -> Formula:
    return Unary("leaky_relu", x, float(negative_slope))


def _softplus(x: Formula, beta: float = 1.0, threshold: float = 20.0) -> Formula:
    if beta != 1 or threshold != 20:
        raise Declined
    return Unary("softplus", x)


def _pow(x: Formula, exponent: float) -> Formula:
    return Binary("mul", x, x) if exponent == 2 else Unary("pow", x, float(exponent))


def _gelu(x: Formula, approximate: str = "none") -> Formula:
    if approximate != "none":
        raise Declined
    return Unary("gelu", x)


for _op in set(UNARY) - {*PARAMETRIC, "step", "iszero", "nonzero"}:
    RULES[_op] = _unary(lambda x, op=_op: Unary(op, x))
RULES["__neg__"], RULES["__abs__"] = RULES["neg"], RULES["abs"]
RULES["gelu"] = _unary(_gelu)
RULES["leaky_relu"] = _unary(_leaky_relu)
RULES["softplus"] = _unary(_softplus)
RULES["square"] = _unary(lambda x: Binary("mul", x, x))
RULES["reciprocal"] = _unary(lambda x: Binary("div", Const(1.0), x))
RULES["rsqrt"] = _unary(lambda x: Binary("div", Const(1.0), Unary("sqrt", x)))
RULES["pow"] = RULES["__pow__"] = _unary(_pow)
# None for elu and clamp: exp(x) - 1 loses all digits for small x, and m + relu(x - m) for large m;
# the gradient of relu at 0 is 0, but the gradient of clamp(min=0) is 1.


def _binary(op: str, *, swap: bool = False) -> Rule:
    def apply_rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        if kwargs or len(args) != 2:
            raise Declined
        left, right = (args[1], args[0]) if swap else args
        return _combine(op, left, right)

    return apply_rule


for _op, _names in {
    "add": ("add", "__add__", "__iadd__"),
    "sub": ("sub", "subtract", "__sub__", "__isub__"),
    "mul": ("mul", "multiply", "__mul__", "__imul__"),
    "div": ("div", "divide", "true_divide", "__truediv__", "__itruediv__"),
    "maximum": ("maximum",),
    "minimum": ("minimum",),
}.items():
    for _each in _names:
        RULES[_each] = _binary(_op)
for _op, _each in (("add", "__radd__"), ("sub", "__rsub__"), ("sub", "rsub"), ("mul", "__rmul__"),
                   ("div", "__rdiv__"), ("div", "__rtruediv__")):  # fmt: skip
    RULES[_each] = _binary(_op, swap=True)


@rule("where")
def _where(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Select between messages by a condition that is not a message."""
    condition = args[0]
    if len(args) != 3 or kwargs or isinstance(condition, LazyTensor):
        raise Declined
    if condition.dtype is not torch.bool:
        raise Declined
    lead = need_formula(args[1] if isinstance(args[1], LazyTensor) else args[2], summed=True)
    dtype = lead.dtype
    sides: list[Tensor] = []
    for chosen, value in ((condition, args[1]), (~condition, args[2])):
        if isinstance(value, LazyTensor):
            sides.append(_combine("keep", value, chosen.to(dtype)))
            continue
        if isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex()):
            raise Declined
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=dtype, device=chosen.device)
        elif value.dim() == 0 or not value.is_floating_point():  # as torch promotes them
            value = value.to(dtype)
        sides.append(torch.where(chosen, value, 0.0))
    return _combine("add", *sides)


def _then_assign(inner: Rule) -> Rule:
    return lambda func, args, kwargs: assign(args[0], inner(func, args, kwargs))


for _each in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
    RULES[_each] = _then_assign(RULES[_each])


def _combine(op: str, left: Any, right: Any) -> LazyTensor:
    """Add an operation to the formula, or apply it on the nodes of a single side."""
    lead = need_formula(left if isinstance(left, LazyTensor) else right, summed=True)
    trace = lead.tracer
    if op in ("add", "sub"):  # their gradients save nothing
        left, right = (trace.unchanged(t) if type(t) is Tensor else t for t in (left, right))
    a, b = _as_lazy(trace, left, lead), _as_lazy(trace, right, lead)
    shapes = [plain_shape(t) for t in (a, b) if isinstance(t, LazyTensor)]
    try:
        shape = torch.Size(broadcast(*shapes))
    except RuntimeError:
        raise Unrecognised("shapes that do not broadcast", permanent=False) from None
    edge_dim = len(shape) - (len(plain_shape(lead)) - lead.edge_dim)
    hoisted = _combine_on_nodes(op, a, b, shape, edge_dim)
    if hoisted is not None:
        return hoisted
    summed = any(t.summed for t in (a, b) if isinstance(t, LazyTensor))
    if summed:
        a, b = (_beside_sums(t, shape) for t in (a, b))
    formula = Binary(op, _formula(a), _formula(b))
    dtypes = [t.dtype for t in (a, b) if isinstance(t, LazyTensor)]
    zero_dim = [t.dim() == 0 for t in (left, right) if isinstance(t, Tensor)]
    if len(dtypes) == 2 and any(zero_dim):  # a 0-dim tensor does not widen the result
        dtypes = [lead.dtype]
    dtype = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
    return LazyTensor(trace, formula, shape, edge_dim, dtype, summed=summed)


def _beside_sums(value: "LazyTensor | float", shape: torch.Size) -> "LazyTensor | float":
    """Reshape an argument like operands of sums: [rows, heads | 1, width | 1]."""
    if not isinstance(value, LazyTensor) or value.summed:
        return value
    if value.edge_dim != 0 or len(shape) > 2:
        raise Declined
    layout = Layout(tuple(shape[1:]), len(shape) - 1)
    return map_operands_of(value, lambda t: layout.fold(materialize(t)), plain_shape(value))


def _formula(value: "LazyTensor | float") -> Formula:
    if isinstance(value, LazyTensor):
        return value.formula
    if not _is_finite(value):
        raise Declined
    return Const(float(value))


def _as_lazy(trace: Tracer, value: Any, lead: LazyTensor) -> "LazyTensor | float":
    """Convert an argument for a formula: to a number, or a tensor of edges."""
    if isinstance(value, LazyTensor):
        lazy = need_formula(value, summed=True)
        if len(plain_shape(lazy)) - lazy.edge_dim != len(plain_shape(lead)) - lead.edge_dim:
            raise Unrecognised("edge dimensions that do not meet", permanent=False)
        return lazy
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if not isinstance(value, Tensor) or value.is_complex():
        raise Declined
    if not value.is_floating_point():  # as torch does: the features have the dtype of the result
        value = value.to(lead.dtype)
    from_right = len(plain_shape(lead)) - lead.edge_dim
    place = value.dim() - from_right
    if place >= 0 and value.size(place) == trace.num_edges:  # one row per edge
        return trace.leaf("e", value.movedim(place, 0) if place else value, value.shape, place)
    if place >= 0 and value.size(place) != 1:
        raise Unrecognised("shapes that do not broadcast", permanent=False)
    # The same for every edge: one row that all targets share.
    if place < 0:
        value = value.reshape((1,) * -place + tuple(value.shape))
    place = max(0, place)
    shape = [*value.shape]
    shape[place] = trace.num_edges
    rows_first = value.movedim(place, 0) if place else value
    return trace.leaf("v", rows_first, shape, place, repeated=True)


def _combine_on_nodes(
    op: str, a: "LazyTensor | float", b: "LazyTensor | float", shape: torch.Size, edge_dim: int
) -> LazyTensor | None:
    """Apply an operation on nodes if it has a single side (with numbers and shared rows)."""
    lazies = [t for t in (a, b) if isinstance(t, LazyTensor)]
    if edge_dim != 0 or not all(is_single_side(t) and t.edge_dim == 0 for t in lazies):
        return None
    if any(isinstance(first_operand(t), DeferredOperand) for t in lazies):
        return None
    trace = lazies[0].tracer
    operands = [t.formula for t in lazies if isinstance(t.formula, Operand)]
    sides = {o.side for o in operands if not trace.repeated[o.index]}
    if len(sides) > 1 or (sides == {"e"} and len(lazies) == 2):
        return None
    if op in ("mul", "div") and trace.records_gradients:  # a derivative reads the other argument
        learns = [isinstance(t, LazyTensor) and first_operand(t).requires_grad for t in (a, b)]
        a = without_idle_rows(a) if isinstance(a, LazyTensor) and learns[1] else a
        if isinstance(b, LazyTensor) and (learns[0] or (op == "div" and learns[1])):
            b = without_idle_rows(b)
        lazies = [t for t in (a, b) if isinstance(t, LazyTensor)]
        operands = [t.formula for t in lazies if isinstance(t.formula, Operand)]
    ranks = {trace.operands[o.index].dim() for o in operands}
    if len(ranks) > 1:
        return None
    left, right = (first_operand(t) if isinstance(t, LazyTensor) else t for t in (a, b))
    with torch._C.DisableTorchFunctionSubclass():
        result = FUNCTIONS[op].torch(left, right)
    side = sides.pop() if sides else "v"
    repeated = all(trace.repeated[o.index] for o in operands)
    return trace.leaf(side, result, [trace.num_edges, *result.shape[1:]], 0, repeated=repeated)
