"""Rules of torch functions on lazy edge tensors.

Three kinds of rules, tried in this order:

* a function of one operand, row by row (an activation, a view, a linear layer on ``x_j``), is
  applied to the nodes instead of the edges;
* an elementwise function of several operands becomes part of the formula;
* a reduction over the target nodes runs the formula.

Any other function materialises narrow tensors (E x heads at most), and wide ones in a recording on
a GPU with enough memory. Otherwise it raises :class:`Unrecognised`, and PyG's own path runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.formula import Operand, operands_of
from pyg_accel.patching.edge_type_matmul import Matrices
from pyg_accel.patching.lazy import IDENTITY, LazyTensor, Tracer
from pyg_accel.patching.networks import has_network, is_of_edges, is_written_whole, written
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.rules import concatenation, products, rowwise, shapes  # noqa: F401 - for their rules
from pyg_accel.patching.rules.common import MAX_MATERIALIZED_WIDTH, RULES, Args, Declined, Kwargs
from pyg_accel.patching.rules.elementwise import assign
from pyg_accel.patching.rules.rowwise import lazies_in, on_nodes, record
from pyg_accel.patching.rules.scatter import reduce_over_targets
from pyg_accel.record.edge_tensors import name_of, plain_shape, replaced

__all__ = ["apply", "intercept", "record", "reduce_over_targets"]


_LINEAR = ("input", "weight", "bias")
_SELECT = dict.fromkeys(("input", "dim", "index"))  # names of arguments, in their order


def intercept(trace: Tracer, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Handle a torch function inside a trace: find gathers, follow views of edge_index."""
    name = name_of(func)
    if name == "index_select" and len(args) + len(kwargs) == 3:
        arguments = dict(zip(_SELECT, args, strict=False)) | kwargs
        if arguments.keys() == _SELECT.keys() and type(arguments["dim"]) is int:
            source, dim, index = (arguments[key] for key in _SELECT)
            row = trace.row_of(index)
            if row is not None and _can_gather(source, dim):
                return trace.gather(source, dim, row)
            if dim == 0 and products.chooses(trace, source, index):
                return Matrices.of(source, index)
    elif name == "linear" and rowwise.defers(trace, args, kwargs):
        arguments = dict(zip(_LINEAR, args, strict=False)) | kwargs
        arguments["input"] = trace.leaf("e", arguments["input"], arguments["input"].shape, 0)
        return record(func, tuple(arguments.values()), {})
    elif name == "__getitem__":
        source, index = args
        if source is trace.edge_index and type(index) is int:
            result = func(*args)
            trace.follow(result, index % 2)
            return result
        row = trace.row_of(index)
        if row is not None and _can_gather(source, 0):
            return trace.gather(source, 0, row)
        if products.chooses(trace, source, index):
            return Matrices.of(source, index)
    elif name == "unbind" and args[0] is trace.edge_index and len(args) + len(kwargs) == 1:
        rows = func(*args, **kwargs)
        for row, index in enumerate(rows):
            trace.follow(index, row)
        return rows
    elif args and (row := trace.followed(args[0])) is not None:
        if len(args) > 1 and isinstance(args[1], LazyTensor):  # index.expand_as(messages)
            result = args[0].expand(plain_shape(args[1]))
        else:
            result = func(*args, **kwargs)
        trace.follow(result, row)
        return result
    return func(*args, **kwargs)


def _can_gather(source: Any, dim: int) -> bool:
    """Whether a tensor has this dimension; otherwise torch raises."""
    return (
        isinstance(source, Tensor)
        and not isinstance(source, LazyTensor)
        and source.layout == torch.strided
        and -source.dim() <= dim < source.dim()
    )


# Attributes with values; others identify the object or its memory.
_OF_NUMBERS = {"T", "mT", "H", "mH", "real", "imag", "data"}
_OF_MEMORY = {
    "data_ptr", "storage", "untyped_storage", "storage_offset", "storage_type", "_typed_storage",
    "is_set_to", "is_shared", "is_pinned", "_is_view", "_use_count", "stride", "is_contiguous",
    "register_hook", "retain_grad", "register_post_accumulate_grad_hook",
}  # fmt: skip
_VIEWS_OF_MESSAGES = {
    "__getitem__", "select", "narrow", "chunk", "split", "unbind", "view", "reshape", "transpose",
    "t", "permute", "movedim", "diagonal", "flatten", "unflatten", "squeeze", "unsqueeze", "detach",
}  # fmt: skip


def apply(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Handle a torch function with at least one lazy tensor among its arguments."""
    name = name_of(func)
    if name in ("__repr__", "__format__"):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "__get__":
        return _attribute(func, args)
    if name in ("grad", "backward"):
        raise Unrecognised("a derivative inside of the message")
    if name in _OF_MEMORY:
        raise Unrecognised(f"'{name}' of a message")
    named = next((k for k in ("input", "tensors") if k in kwargs), None)
    if not args and named is not None:
        args, kwargs = (kwargs[named],), {k: v for k, v in kwargs.items() if k != named}
    in_place = name.endswith("_") and not name.endswith("__") and name[:-1] in RULES
    scatters = name.startswith("scatter")  # these rules write into an argument
    if in_place and not scatters and not isinstance(args[0], LazyTensor):
        raise Unrecognised(f"'{name}' changes a tensor by messages in place")
    if kwargs.get("out") is None and (result := on_nodes(func, args, kwargs)) is not None:
        return result
    rule = RULES.get(name[:-1] if in_place else name)
    if rule is not None and args and kwargs.get("out") is None:
        try:
            result = rule(func, args, kwargs)
        except Declined:
            return _write_out(func, args, kwargs)
        in_place = in_place or bool(kwargs.get("inplace", False))
        if in_place and isinstance(args[0], LazyTensor) and result is not args[0]:
            result = assign(args[0], result)
        return result
    return _write_out(func, args, kwargs)


def _attribute(func: Callable[..., Any], args: Args) -> Any:
    name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
    lazy: LazyTensor = args[0]
    if name in ("requires_grad", "is_leaf"):  # computed features are a leaf without gradients
        operands = [lazy.tracer.operands[o.index] for o in operands_of(lazy.formula)]
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
        return differentiable == (name == "requires_grad")
    if name not in _OF_NUMBERS:
        raise Unrecognised(f"Tensor.{name} of a message")
    return getattr(_computed(lazy, f"Tensor.{name}"), name)


def _write_out(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    name = name_of(func)
    changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if (changes and isinstance(args[0], LazyTensor)) or isinstance(kwargs.get("out"), LazyTensor):
        raise Unrecognised(f"'{name}' changes an edge tensor in place")

    wide = [lazy for lazy in lazies_in(args) if _is_wide(lazy)]
    if wide or any(map(has_network, lazies_in(args))):
        try:
            return record(func, args, kwargs)
        except Declined:  # it needs the values
            pass
    args, kwargs = replaced(LazyTensor, lambda lazy: _computed(lazy, name), args, kwargs)
    out = func(*args, **kwargs)
    if wide and type(out) is Tensor and out.shape == plain_shape(wide[0]) and not wide[0].edge_dim:
        return written(wide[0].tracer, out)  # such as a batch norm of messages
    return out


def _is_wide(lazy: LazyTensor) -> bool:
    shape = plain_shape(lazy)
    return (
        shape[: lazy.edge_dim].numel() * shape[lazy.edge_dim + 1 :].numel() > MAX_MATERIALIZED_WIDTH
    )


def _computed(lazy: LazyTensor, name: str) -> Tensor:
    if _is_wide(lazy) and not (is_of_edges(lazy) or is_written_whole(lazy)):
        shape = plain_shape(lazy)
        # Without the number of edges: the report has one row per reason.
        sizes = ["E" if d == lazy.edge_dim else str(n) for d, n in enumerate(shape)]
        raise Unrecognised(f"'{name}' on messages of [{', '.join(sizes)}]")
    if lazy.shared and name in _VIEWS_OF_MESSAGES:
        raise Unrecognised(f"'{name}' on a message that has views already")
    out = lazy.tracer.compute(lazy)
    # From now on it stands for the materialised tensor, whose views may change in place.
    number = lazy.tracer.add_operand("e", out.movedim(lazy.edge_dim, 0))
    lazy.formula, lazy.parts, lazy.later = Operand("e", number), None, IDENTITY
    lazy.summed = False
    return out
