"""Views and slices of lazy tensors, applied to their operands."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Operand
from pyg_accel.patching.attention import Weights
from pyg_accel.patching.lazy import LazyTensor, PostReduce, Tracer, first_operand, is_single_side
from pyg_accel.patching.networks import has_network
from pyg_accel.patching.rules.common import (
    Args,
    Declined,
    Kwargs,
    hoist,
    map_operands_of,
    need_formula,
    rule,
    share,
    with_formula,
)
from pyg_accel.patching.rules.concatenation import concatenate
from pyg_accel.patching.rules.rowwise import leaves_edges_alone
from pyg_accel.record.edge_tensors import DeferredOperand, materialize, name_of, plain_shape
from pyg_accel.record.recorder import quiet
from pyg_accel.runtime.state import running


@rule("clone", "contiguous", "alias")
def _identity(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    result = with_formula(need_formula(args[0], later=True), args[0].formula)
    return result if name_of(func) == "clone" else share(args[0], result)


@rule("detach")
def _detach(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = need_formula(args[0])
    if has_network(lazy):
        raise Declined
    return share(lazy, map_operands_of(lazy, lambda t: materialize(t).detach(), plain_shape(lazy)))


@rule("to", "type_as", "float", "double", "half", "bfloat16")
def _convert(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = need_formula(args[0], summed=True)
    like = torch.empty((), dtype=lazy.dtype, device=lazy.device)
    with torch._C.DisableTorchFunctionSubclass():  # it may take a message
        result = func(like, *args[1:], **kwargs)
    if result.dtype != like.dtype or result.device != like.device:
        return hoist(func, lazy, args[1:], kwargs)
    return lazy


@rule("dropout")
def _dropout(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = need_formula(args[0])
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    if training and p > 0:
        if is_single_side(lazy) and isinstance(first_operand(lazy), Weights):
            return hoist(func, lazy, args[1:], kwargs)
        raise Declined
    return lazy


@rule("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    lazy = need_formula(args[0], later=True)
    if lazy.edge_dim != 0 or any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise Declined
    old = tuple(lazy.shape)
    args = tuple(a.shape if isinstance(a, Tensor) else a for a in args[1:])
    name = {"view_as": "view", "reshape_as": "reshape"}.get(name_of(func), name_of(func))
    new = getattr(torch.empty(old, device="meta"), name)(*args, **kwargs).shape
    if len(new) == 0 or new[0] != old[0]:
        raise Declined
    try:
        result = map_operands_of(
            need_formula(lazy), lambda t: _reshape_rows(t, old[1:], tuple(new[1:])), new
        )
    except Declined:  # merged dimensions broadcast: reshape after the reduction
        later = lazy.later.then(PostReduce(lambda t: t.reshape(t.size(0), *new[1:])))
        result = LazyTensor(lazy.tracer, lazy.formula, new, 0, lazy.dtype, None, later)
    return share(lazy, result)


def _reshape_rows(operand: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """Reshape an operand [rows, ...] as its message, from one trailing shape to another."""
    sizes = (1,) * (len(old) - operand.dim() + 1) + tuple(operand.shape[1:])
    rows = operand.size(0)
    if sizes == old:
        return _reshaped(operand, rows, *new)
    if all(n == 1 for n in sizes):
        return _reshaped(operand, rows, *(1,) * len(new))
    # Broadcast in some dimensions: only dimensions of size 1 may be added or removed.
    if [n for n in old if n != 1] != [n for n in new if n != 1]:
        raise Declined
    remaining = iter(mine for mine, full in zip(sizes, old, strict=True) if full != 1)
    return _reshaped(operand, rows, *(next(remaining) if n != 1 else 1 for n in new))


def _reshaped(operand: Tensor, *shape: int) -> Tensor:
    if isinstance(operand, DeferredOperand):
        result: Tensor = operand.hoisted(torch.Tensor.reshape, shape, {})
        return result
    if 0 not in shape:  # for any number of rows in later calls
        shape = (-1, *shape[1:])
    traced: Tensor = running.traces[-1].apply(torch.Tensor.reshape, operand, *shape)
    return traced


@rule("__getitem__", "narrow", "select", "chunk", "split", "tensor_split")
def _pick(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Pick a part of each piece of a concatenation."""
    lazy = args[0]
    if not isinstance(lazy, LazyTensor) or not leaves_edges_alone(name_of(func), args, kwargs):
        raise Declined
    if lazy.parts is None:
        raise Declined
    return concatenate(
        [_pick_part(lazy.tracer, func, part, args[1:], kwargs) for part in lazy.parts]
    )


@rule("gather")
def _pick_one_each(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Pick one feature for every edge: [E, 1]."""
    if len(args) != 3 or kwargs or not isinstance(args[0], LazyTensor):
        raise Declined
    lazy, dim, index = need_formula(args[0]), args[1], args[2]
    shape = plain_shape(lazy)
    if not is_single_side(lazy) or lazy.edge_dim != 0 or len(shape) != 2 or dim not in (1, -1):
        raise Declined
    operand = lazy.formula
    assert isinstance(operand, Operand)
    trace = lazy.tracer
    if operand.side == "e" or trace.repeated[operand.index] or index.shape != (shape[0], 1):
        raise Declined
    with quiet():
        flat = first_operand(lazy).reshape(-1)
        places = trace.edge_index[trace.end_of(operand.side)].long() * shape[1] + index[:, 0]
        return flat.index_select(0, places).unsqueeze(1)


def _pick_part(
    trace: Tracer, func: Callable[..., Any], part: Tensor, args: Args, kwargs: Kwargs
) -> Tensor:
    index = args[0] if name_of(func) == "__getitem__" and args else None
    taken = index if isinstance(index, tuple) else (index,)
    if index is None or Ellipsis in taken or len(taken) >= part.dim():
        raise Declined  # it might reach into the concatenated dimension
    if isinstance(part, LazyTensor):
        result: Tensor = hoist(func, part, args, kwargs)
        return result
    picked: Tensor = trace.apply(func, part, *args, **kwargs)
    return picked
