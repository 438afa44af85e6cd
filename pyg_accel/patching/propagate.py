"""One call of ``propagate`` under ``patch()``: traced, or PyG's own, and which is reported."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_accel.graph import derived
from pyg_accel.graph.matrices import is_sparse_matrix, num_edges
from pyg_accel.graph.memo import changed, tensors_in
from pyg_accel.patching import compiled, dynamo_guards, gate, programs, recording
from pyg_accel.patching.effects import effect_reasons, tensors_outside
from pyg_accel.patching.escaping_tensors import (
    apart,
    finish,
    nothing,
    ordinary,
    refuse_kept,
    returns_none,
    writes_weights,
    written,
)
from pyg_accel.patching.networks import hooked_inside
from pyg_accel.patching.overrides import rendering_reason, template
from pyg_accel.patching.reasons import (
    RECORDED,
    call_reasons,
    data_reasons,
    device_of,
    is_active,
    lazy_reason,
    row_bytes,
    subclass_reasons,
    torch_records,
)
from pyg_accel.patching.rules.common import MAX_MATERIALIZED_WIDTH
from pyg_accel.patching.rules.rowwise import makes_matrices
from pyg_accel.patching.running import Unrecognised
from pyg_accel.patching.sampling import refuse_training
from pyg_accel.patching.size import Work, work_of
from pyg_accel.patching.sparse import SparseTrace, as_edge_index
from pyg_accel.patching.trace import Trace
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import running_recorder
from pyg_accel.runtime.cache import saved_tensors_are_hooked
from pyg_accel.runtime.hooks import hook_reasons
from pyg_accel.runtime.module_state import ModuleState, modules_in, tensors_of
from pyg_accel.runtime.report import record

__all__ = ["bypassed", "call", "forget", "softmax", "spmm"]

_JUDGED = frozenset({Tensor, EdgeIndex})  # classes of graphs whose size is looked at first
CALLED_DIRECTLY = "MessagePassing.propagate itself was called"


# Of layers and kinds of calls: why the message is no formula, or what the call does.
_found: "weakref.WeakKeyDictionary[MessagePassing, dict[Any, str | Work]]" = (
    weakref.WeakKeyDictionary()
)
_NOTHING: dict[Any, str | Work] = {}


def forget() -> None:
    """Drop all graphs and remembered results; what was found of layers goes with them."""
    derived.forget()
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
    alone = recorder is None and not args
    if alone:
        out = gate.by_program(self, name, original, (edge_index,), kwargs)
        if out is not gate.NOTHING:
            return out
    refuse_training(self)
    given = gate.Call(original, self, (edge_index, *args), kwargs)
    width = row_bytes(kwargs, self.node_dim)
    reasons = _reasons(given, width, recorded=recorder is not None)
    if reasons and recorder is not None:
        recorder.stop("; ".join(reasons))

    def make(*_: Any, **__: Any) -> Any:
        return gate.enter(
            given, reasons, _accelerated, device_of(edge_index), traced=True, row_bytes=width
        )  # fmt: skip

    if alone and not reasons:
        return recording.recorded(self, name, make, original, (edge_index,), kwargs)
    return make()


def _key_of(call: gate.Call) -> Any:
    """What the message of a layer may depend on."""
    edge_index: Any = call.args[0]
    training = call.owner is not None and call.owner.training
    return call.original.__name__, training, getattr(edge_index, "layout", type(edge_index))


def _reasons(call: gate.Call, width: int, *, recorded: bool) -> list[str]:
    """Why a call is PyG's; those that cost least come first."""
    edge_index, layer = call.args[0], call.owner
    assert isinstance(layer, MessagePassing)
    found = _found.get(layer, _NOTHING).get(_key_of(call))
    if isinstance(found, str):
        return [found]
    sized = type(edge_index) in _JUDGED and edge_index.dim() == 2 and not recorded
    if found is not None and sized:
        reasons = gate.too_small(layer, edge_index, num_edges(edge_index), found, width)
        if reasons:
            return reasons
    reasons = data_reasons(edge_index) or call_reasons(layer, edge_index)
    reasons = reasons or subclass_reasons((call.args, call.kwargs)) or effect_reasons(layer)
    if not reasons and found is None and saved_tensors_are_hooked():
        # A checkpoint counts what a call saves, that of an attempt which fails too, and expects the
        # same when it runs the call again; then it will be known what the first call shows.
        found = _tried(call)
        if isinstance(found, str):
            return [found]
        if sized:
            return gate.too_small(layer, edge_index, num_edges(edge_index), found, width)
    return reasons


def _accelerated(call: gate.Call) -> tuple[Any, list[str]]:
    """Make a call with lazy messages; its result and formulas, and remember what it was."""
    found = _found.setdefault(call.owner, {})  # type: ignore[arg-type]
    try:
        out, trace = _attempt(call)
    except Unrecognised as reason:
        if reason.permanent or reason.work:
            found[_key_of(call)] = reason.work or str(reason)
        if running_recorder.recorder is not None:
            running_recorder.recorder.stop(str(reason), may_change=not reason.permanent)
        raise
    found[_key_of(call)] = work_of(trace.formulas, traced=True, row_bytes=trace.network_bytes)
    recording.note((), {}, trace.network_bytes)
    return out, trace.formulas


def _tried(call: gate.Call) -> str | Work:
    """What a call shows that leaves nothing else behind."""
    state = ModuleState(modules_in(call.owner), device_of(call.args[0]))
    found: str | Work
    try:
        with torch.no_grad():
            _, trace = _attempt(call._replace(kwargs=changed(call.kwargs, apart)))
    except Unrecognised as reason:
        found = reason.work or str(reason)
        if not (reason.permanent or reason.work):
            return found
    else:
        found = work_of(trace.formulas, traced=True, row_bytes=trace.network_bytes)
    finally:
        state.restore()
    _found.setdefault(call.owner, {})[_key_of(call)] = found  # type: ignore[arg-type]
    return found


# After a graph break Dynamo would compile the functions that a trace consists of.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attempt(call: gate.Call) -> tuple[Any, Trace | SparseTrace]:
    """Make a call with lazy messages: its result, and what was seen."""
    original, self, (edge_index, *args), _ = call
    assert isinstance(self, MessagePassing)
    trace, plain, kwargs = _trace(call)
    trace.layer = self
    trace.forward = returns_none(self)
    if isinstance(trace, Trace):
        trace.size = kwargs.get("size")
        trace.copies = torch.is_grad_enabled() and programs.overwrites(self)
        trace.writes_weights = writes_weights(self, original.__name__, trace.forward)
    if isinstance(trace, Trace) and makes_matrices(getattr(self.message, "__code__", None)):
        trace.watched |= {"linear"}
        for reason in hooked_inside(self):
            raise Unrecognised(reason, permanent=False)
    if isinstance(trace, Trace):
        trace.refuse_small = partial(
            _refuse_small, self, trace, row_bytes(call.kwargs, self.node_dim)
        )
    trace.given = lambda: [
        *tensors_in((edge_index, plain, args, kwargs)), *tensors_of(self), *tensors_outside(self)
    ]  # fmt: skip
    out = None
    with trace:
        try:
            out = original(self, plain, *args, **kwargs)
            if isinstance(trace, Trace):
                refuse_kept(self, trace)
            out = finish(self, out, ordinary, trace.forward)
        finally:
            if out is None:  # it raised, as a checkpoint does where it has all that it wants
                finish(self, None, nothing)
    return out, trace


def _refuse_small(layer: MessagePassing, trace: Trace, width: int, formula: str) -> None:
    traced = running_recorder.recorder is None
    work = work_of([formula], traced=traced, row_bytes=trace.network_bytes)
    if reasons := gate.too_small(layer, trace.edge_index, trace.num_edges, work, width):
        raise Unrecognised("; ".join(reasons), permanent=False, work=work)


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
    """A method of layers while anything is patched: see :mod:`.dynamo_guards`."""
    return dynamo_guards.begin(self, _compile, lazy_reason(self))


def _compile(
    self: MessagePassing, name: str, edge_index: Tensor, kwargs: dict[str, Any], *, decided: bool
) -> tuple[Tensor, str]:
    """Make a call while a compiler makes its graph: its result, and what was seen.

    The first pass decides whether it is made. A later one may know sizes that the first did not.
    """
    refuse_training(self)
    reasons = [] if decided else call_reasons(self, edge_index)
    if reasons := reasons or ([] if decided else compiled.size_reasons(edge_index)):
        raise Unrecognised("; ".join(reasons))
    trace = compiled.CompiledTrace(edge_index, self.flow)
    with trace:
        out: Tensor = finish(self, template(self, name)(self, edge_index, **kwargs), written)
    return out, "; ".join(dict.fromkeys(trace.formulas))


def _trace(call: gate.Call) -> tuple[Trace | SparseTrace, Any, dict[str, Any]]:
    """What watches a call, and the graph and arguments that it is made with.

    Fused products stay what they are. Otherwise the graph is an ordinary edge_index.
    """
    original, module, (edge_index, *args), kwargs = call
    assert isinstance(module, MessagePassing)
    if is_sparse_matrix(edge_index):
        if module.fuse and original.__name__ == "propagate":
            return SparseTrace(), edge_index, kwargs
        plain, kwargs = as_edge_index(original, module, edge_index, kwargs)
        return Trace(plain, module.flow), plain, kwargs
    if not isinstance(edge_index, EdgeIndex):
        return Trace(edge_index, module.flow), edge_index, kwargs
    read = module.inspector.get_flat_param_names(["message", "aggregate", "update", "edge_update"])
    if any(name.startswith("edge_index") for name in read):
        raise Unrecognised("the message reads the EdgeIndex itself")
    plain = edge_index.as_tensor()
    if not args:  # propagate's own arguments come by name; PyG ignores a given size here
        kwargs = kwargs | {"size": (edge_index.num_rows, edge_index.num_cols)}
    return Trace(plain, module.flow), plain, kwargs
