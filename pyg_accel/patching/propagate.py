"""One call of ``propagate`` under ``patch()``: a program, a record of one, or PyG's own."""

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch_geometric.nn import MessagePassing

from pyg_accel.costs import work_of
from pyg_accel.formula import Computation, text_of
from pyg_accel.graph import derived
from pyg_accel.graph.matrices import is_edge_index, is_sparse_matrix, num_edges
from pyg_accel.graph.memo import tensors_in
from pyg_accel.patching import compiled, dynamo_guards, gate, programs, recording
from pyg_accel.patching.effects import effect_reasons, tensors_outside
from pyg_accel.patching.escaping_tensors import (
    finish,
    nothing,
    ordinary,
    refuse_kept,
    returns_none,
    written,
)
from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.patching.networks import has_network, hooked_inside
from pyg_accel.patching.overrides import rendering_reason, template
from pyg_accel.patching.reasons import (
    RECORDED,
    Unrecognised,
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
from pyg_accel.patching.sampling import refuse_training
from pyg_accel.patching.sparse import PRODUCT, multiplied, with_edges
from pyg_accel.patching.trace import Trace
from pyg_accel.record.code import is_library_file
from pyg_accel.record.edge_tensors import plain_shape
from pyg_accel.record.recorder import Recorder
from pyg_accel.runtime.cache import saved_tensors_are_hooked
from pyg_accel.runtime.hooks import hook_reasons
from pyg_accel.runtime.module_state import tensors_of
from pyg_accel.runtime.report import record
from pyg_accel.runtime.state import running

__all__ = ["bypassed", "call", "forget", "softmax"]

CALLED_DIRECTLY = "MessagePassing.propagate itself was called"


def forget() -> None:
    """Drop all graphs, programs and remembered results."""
    derived.forget()
    programs.forget()


def call(
    original: Callable[..., Any], self: MessagePassing, edge_index: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand in for a rendered ``propagate`` or ``edge_updater``."""
    if not is_active(self):
        return original(self, edge_index, *args, **kwargs)
    if torch_records() or get_eval_frame_callback() is not None:
        if torch.compiler.is_dynamo_compiling():
            return compiled.call(original, self, edge_index, args, kwargs)
        reason = RECORDED if torch_records() else "Dynamo runs the call"
        record(type(self).__name__, "", "PyG", reason, 0.0)
        return original(self, edge_index, *args, **kwargs)
    original_call = gate.Call(original, self, (edge_index, *args), kwargs)
    if running.recorder is not None:
        return _inside(original_call, running.recorder)
    call, name = original_call, original.__name__
    if not is_edge_index(edge_index) or args:
        refuse_training(self)
        if reasons := _reasons(original_call) or ["arguments without names"] * bool(args):
            return gate.leave(original_call, reasons)
        if is_sparse_matrix(edge_index) and self.fuse and name == "propagate":
            return _multiplied(original_call)
        try:
            call = with_edges(original_call)
        except Unrecognised as reason:
            return gate.leave(original_call, [str(reason)])
    stock = original if call is original_call else lambda *_, **__: original_call.stock()
    forward = returns_none(self)
    key: Any = name
    if forward is not None and is_library_file(forward.co_filename):
        key = name, forward  # it clears stored messages, which programs do not store
    else:
        forward = None
    out = gate.by_program(self, key, stock, call.args, call.kwargs)
    if out is not gate.NOTHING:
        return out
    refuse_training(self)
    try:
        return recording.recorded(
            self, key, lambda *_, **__: _entered(call, forward, alone=True), stock, call.args,
            call.kwargs, reasons=partial(_reasons, call)
        )  # fmt: skip
    except recording.Refused as refused:
        reasons = [str(refused) or "saved-tensor hooks are active"]
    if saved_tensors_are_hooked():  # a program may exist now
        out = gate.by_program(self, key, stock, call.args, call.kwargs)
    return gate.leave(original_call, reasons) if out is gate.NOTHING else out


def _inside(call: gate.Call, recorder: Recorder) -> Any:
    """Make a call inside of one that is being recorded."""
    assert isinstance(call.owner, MessagePassing)
    refuse_training(call.owner)
    plain = is_edge_index(call.args[0]) and len(call.args) == 1
    reasons = _reasons(call) if plain else ["a graph that is not a plain edge_index"]
    if not reasons:
        return _entered(call, returns_none(call.owner))
    recorder.stop("; ".join(reasons))
    return gate.leave(call, reasons)


def _entered(call: gate.Call, forward: CodeType | None, *, alone: bool = False) -> Any:
    """Make a recorded call, alone or inside of a ``forward`` that clears weights."""
    assert isinstance(call.owner, MessagePassing)
    width = row_bytes(call.kwargs, call.owner.node_dim)
    ours = partial(_attempt, forward=forward, alone=alone)
    return gate.enter(call, (), ours, device_of(call.args[0]), traced=True, row_bytes=width)


def _multiplied(call: gate.Call) -> Any:
    """Make a call of a layer with a product with a sparse matrix."""
    adj, owner = call.args[0], call.owner
    width = row_bytes(call.kwargs)
    reasons = []
    if isinstance(adj, Tensor):
        work = work_of([PRODUCT])
        reasons = gate.too_small(owner, adj, num_edges(adj), work, width)
    return gate.enter(call, reasons, multiplied, device_of(adj), traced=True, row_bytes=width)


def _reasons(call: gate.Call) -> list[str]:
    """The reasons against acceleration, cheap checks first."""
    edge_index, layer = call.args[0], call.owner
    assert isinstance(layer, MessagePassing)
    reasons = data_reasons(edge_index) or call_reasons(layer, edge_index)
    return reasons or subclass_reasons((call.args, call.kwargs)) or effect_reasons(layer)


def _attempt(
    call: gate.Call, *, forward: CodeType | None, alone: bool
) -> tuple[Any, list[Computation]]:
    """Make a call with lazy messages; return its result and formulas."""
    original, self, (edge_index,), kwargs = call
    assert isinstance(self, MessagePassing)
    trace = Trace(edge_index, self.flow)
    trace.layer = self
    trace.size = kwargs.get("size")
    trace.copies = torch.is_grad_enabled() and programs.overwrites(self)
    # edge_updater returns weights.
    trace.writes_weights = original.__name__ == "edge_updater" and (alone or forward is None)
    if makes_matrices(getattr(self.message, "__code__", None)):
        trace.watched |= {"linear"}
    trace.inputs = lambda: [
        *tensors_in((edge_index, kwargs)), *tensors_of(self), *tensors_outside(self)
    ]  # fmt: skip
    out = None
    try:
        if "linear" in trace.watched and (hooks := hooked_inside(self)):
            raise Unrecognised(hooks[0], permanent=False)
        with trace:
            try:
                out = original(self, edge_index, **kwargs)
                refuse_kept(self, trace, forward, alone)
                out = finish(self, out, ordinary, forward, clear=alone)
            finally:
                if out is None:  # it raised
                    finish(self, None, nothing)
    except Unrecognised as reason:
        assert running.recorder is not None
        running.recorder.stop(str(reason), may_change=not reason.permanent)
        raise
    recording.note((), {}, trace.network_bytes)
    return out, trace.formulas


def bypassed(original: Callable[..., Any], self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Replace the collection of inputs of the reference ``propagate``: report the call.

    A layer may hold that ``propagate`` since before patch(), so the call itself is not replaced,
    nor timed; a decomposition into n layers is reported n times.
    """
    if is_active(self) and not torch_records():
        reasons = hook_reasons(self) or [rendering_reason(self) or CALLED_DIRECTLY]
        record(type(self).__name__, "", "PyG", "; ".join(reasons), 0.0)
    return original(self, *args, **kwargs)


def softmax(
    function: Callable[..., Any], src: Any, index: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``torch_geometric.utils.softmax`` for scores that are lazy messages."""
    if torch.compiler.is_dynamo_compiling():
        return function(src, index, *args, **kwargs)
    trace = running.traces[-1] if running.traces else None
    if not isinstance(trace, Trace) or trace.row_of(index) != trace.target:
        return function(src, index, *args, **kwargs)
    options = dict(zip(("ptr", "num_nodes", "dim"), args, strict=False)) | kwargs
    shape = plain_shape(src)
    materialized = not isinstance(src, LazyTensor) or has_network(src)
    if (
        options.get("ptr") is not None
        or len(shape) not in (1, 2)
        or shape[0] != trace.num_edges
        or (materialized and shape[1:].numel() > MAX_MATERIALIZED_WIDTH)
        or options.get("dim", 0) not in (0, -len(shape))
        or not src.dtype.is_floating_point
    ):
        return function(src, index, *args, **kwargs)
    return trace.softmax(src, options.get("num_nodes") or trace.sizes[trace.target] or 0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pyg_accel_read(self: MessagePassing) -> str:
    """Begin a reading; a method of layers while anything is patched, see :mod:`.dynamo_guards`."""
    return dynamo_guards.begin(self, _compile, lazy_reason(self))


def _compile(
    self: MessagePassing, name: str, edge_index: Tensor, kwargs: dict[str, Any], *, decided: bool
) -> tuple[Tensor, str]:
    """Make a call while a compiler makes its graph; return its result and formulas.

    The first pass decides whether to make it: a later one may know more about sizes.
    """
    refuse_training(self)
    reasons = [] if decided else call_reasons(self, edge_index)
    if reasons := reasons or ([] if decided else compiled.size_reasons(edge_index)):
        raise Unrecognised("; ".join(reasons))
    trace = compiled.CompiledTrace(edge_index, self.flow)
    with trace:
        out: Tensor = finish(self, template(self, name)(self, edge_index, **kwargs), written)
    return out, text_of(trace.formulas)
