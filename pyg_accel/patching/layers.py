"""What stands around a layer's forward: small graphs, and results that are remembered inside."""

import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch.compiler import is_dynamo_compiling
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from pyg_accel.cache import saved_tensors_are_hooked
from pyg_accel.derived import is_new
from pyg_accel.matrices import num_edges
from pyg_accel.memo import copied, remembered, running
from pyg_accel.patching import programs, small
from pyg_accel.patching.layer_call import LOOKS_UP, NOT, SMALL, layer_call
from pyg_accel.patching.reasons import (
    is_active,
    size_reasons,
    torch_records,
    transform_reasons,
)
from pyg_accel.record.recorder import perform, running_recorder
from pyg_accel.settings import settings

__all__ = ["OF_EVERY_MODULE", "declined", "forget", "hooked", "layer", "memoise"]

OF_EVERY_MODULE = frozenset(vars(Module()))
# What torch's and PyG's constructors set, and no forward pass changes. Not from an instance: the
# first one of a class renders its propagate.
_OF_EVERY_LAYER = OF_EVERY_MODULE.union(MessagePassing.__init__.__code__.co_names)
# The number of edges with which a layer was last left to PyG for the kind of its calls.
declined: "weakref.WeakKeyDictionary[MessagePassing, int]" = weakref.WeakKeyDictionary()


def forget() -> None:
    """Drop what is known of layers whose graphs were too small."""
    declined.clear()
    small.forget()


def layer(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``_call_impl``, which runs the forward of a layer and its hooks.

    There results are remembered, only there: a user who calls what makes them may change them.
    """
    if not is_dynamo_compiling():
        out = programs.run(self, "call", args, kwargs)
        if out is not programs.NOTHING:
            return out
        known = small.find(self, args, kwargs)
        if known is not None:
            start = perf_counter()
            looks_up = known.remembers and layer_call.again
            layer_call.small = LOOKS_UP if looks_up else SMALL
            try:
                if looks_up:
                    hits = running.hits
                    out = _remembering(self, args, kwargs)
                    known.was_remembered(running.hits > hits)
                else:
                    out = super(MessagePassing, self)._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                layer_call.small = NOT
            known.row.add(perf_counter() - start)
            return out
    return hooked(self, *args, **kwargs)


def hooked(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Stand in for the same whatever is known of the layer: the hooks inside of it run."""
    if torch_records() or not is_active(self):
        return super(MessagePassing, self)._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    if outer := layer_call.small:  # a part of another layer's call, with a graph of its own
        layer_call.small = NOT
        try:
            return _forward(self, args, kwargs)
        finally:
            layer_call.small = outer
    return _forward(self, args, kwargs)


def _forward(self: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outside = layer_call.begin(running.hits)
    try:
        out = _remembering(self, args, kwargs)
        if not saved_tensors_are_hooked():
            small.learn(self, args, kwargs)
    finally:
        layer_call.end(outside)
    return out


def _remembering(self: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call that gets from memory what was derived from its edge_index before."""
    before = running.begin(self)
    try:
        if running_recorder.recorder is None:
            out = programs.recorded(self, "call", _forward_of, args, kwargs)
        else:
            out = _forward_of(self, *args, **kwargs)
    finally:
        lent = running.end(before)
    return _left(self, out, lent) if lent else out


def _forward_of(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    return super(MessagePassing, self)._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _left(self: MessagePassing, out: Any, lent: list[Tensor]) -> Any:
    """Return the result of a layer with copies of what it borrowed, and leave it copies."""
    own = vars(self)
    for name, value in list(own.items()):  # another thread may run the layer and set its own
        if name not in _OF_EVERY_LAYER or name == "_buffers":
            left = copied(value, lent)
            if left is not value:
                own[name] = left
    return out if running.lent is not None else copied(out, lent)


def memoise(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for a function that derives an edge_index from another."""
    if is_dynamo_compiling() or running.lent is None or running.inside or transform_reasons():
        return function(*args, **kwargs)
    if layer_call.small:  # the layer's last call was on this graph too
        return _remembered(function, *args, **kwargs)
    layer_call.remembers = True
    if _is_worth_nothing(function, args):
        return running.call(function, args, kwargs)
    return _remembered(function, *args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _is_worth_nothing(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether to remember what comes of an edge_index costs more than it saves the next layers."""
    edges = args[0] if args else None
    return (
        type(edges) is Tensor
        and edges.dim() == 2
        and _builds_no_graph(num_edges(edges), edges.device.type)
        and is_new(edges, (function, weakref.ref(running.layer)))
    )


# The function runs as in eager mode: memory of a compiler's results may be the compiler's.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _remembered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if running_recorder.recorder is None:
        return remembered(function, *args, **kwargs)
    return perform(remembered, function, *args, borrows=True, **kwargs)


def _builds_no_graph(num_edges: int, device: str) -> bool:
    """Whether the layer that runs will be left to PyG with so many edges; it is a guess."""
    if size_reasons(num_edges, device):
        return True
    return num_edges <= declined.get(running.layer, -1) and not settings.always


# After a graph break Dynamo would make graphs that begin here, and find itself in all of them.
for _function in (layer, hooked, _forward, _remembering, small.find, small.learn, memoise,
                  is_active, torch_records, transform_reasons, saved_tensors_are_hooked,
                  type(running).begin, type(running).end, type(running).call,
                  type(layer_call).begin, type(layer_call).end):  # fmt: skip
    skip_code(_function.__code__)
