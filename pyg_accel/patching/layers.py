"""The hook around the forward of a layer: its programs, and stored results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from pyg_accel.graph.memo import copied, remembered
from pyg_accel.patching import gate, recording
from pyg_accel.patching.reasons import is_active, torch_records, transform_reasons
from pyg_accel.patching.self_loops import native
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.state import during, running

__all__ = ["OF_EVERY_MODULE", "forward_of", "hooked", "layer", "memoise"]

OF_EVERY_MODULE = frozenset(vars(Module()))
# Attributes that constructors of torch and PyG set and no forward pass changes. Not taken from an
# instance: the first one of a class renders its propagate.
_OF_EVERY_LAYER = OF_EVERY_MODULE.union(MessagePassing.__init__.__code__.co_names)


def layer(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_call_impl``, which runs the forward of a layer and its hooks.

    Results of graph functions are stored inside of it only, as other callers may change them.
    """
    if not is_dynamo_compiling():
        out = gate.by_program(self, "call", forward_of, args, kwargs)
        if out is not gate.NOTHING:
            return out
    return hooked(self, *args, **kwargs)


def hooked(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Replace the same without programs, for a layer with hooks inside."""
    if torch_records():
        return forward_of(self, *args, **kwargs)
    transformed = running.transformed.get(self)
    if transformed is None and not is_active(self):
        return forward_of(self, *args, **kwargs)
    # A layer inside of another one has its own graph, and borrows what is derived of it.
    outside, outer = running.stock, running.lent
    running.stock, running.lent, refusal = False, [], None
    try:
        if running.recorder is None:
            out = recording.recorded(
                self, "call", forward_of, forward_of, args, kwargs, transformed
            )
        else:
            out = forward_of(self, *args, **kwargs)
    except recording.Refused as refused:
        refusal = str(refused)
    finally:
        lent, running.lent, running.stock = running.lent or [], outer, outside
        if outer is not None:
            outer += lent  # an outer layer borrows them, too
    if refusal is not None:
        return untransformed(self, transformed, refusal, args, kwargs)
    return _left(self, out, lent) if lent else out


def untransformed(
    self: MessagePassing,
    transformed: Any,
    reason: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call without the transform of the model, and report the reason."""
    transformed.reasons[reason] = None
    call = gate.Call(type(self)._call_impl, self, args, kwargs)
    with during(transformed={}):
        return gate.leave(call, [reason], counts=not is_active(self))  # else patch() counts it


def forward_of(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a layer and its hooks, as torch does."""
    return super(MessagePassing, self)._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _left(self: MessagePassing, out: Any, lent: list[Tensor]) -> Any:
    """Return the result of a layer with copies of borrowed tensors; copy them in attributes too."""
    attributes = vars(self)
    for name, value in attributes.copy().items():  # another thread may set some meanwhile
        if name not in _OF_EVERY_LAYER or name == "_buffers":
            left = copied(value, lent)
            if left is not value:
                attributes[name] = left
    return out if running.lent is not None else copied(out, lent)


def memoise(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace a function that derives an edge_index from another."""
    if is_dynamo_compiling() or running.lent is None or transform_reasons():
        return function(*args, **kwargs)
    if running.deriving:
        return native(function)(*args, **kwargs)
    return _remembered(native(function), *args, **kwargs)


# The function runs as in eager mode: a compiler may reuse the memory of its results.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _remembered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if running.recorder is None:
        return remembered(function, *args, **kwargs)
    return perform(remembered, function, *args, borrows=True, **kwargs)


# After a graph break Dynamo would begin a graph in each of these functions.
for _function in (layer, hooked, forward_of, memoise, is_active, torch_records,
                  transform_reasons):  # fmt: skip
    skip_code(_function.__code__)
