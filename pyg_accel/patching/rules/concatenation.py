"""Concatenations and their linear layers; stacks; sums over features."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Binary, Const, Operand, Sum, map_operands, operands_of
from pyg_accel.ops.layout import Layout
from pyg_accel.patching.lazy import IDENTITY, LazyTensor, PostReduce, Tracer, is_single_side
from pyg_accel.patching.networks import has_network, reasons_against
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.rules.common import (
    MAX_MATERIALIZED_WIDTH,
    Args,
    Declined,
    Kwargs,
    hoist,
    map_operands_of,
    need_formula,
    rule,
)
from pyg_accel.patching.rules.rowwise import product, record
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, plain_shape

# Of what a linear layer makes of features of edges: so much of it waits for its block.
FEWEST_BYTES = 64 << 20
# Most outputs of a linear layer for which dot products along edges beat matrix products in blocks.
FEW_DOTS = 4


@rule("linear")
def _linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    lazy, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    if not isinstance(lazy, LazyTensor) or lazy.edge_dim != 0:
        raise Declined
    _check_linear(lazy, weight, bias)
    if lazy.parts is None and not is_single_side(lazy):
        try:
            return _narrow_linear(need_formula(lazy), weight, bias)
        except Declined:
            if weight.size(0) <= MAX_MATERIALIZED_WIDTH:
                raise
        return record(func, (lazy, weight, bias), {})
    if lazy.parts is None:
        return hoist(func, need_formula(lazy), (weight, bias), {})
    return _linear_of_parts(func, lazy, lazy.parts, weight, bias)


def _linear_of_parts(
    func: Callable[..., Any],
    lazy: LazyTensor,
    parts: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    """A linear layer of a concatenation: a sum of linear layers, each on its own nodes.

    A difference of two other parts uses their layers too, as it loses no more digits than these.
    Any other difference is computed first: it may be small.
    """
    trace, start = lazy.tracer, 0
    trace.linear_bytes += weight.size(0) * weight.element_size()
    columns: list[Tensor] = []
    for part in parts:
        stop = start + plain_shape(part)[-1]
        columns.append(trace.apply(Tensor.__getitem__, weight, (slice(None), slice(start, stop))))
        start = stop
    single_sided = {part.formula for part in map(_of_one_side, parts) if part is not None}
    terms: dict[Any, tuple[LazyTensor, Tensor]] = {}  # by operand: its lazy tensor and its columns
    others: list[tuple[Any, Tensor]] = []

    def add(part: LazyTensor, mine: Tensor) -> None:
        before = terms.get(part.formula)
        mine = mine if before is None else trace.apply(torch.add, before[1], mine)
        terms[part.formula] = part, mine

    for part, mine in zip(parts, columns, strict=True):
        ends = _difference(part)
        one = _of_one_side(part)
        if one is not None:
            add(one, mine)
        elif ends is not None and not single_sided.isdisjoint(end.formula for end in ends):
            add(ends[0], mine)
            add(ends[1], trace.apply(torch.neg, mine))
        else:
            others.append((part, mine))
    total: Any = None
    trace.linear_terms += len(terms) + len(others) - 1
    for part, mine in [*terms.values(), *others]:
        term = _linear_of_part(func, trace, part, mine, bias)
        bias = None
        total = term if total is None else total + term
    return total


def _linear_of_part(
    func: Callable[..., Any], trace: Tracer, part: Any, columns: Tensor, bias: Tensor | None
) -> Any:
    if not isinstance(part, LazyTensor):
        part = trace.unchanged(part)
        numbers = part.shape[:-1].numel() * columns.size(0)
        if numbers * columns.itemsize < FEWEST_BYTES or reasons_against(trace):
            return trace.apply(func, part, columns, bias)
        part = trace.leaf("e", part, part.shape, 0)
        return record(func, (part, columns, bias), {})
    if is_single_side(part):
        return hoist(func, part, (columns, bias), {})
    return record(func, (part, columns, bias), {})


def _of_one_side(part: Tensor) -> LazyTensor | None:
    """Return a part if it is a single operand, on which a linear layer can run."""
    return part if isinstance(part, LazyTensor) and is_single_side(part) else None


def _difference(part: Any) -> tuple[LazyTensor, LazyTensor] | None:
    """The operands of a part that is a difference of two operands of its shape."""
    if not isinstance(part, LazyTensor) or not isinstance(part.formula, Binary):
        return None
    trace, shape, ends = part.tracer, plain_shape(part), []
    for end in (part.formula.left, part.formula.right):
        if not isinstance(end, Operand) or trace.repeated[end.index]:
            return None
        operand = trace.operands[end.index]
        if operand.shape[1:] != shape[1:] or isinstance(operand, DeferredOperand):
            return None
        ends.append(trace.leaf(end.side, operand, shape, 0))
    return (ends[0], ends[1]) if part.formula.op == "sub" else None


def _check_linear(lazy: LazyTensor, weight: Any, bias: Any) -> None:
    """Decline invalid weights, so that PyG's path raises its own error."""
    tensors = [weight] if bias is None else [weight, bias]
    if any(not isinstance(t, Tensor) or isinstance(t, LazyTensor) for t in tensors):
        raise Declined
    shape = plain_shape(lazy)
    if weight.dim() != 2 or len(shape) < 2 or (bias is not None and bias.dim() > 1):
        raise Declined
    if weight.size(1) != shape[-1]:
        raise Unrecognised(
            f"a weight of {list(weight.shape)} for features of {shape[-1]}", permanent=False
        )


@rule("matmul", "__matmul__", "mm")
def _matmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 2 and not kwargs and len(plain_shape(args[1])) == 3:
        return product(*args)
    if len(args) != 2 or kwargs or isinstance(args[1], LazyTensor) or args[1].dim() != 2:
        raise Declined
    return _linear(torch.nn.functional.linear, (args[0], args[1].mT), {})


def _narrow_linear(lazy: LazyTensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A few dot products per edge, without materialised messages.

    Moving the layer to the nodes, term by term, would be faster, but lose digits of messages that
    are small differences.
    """
    most = MAX_MATERIALIZED_WIDTH if reasons_against(lazy.tracer) else FEW_DOTS
    if has_network(lazy) or weight.size(0) > most:
        raise Declined
    alike = weight.dtype == lazy.dtype and not torch.is_autocast_enabled(lazy.device.type)
    if lazy.dim() != 2 or lazy.size(1) <= MAX_MATERIALIZED_WIDTH or not alike:
        raise Declined
    trace = lazy.tracer
    shape = torch.Size((trace.num_edges, *weight.shape))
    columns = trace.leaf("v", weight.unsqueeze(0), shape, 0, repeated=True)
    messages = map_operands_of(lazy, lambda t: t.unsqueeze(1), shape)
    formula = Binary("mul", messages.formula, columns.formula)
    out = trace.dot(LazyTensor(trace, formula, shape, 0, columns.dtype))
    return out if bias is None else out + bias


@rule("cat", "concat", "concatenate")
def _concatenate(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    lead = next(t for t in tensors if isinstance(t, LazyTensor))
    rank = len(plain_shape(lead))
    if dim not in (-1, rank - 1) or rank < 2 or lead.edge_dim != 0:
        raise Declined
    return concatenate(tensors)


_AUTOCAST = {torch.float32, torch.float16, torch.bfloat16}


def concatenate(tensors: list[Any]) -> LazyTensor:
    """Return a concatenation of features, deferred until its linear layer."""
    lead = next(t for t in tensors if isinstance(t, LazyTensor))
    parts: list[Tensor] = []
    for t in tensors:
        parts += t.parts if isinstance(t, LazyTensor) and t.parts is not None else [t]
    joined = any(isinstance(t, LazyTensor) and not is_single_side(t) for t in parts)
    if joined and (
        reasons_against(lead.tracer)
        or any(t.later is not IDENTITY or t.summed for t in parts if isinstance(t, LazyTensor))
    ):
        raise Declined
    if any(t.shape[:-1] != lead.shape[:-1] for t in parts):
        raise Unrecognised("a concatenation of shapes that do not fit", permanent=False)
    dtypes = {t.dtype for t in parts}
    cast = torch.is_autocast_enabled(lead.device.type) and dtypes <= _AUTOCAST
    if len(dtypes) > 1 and not cast:  # the result would have the widest dtype
        raise Declined
    shape = [*lead.shape[:-1], sum(t.shape[-1] for t in parts)]
    dtype = reduce(torch.promote_types, dtypes)
    return LazyTensor(lead.tracer, Const(0.0), shape, 0, dtype, tuple(parts))


@rule("stack")
def _stack(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Stack messages of one formula by stacking their operands."""
    tensors = [need_formula(t) for t in args[0]]
    if any(map(has_network, tensors)):
        raise Declined
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    lead = tensors[0]
    shape = plain_shape(lead)
    full_rank = len(shape) + 1
    if not -full_rank < dim < full_rank or dim == 0 or any(t.edge_dim != 0 for t in tensors):
        raise Declined
    trace = lead.tracer
    lists = [list(operands_of(t.formula)) for t in tensors]
    patterns = {str(map_operands(t.formula, lambda o: Operand(o.side, 0))) for t in tensors}
    if len(patterns) > 1 or any(plain_shape(t) != shape for t in tensors):
        raise Declined
    numbers = []
    for group in zip(*lists, strict=True):
        operands = [trace.operands[o.index] for o in group]
        if any(t.shape[1:] != shape[1:] for t in operands) or any(
            trace.repeated[o.index] for o in group
        ):
            raise Declined
        operand = trace.apply(torch.stack, operands, dim)
        numbers.append(trace.add_operand(group[0].side, operand))
    place = iter(numbers)
    formula = map_operands(lead.formula, lambda o: Operand(o.side, next(place)))
    full = [*shape]
    full.insert(dim % full_rank, len(tensors))
    return LazyTensor(trace, formula, full, 0, lead.dtype)


@rule("sum")
def _sum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A sum over features: on the nodes, a dot product along the edges, or after the reduction."""
    lazy = need_formula(args[0])
    if has_network(lazy):
        raise Declined
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    rank = len(plain_shape(lazy))
    place = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(place, int) or set(kwargs) - {"dim", "keepdim"}:
        raise Declined
    if not -rank < place < rank or place == 0:
        raise Declined
    if lazy.edge_dim != 0:
        raise Declined
    if place % rank == rank - 1 and (keepdim or rank > 3):
        out = lazy.tracer.dot(lazy)
        return out.unsqueeze(-1) if keepdim else out
    if place % rank == rank - 1:  # scores: they wait for what comes after
        shape = plain_shape(lazy)
        layout = Layout(tuple(shape[1:]), rank - 2)
        folded = map_operands_of(lazy, lambda t: layout.fold(materialize(t)), shape)
        formula = Sum(folded.formula)
        return LazyTensor(lazy.tracer, formula, shape[:-1], 0, lazy.dtype, summed=True)
    place %= rank
    shape = lazy.shape[:place] + (1,) * keepdim + lazy.shape[place + 1 :]
    later = PostReduce(lambda t: t.sum(place, keepdim=keepdim), ("sum", "mean"))
    return LazyTensor(lazy.tracer, lazy.formula, shape, 0, lazy.dtype, None, later)
