"""Functions that work row by row, of which networks consist, and their recording.

Functions of several edges at once (statistics of a batch, a softmax over the edges), random numbers
and in-place functions are not among them.
"""

import dis
import operator
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.ops.edge_product import edge_product
from pyg_accel.patching.lazy import IDENTITY, LazyTensor, Tracer, first_operand, is_single_side
from pyg_accel.patching.networks import (
    Network,
    calls,
    leaf,
    node_of,
    reads,
    reasons_against,
    viewed,
)
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.rules.common import Args, Declined, Kwargs, hoist, share
from pyg_accel.record.edge_tensors import DeferredOperand, EdgeTensor, name_of, plain_shape

__all__ = ["defers", "lazies_in", "leaves_edges_alone", "makes_matrices", "on_nodes", "product",
           "record"]  # fmt: skip

# Number by number.
_EACH = frozenset({
    "__abs__", "abs", "acos", "asin", "atan", "bfloat16", "celu", "clamp", "clamp_max", "clamp_min",
    "clone", "contiguous", "cos", "cosh", "detach", "double", "elu", "erf", "exp", "exp2", "expm1",
    "float", "gelu", "half", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log", "log1p",
    "log2", "logsigmoid", "mish", "__neg__", "neg", "__pow__", "pow", "reciprocal", "relu", "relu6",
    "rsqrt", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softsign", "sqrt",
    "square", "tan", "tanh", "tanhshrink", "threshold",
})  # fmt: skip
# Along one dimension, with the position of `dim` among the arguments.
_ALONG = {"softmax": 1, "log_softmax": 1, "logsumexp": 1, "sum": 1, "mean": 1, "amax": 1,
          "amin": 1, "max": 1, "min": 1, "norm": 2, "normalize": 2, "cumsum": 1,
          "unbind": 1}  # fmt: skip
_EXTREMES = ("max", "min")  # along one dimension: values and indices
_PICKS = frozenset({"__getitem__", "narrow", "select", "chunk", "split", "tensor_split"})
# Results share memory with arguments.
_PARTS = _PICKS | {"unbind", "transpose", "swapaxes", "permute"}
# Rules for others do not depend on operands, or copy nothing.
_ON_NODES = _PARTS.union(_EACH, _ALONG) - {
    "clone", "contiguous", "detach", "bfloat16", "double", "float", "half",
}  # fmt: skip
_VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"})
_PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "einsum", "@"})


def record(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Defer a function that works row by row; decline others."""
    name = name_of(func)
    lead = next(iter(lazies_in(args)), None)
    if lead is None or not lead.tracer.runs_networks:
        raise Declined
    if any(lazy.later is not IDENTITY or lazy.summed for lazy in lazies_in(args)):
        raise Declined
    if lead.edge_dim != 0 or kwargs.get("inplace") or (name[-1] == "_" and name[-2:] != "__"):
        raise Declined
    if not _works_by_row(name, args, kwargs, lead):
        raise Declined
    trace = lead.tracer
    like = _like(func, args, kwargs)
    several = isinstance(like, (tuple, list))
    for place, t in enumerate(like if several else (like,)):
        if not isinstance(t, Tensor) or not t.dim() or t.size(0) != trace.num_edges:
            raise Declined
        if not t.is_floating_point() and not (name in _EXTREMES and place == 1):
            raise Declined
    if name in _VIEWS:
        if not like.shape[1:].numel():
            raise Declined
        step = calls(trace, torch.reshape, node_of(trace, lead), (-1, *like.shape[1:]))
    else:
        step = calls(trace, func, *(_nodes(trace, a) for a in args), **_nodes(trace, kwargs))
    if not several:
        return leaf(trace, step, like.shape, like.dtype)
    return type(like)(
        leaf(trace, calls(trace, operator.getitem, step, n), t.shape, t.dtype)
        for n, t in enumerate(like)
    )


def on_nodes(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Apply a function that works row by row to messages that are a single operand.

    Returns:
        None for other functions and messages.
    """
    name, lazy = name_of(func), args[0] if args else None
    if name not in _ON_NODES or kwargs.get("inplace") or not isinstance(lazy, LazyTensor):
        return None
    if (
        not is_single_side(lazy)
        or lazy.edge_dim != 0
        or not _works_by_row(name, args, kwargs, lazy)
    ):
        return None
    operand = first_operand(lazy)
    if name in _EACH:  # formulas may read deferred weights and products
        if isinstance(operand, DeferredOperand) and not isinstance(operand, Network):
            return None
    elif plain_shape(operand)[1:] != plain_shape(lazy)[1:]:  # it broadcasts
        return None
    result = hoist(func, lazy, args[1:], kwargs)
    return share(lazy, result) if name in _PARTS else result


def lazies_in(args: Args) -> list[LazyTensor]:
    """Return the lazy tensors among arguments, and in lists of them."""
    return [
        item
        for value in args
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, LazyTensor)
    ]


def _nodes(trace: Tracer, value: Any, *, beside: bool = False) -> Any:
    """Arguments with nodes for tensors; edge tensors are allowed ``beside`` lazy ones in a list."""
    if isinstance(value, LazyTensor) or (beside and isinstance(value, Tensor)):
        return node_of(trace, value)
    if isinstance(value, Tensor):
        return reads(trace, value)
    if isinstance(value, dict):
        return {name: _nodes(trace, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        beside = any(isinstance(item, LazyTensor) for item in value)
        return type(value)(_nodes(trace, item, beside=beside) for item in value)
    return value


def _like(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The result of a function, without data."""

    def change(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(change, value))
        if not isinstance(value, Tensor):
            return value
        return torch.empty(plain_shape(value), dtype=value.dtype, device="meta")

    with torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return func(*change(tuple(args)), **{k: change(v) for k, v in kwargs.items()})
        except (RuntimeError, IndexError, ValueError, TypeError):  # PyG's path raises its own
            raise Declined from None


def _works_by_row(name: str, args: Args, kwargs: Kwargs, lead: LazyTensor) -> bool:
    shape = plain_shape(lead)
    rank = len(shape)
    if name in ("cat", "concat", "concatenate", "stack"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return dim % (rank + (name == "stack")) != 0 and all(
            isinstance(t, Tensor) and t.dim() == rank and plain_shape(t)[0] == shape[0]
            for t in args[0]
        )
    if name in ("matmul", "__matmul__") and len(args) == 2 and not kwargs:
        return rank > 2 and all(
            isinstance(t, LazyTensor) and t.edge_dim == 0 and len(plain_shape(t)) == rank
            for t in args
        )
    if args[0] is not lead:
        return False
    others = [*args[1:], *kwargs.values()]
    shared = [t for t in others if isinstance(t, Tensor)]
    if any(isinstance(t, LazyTensor) for t in shared):
        return False
    if any(t.dim() >= rank and plain_shape(t)[0] != 1 for t in shared[name == "linear" :]):
        return False
    if name == "linear":
        return rank > 1 and shared[0].dim() == 2
    if name in ("layer_norm", "rms_norm"):
        normalized = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return len(normalized) < rank
    if name == "batch_norm":
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return rank > 1 and not training
    if name in ("prelu", "group_norm"):
        return rank > 1
    if any(isinstance(t, (list, tuple)) for t in others if name not in _VIEWS | _PICKS
           | {"sum", "mean", "amax", "amin", "permute"}):  # fmt: skip
        return False
    if name in _EACH:
        return True
    if shared:
        return False
    if name in _ALONG:
        place = _ALONG[name]
        unnamed = 1 if name == "normalize" else None
        dims = args[place] if len(args) > place else kwargs.get("dim", unnamed)
        dims = dims if isinstance(dims, (list, tuple)) else (dims,)
        return all(isinstance(dim, int) and dim % rank != 0 for dim in dims) and bool(dims)
    if name in _PICKS:
        return leaves_edges_alone(name, args, kwargs)
    if name in ("transpose", "swapaxes"):
        return len(args) == 3 and all(dim % rank != 0 for dim in args[1:])
    if name == "permute":
        order = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        return bool(order[0] % rank == 0)
    return name in _VIEWS


def leaves_edges_alone(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether an index selects the same from every edge."""
    rank = len(plain_shape(args[0]))
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index):
            return False
        taken = sum(i is not None and i is not Ellipsis for i in index)
        # Dimensions that count from the right must not reach the first.
        return index[:1] == (slice(None),) or (index[:1] == (Ellipsis,) and taken < rank)
    place = 1 if name in ("narrow", "select") else 2
    dim = args[place] if len(args) > place else kwargs.get("dim")
    return bool((dim or 0) % rank != 0)


# -- matrices of edges ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def makes_matrices(code: CodeType | None) -> bool:
    """Whether a message multiplies matrices, of which a network may compute one per edge."""
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    names = {step.argval for step in steps if isinstance(step.argval, str)}
    return not _PRODUCTS.isdisjoint(names | {step.argrepr for step in steps})


def defers(trace: Tracer, args: Args, kwargs: Kwargs) -> bool:
    """Whether to defer a linear layer on a tensor of edges."""
    params = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight = params.get("input"), params.get("weight")
    return not reasons_against(trace) and (
        isinstance(x, Tensor)
        and not isinstance(x, LazyTensor)
        and isinstance(weight, Tensor)
        and x.dim() == weight.dim() == 2
        and x.size(0) == trace.num_edges
        and x.size(1) == weight.size(1)
        and x.dtype == weight.dtype
    )


def product(left: Any, right: Any) -> LazyTensor:
    """Multiply [E, 1, I] by matrices [E, I, O] from a linear layer: [E, 1, O]."""
    # Tensors of a compiler are subclasses.
    if isinstance(left, LazyTensor) and not isinstance(right, (EdgeTensor, Parameter)):
        for reason in reasons_against(left.tracer):  # otherwise it would be lazy
            raise Unrecognised(reason, permanent=False)
    if not (isinstance(left, LazyTensor) and isinstance(right, LazyTensor)):
        raise Declined
    shape, of_matrix = plain_shape(left), plain_shape(right)
    if not is_single_side(right) or left.edge_dim != 0 or right.edge_dim != 0:
        raise Declined
    if len(shape) != 3 or len(of_matrix) != 3 or shape[1] != 1 or shape[2] != of_matrix[1]:
        raise Declined
    matrices = first_operand(right)
    node = viewed(matrices.node) if isinstance(matrices, Network) else None
    if node is None or node.target is not torch.nn.functional.linear:
        raise Declined
    params: dict[str, Any] = dict(zip(("input", "weight", "bias"), node.args, strict=False))
    params |= node.kwargs
    weight = params["weight"].meta["tensor"]
    if weight.size(0) != of_matrix[1] * of_matrix[2]:
        raise Declined
    if left.dtype != weight.dtype:
        raise Declined
    trace = left.tracer
    x = calls(trace, torch.reshape, node_of(trace, left), (-1, shape[2]))
    out = calls(trace, edge_product, x, params["input"], params["weight"], params.get("bias"))
    rows = calls(trace, torch.reshape, out, (-1, 1, of_matrix[2]))
    return leaf(trace, rows, (shape[0], 1, of_matrix[2]), weight.dtype)
