"""One call of ``propagate`` under ``patch()``: try the lazy way, else PyG's own, and say which."""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import record_choices
from pyg_accel.cache import saved_tensors_are_hooked
from pyg_accel.call_report import record
from pyg_accel.matrices import is_sparse_matrix, num_edges
from pyg_accel.memo import MEMO, changed, tensors_in
from pyg_accel.ops.csr import GRAPHS
from pyg_accel.ops.ordered_groups import SLOTS
from pyg_accel.patching import compiled, layers, programs, reading
from pyg_accel.patching.effects import effect_reasons, tensors_outside
from pyg_accel.patching.kept import (
    apart,
    finish,
    nothing,
    ordinary,
    refuse_kept,
    returns_none,
    writes_weights,
    written,
)
from pyg_accel.patching.layer_call import layer_call
from pyg_accel.patching.networks import hooked_inside
from pyg_accel.patching.overrides import hook_reasons, rendering_reason, template
from pyg_accel.patching.reasons import (
    RECORDED,
    SEEN,
    call_reasons,
    data_reasons,
    device_of,
    forced,
    is_active,
    kind_reasons,
    new_graph_reasons,
    size_reasons,
    subclass_reasons,
    torch_records,
    width_of,
)
from pyg_accel.patching.rng_state import RandomState, random_state, restore, tensors_of
from pyg_accel.patching.rules.common import MAX_MATERIALIZED_WIDTH
from pyg_accel.patching.rules.rowwise import makes_matrices
from pyg_accel.patching.running import Unrecognised
from pyg_accel.patching.sampling import in_force, refuse_training
from pyg_accel.patching.sparse import SparseTrace, as_edge_index
from pyg_accel.patching.thresholds import KINDS
from pyg_accel.patching.trace import Trace
from pyg_accel.patching.verification import verify
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import running_recorder
from pyg_accel.settings import settings

__all__ = ["bypassed", "call", "forget", "softmax", "spmm"]

_JUDGED = frozenset({Tensor, EdgeIndex})  # classes of graphs whose size is looked at first
CALLED_DIRECTLY = "MessagePassing.propagate itself was called"
_NO_REASONS: list[str] = []


class _Call(NamedTuple):
    """A call of a rendered ``propagate`` or ``edge_updater``, the original."""

    original: Callable[..., Any]
    layer: MessagePassing
    edge_index: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Found(NamedTuple):
    """What the first call of a layer showed: why its message is no formula, or its kind."""

    reason: str
    kind: str


_found: "weakref.WeakKeyDictionary[MessagePassing, dict[Any, _Found]]" = weakref.WeakKeyDictionary()
_NOTHING: dict[Any, _Found] = {}


def forget() -> None:
    """Drop all graphs and remembered results; what was found of layers goes with them."""
    GRAPHS.clear()
    SLOTS.clear()
    MEMO.clear()
    SEEN.clear()
    layers.forget()
    programs.forget()


def call(
    original: Callable[..., Any], self: MessagePassing, edge_index: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for a rendered ``propagate`` or ``edge_updater``."""
    if not is_active(self):
        return original(self, edge_index, *args, **kwargs)
    if torch_records():
        if torch.compiler.is_dynamo_compiling():
            return compiled.call(original, self, edge_index, args, kwargs)
        record(type(self).__name__, "", "PyG", RECORDED, 0.0)
        return original(self, edge_index, *args, **kwargs)
    recorder, name = running_recorder.recorder, original.__name__
    if recorder is None and not args:
        out = programs.run(self, name, (edge_index,), kwargs)
        if out is not programs.NOTHING:
            return out
    start, layer = time.perf_counter(), type(self).__name__
    judged = type(edge_index) in _JUDGED and edge_index.dim() == 2
    small, sized = _NO_REASONS, judged and in_force() is None
    if sized:
        edges, width = num_edges(edge_index), _width_of(original, self, kwargs)
        small = size_reasons(edges, edge_index.device.type, width)
    if not small:
        key = (name, self.training, getattr(edge_index, "layout", type(edge_index)))
        found = _found.get(self, _NOTHING).get(key)
        if sized and (found is None or not found.reason):
            kind = "" if found is None else _kind_of(self, name, found.kind)
            small = kind_reasons(kind, edges, edge_index.device.type, width)
            if not small:
                small = new_graph_reasons(kind, edges, edge_index, (id(self), original), width)
                if not small and kind == "sums" and _is_derived_anew():
                    small = kind_reasons("other sums", edges, edge_index.device.type, width)
            if small:
                layers.declined[self] = edges
    if small:
        layer_call.reason = small[0]
    else:
        layer_call.others = True
    if small:  # and nothing else matters: it must cost next to nothing
        if recorder is not None:
            recorder.stop(small[0])
        out = original(self, edge_index, *args, **kwargs)
        record(layer, "", "PyG", small[0], time.perf_counter() - start)
        return out
    refuse_training(self)
    given = _Call(original, self, edge_index, args, kwargs)
    reasons = data_reasons(edge_index) or call_reasons(self, edge_index, any_size=judged)
    reasons = reasons or subclass_reasons((edge_index, args, kwargs)) or effect_reasons(self)
    if found is not None and found.reason and not reasons:
        reasons = [found.reason]
    if not reasons and found is None and saved_tensors_are_hooked():
        # A checkpoint counts what a call saves, that of an attempt which fails too, and expects the
        # same when it runs the call again; then it will be known what the first call shows.
        found = _tried(given, key)
        if found.reason:
            reasons = [found.reason]
        elif sized:
            reasons = kind_reasons(found.kind, edges, edge_index.device.type, width)
            reasons = reasons or new_graph_reasons(
                found.kind, edges, edge_index, (id(self), original), width
            )
    if not reasons:
        # A message that turns out not to be a formula, today, runs twice: from the same state.
        state = random_state(device_of(edge_index), self)
        try:
            if recorder is None and not args:
                return programs.recorded(
                    self, name, _accelerated(given, key, state), (edge_index,), kwargs
                )
            return _accelerated(given, key, state)(self, edge_index, **kwargs)
        except Unrecognised as reason:
            reasons = [str(reason)]
            if reason.permanent:
                _found.setdefault(self, {})[key] = _Found(str(reason), "")
            restore(state)
    if recorder is not None:
        recorder.stop("; ".join(reasons))
    out = original(self, edge_index, *args, **kwargs)
    record(layer, "", "PyG", "; ".join(reasons), time.perf_counter() - start)
    return out


def _kind_of(layer: MessagePassing, name: str, kind: str) -> str:
    """The kind of a layer's calls, of which those without a program have other limits."""
    other = f"other {kind}"
    traced = programs.why(layer, "call") and not programs.has(layer, name)
    return other if other in KINDS and traced else kind


def _accelerated(call: _Call, key: Any, state: RandomState) -> Callable[..., Any]:
    """A function that makes a call with lazy messages, and notes what it was."""

    def make(layer: MessagePassing, *_: Any, **__: Any) -> Any:
        start = time.perf_counter()
        out, trace, names = _attempt(call)
        seconds = time.perf_counter() - start
        # An optimised model compares by itself; a sample is not what PyG computes.
        if settings.verify and in_force() is None and not forced.on:
            verify(*call, out, state)
        _found.setdefault(layer, {})[key] = _Found("", trace.kind())
        formulas = "; ".join(dict.fromkeys(trace.formulas))
        if programs.note(trace.formulas, trace.kind(), names, _widths.get(layer, 0)) and formulas:
            return out
        if formulas:
            record(type(layer).__name__, formulas, "+".join(names) or "deferred", "", seconds)
        else:
            why = "no reduction that could be fused"
            record(type(layer).__name__, "", "PyG", why, seconds)
        return out

    return make


def _is_derived_anew() -> bool:
    """Whether the layer's graph is derived in each call, as it is where a network makes weights."""
    asked = layer_call.remembers and not saved_tensors_are_hooked()  # a checkpoint calls twice
    return asked and MEMO.hits == layer_call.hits


# Of each layer: the most features that its last propagate was given.
_widths: "weakref.WeakKeyDictionary[MessagePassing, int]" = weakref.WeakKeyDictionary()


def _width_of(original: Callable[..., Any], self: MessagePassing, kwargs: dict[str, Any]) -> int:
    """The width of a call's features: of scores, that of the features that they will weigh."""
    with torch._C.DisableTorchFunction():
        width = width_of(kwargs, self.node_dim)
    known = _widths.get(self, 0)
    if original.__name__ != "propagate":
        return max(width, known)
    if width != known:
        _widths[self] = width
    return width


def _tried(call: _Call, key: Any) -> _Found:
    """What a call shows that leaves nothing else behind."""
    state = random_state(device_of(call.edge_index), call.layer)
    try:
        with torch.no_grad():
            _, trace, _ = _attempt(call._replace(kwargs=changed(call.kwargs, apart)))
    except Unrecognised as reason:
        found = _Found(str(reason), "")
        if not reason.permanent:
            return found
    else:
        found = _Found("", trace.kind())
    finally:
        restore(state)
    _found.setdefault(call.layer, {})[key] = found
    return found


# After a graph break Dynamo would compile the functions that a trace consists of.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attempt(call: _Call) -> tuple[Any, Trace | SparseTrace, dict[str, None]]:
    """Make a call with lazy messages: its result, what was seen, and the backends that ran."""
    original, self, edge_index, args, _ = call
    trace, plain, kwargs = _trace(call)
    trace.layer = self
    trace.forward = returns_none(self)
    if isinstance(trace, Trace):
        trace.size = kwargs.get("size")
        trace.writes_weights = writes_weights(self, original.__name__, trace.forward)
    if isinstance(trace, Trace) and makes_matrices(getattr(self.message, "__code__", None)):
        trace.watched |= {"linear"}
        for reason in hooked_inside(self):
            raise Unrecognised(reason, permanent=False)
    trace.given = lambda: [
        *tensors_in((edge_index, plain, args, kwargs)), *tensors_of(self), *tensors_outside(self)
    ]  # fmt: skip
    out = None
    with record_choices() as names, trace:
        try:
            out = original(self, plain, *args, **kwargs)
            if isinstance(trace, Trace):
                refuse_kept(self, trace)
            out = finish(self, out, ordinary, trace.forward)
        finally:
            if out is None:  # it raised, as a checkpoint does where it has all that it wants
                finish(self, None, nothing)
    return out, trace, names


def bypassed(original: Callable[..., Any], self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Stand in for how the reference ``propagate`` gathers its inputs: take a note of the call.

    The layer may hold that ``propagate`` since before patch(), so it cannot be caught itself, nor
    timed; one in n decomposed layers is noted n times.
    """
    if is_active(self) and not torch_records():
        reasons = hook_reasons(self) or [rendering_reason(self) or CALLED_DIRECTLY]
        record(type(self).__name__, "", "PyG", "; ".join(reasons), 0.0)
    return original(self, *args, **kwargs)


def softmax(
    function: Callable[..., Any], src: Any, index: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for ``torch_geometric.utils.softmax`` where the scores are those of our messages."""
    if torch.compiler.is_dynamo_compiling():
        return function(src, index, *args, **kwargs)
    trace = Trace.active()
    if not isinstance(trace, Trace) or trace.row_of(index) != trace.target:
        return function(src, index, *args, **kwargs)
    given = dict(zip(("ptr", "num_nodes", "dim"), args, strict=False)) | kwargs
    shape = plain_shape(src)
    if (
        given.get("ptr") is not None
        or len(shape) not in (1, 2)
        or shape[0] != trace.num_edges
        or shape[1:].numel() > MAX_MATERIALIZED_WIDTH
        or given.get("dim", 0) != 0
        or not src.dtype.is_floating_point
    ):
        return function(src, index, *args, **kwargs)
    return trace.softmax(src, given.get("num_nodes") or trace.sizes[trace.target] or 0)


def spmm(function: Callable[..., Any], src: Any, other: Any, reduce: str = "sum") -> Any:
    """Stand in for ``torch_geometric.utils.spmm`` inside a call with a sparse matrix."""
    trace = None if torch.compiler.is_dynamo_compiling() else SparseTrace.active()
    out = trace.multiply(src, other, reduce) if isinstance(trace, SparseTrace) else None
    return function(src, other, reduce) if out is None else out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pyg_accel_read(self: MessagePassing) -> str:
    """A method of layers while anything is patched: see :mod:`.reading`."""
    return reading.begin(self, _compile)


def _compile(
    self: MessagePassing, name: str, edge_index: Tensor, kwargs: dict[str, Any], *, decided: bool
) -> tuple[Tensor, str]:
    """Make a call while a compiler makes its graph: its result, and what was seen.

    The first pass decides whether it is made. A later one may know sizes that the first did not.
    """
    refuse_training(self)
    if not decided:
        reasons = call_reasons(self, edge_index, any_size=True)
        if not reasons and in_force() is None:
            reasons = size_reasons(edge_index.size(1), edge_index.device.type, compiled=True)
        if reasons:
            raise Unrecognised("; ".join(reasons))
    trace = compiled.CompiledTrace(edge_index, self.flow)
    with trace:
        out: Tensor = finish(self, template(self, name)(self, edge_index, **kwargs), written)
    return out, "; ".join(dict.fromkeys(trace.formulas))


def _trace(call: _Call) -> tuple[Trace | SparseTrace, Any, dict[str, Any]]:
    """What watches a call, and the graph and arguments that it is made with.

    Fused products stay what they are. Otherwise the graph is an ordinary edge_index.
    """
    original, module, edge_index, args, kwargs = call
    if is_sparse_matrix(edge_index):
        if module.fuse and original.__name__ == "propagate":
            return SparseTrace(MEMO), edge_index, kwargs
        plain, kwargs = as_edge_index(MEMO, original, module, edge_index, kwargs)
        return Trace(plain, module.flow), plain, kwargs
    if not isinstance(edge_index, EdgeIndex):
        return Trace(edge_index, module.flow), edge_index, kwargs
    read = module.inspector.get_flat_param_names(["message", "aggregate", "update", "edge_update"])
    if any(name.startswith("edge_index") for name in read):
        raise Unrecognised("the message reads the EdgeIndex itself")
    plain = edge_index.as_tensor()
    if not args:  # propagate's own arguments come by name; PyG ignores a given size here
        kwargs = kwargs | {"size": (edge_index.num_rows, edge_index.num_cols)}
    return Trace(plain, module.flow, owner=edge_index), plain, kwargs
