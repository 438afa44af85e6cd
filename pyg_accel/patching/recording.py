"""Records calls of layers as programs.

The first call of a kind is recorded, for all layers of the class with equal values. A call that
differs in sizes only is recorded once more, with sizes that are computed in each call, and replaces
the first record if both agree in everything else.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from threading import RLock
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.notes import record_choices
from pyg_accel.costs import NEVER, fewest_edges, size_reasons, work_of
from pyg_accel.formula import Computation, text_of
from pyg_accel.graph.matrices import is_edge_index
from pyg_accel.graph.memo import tensors_in
from pyg_accel.patching.context import context, modes
from pyg_accel.patching.overrides import is_rendered
from pyg_accel.patching.programs import Programs, Sizes, is_users, matching, programs_of
from pyg_accel.patching.reasons import transform_reasons
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.verification import verify
from pyg_accel.record.guard import NotComparable
from pyg_accel.record.program import LayerProgram, State, record
from pyg_accel.record.signature import Signature
from pyg_accel.record.sizes import tells_apart
from pyg_accel.record.split import DERIVED
from pyg_accel.runtime.cache import saved_tensors_are_hooked
from pyg_accel.runtime.hooks import hook_reasons, hooks_in
from pyg_accel.runtime.module_state import ModuleState, modules_in
from pyg_accel.runtime.native import cpu_unavailable_reasons
from pyg_accel.runtime.report import record as count
from pyg_accel.runtime.report import row_of
from pyg_accel.runtime.state import during, running
from pyg_accel.settings import settings

__all__ = ["Attempt", "Refused", "attempt", "note", "recorded", "verifies"]

# The first methods of a call.
_ENTRIES = {
    "call": ("forward",),
    "propagate": ("propagate", "message", "aggregate", "update", "message_and_aggregate"),
    "edge_updater": ("edge_updater", "edge_update"),
}
_UNUSED = 4  # programs of a kind of call that changes of the layer made useless
_METHODS = {name for names in _ENTRIES.values() for name in names}
# Two threads whose modes are the first to see an operator can crash torch, which makes its Python
# object in both and frees one in use (torch::detail::getTorchApiFunction, torch 2.13).
_recording = RLock()


@dataclass
class _TraceNotes:
    """Notes on the propagate calls inside of a recorded call."""

    formulas: dict[Computation, None] = field(default_factory=dict)
    backends: dict[str, None] = field(default_factory=dict)
    row_bytes: int = 0
    called: bool = False  # whether there was one

    def outer(self) -> list[Computation]:
        """The formulas, except for attention weights inside of another formula."""
        inside = {Computation(score=f.score) for f in self.formulas if f.formula is not None}
        return [f for f in self.formulas if f not in inside]

    def text(self) -> str:
        """The text for the report."""
        return text_of(self.outer())


class Refused(Exception):
    """A call cannot be recorded, and its code has not run; the text is the reason."""


class Attempt(NamedTuple):
    """A call that ran for a record.

    Attributes:
        out: its result.
        formulas: for the report; empty if nothing was accelerated.
        backends: for the report.
        kind: of the call, to note a failure.
        before: the state of the layer before the call.
        program: of the call; None after a failed record.
        alike: the program for other sizes that this one replaces.
    """

    out: Any
    formulas: str
    backends: str
    kind: Any
    before: ModuleState
    program: LayerProgram | None = None
    alike: LayerProgram | None = None


def note(formulas: Iterable[Computation], backends: dict[str, None], row_bytes: int) -> bool:
    """Note a propagate call inside of a recorded call; return whether there is one."""
    notes = running.notes
    if notes is not None:
        notes.called = True
        notes.formulas |= dict.fromkeys(formulas)
        notes.backends |= backends
        notes.row_bytes = max(notes.row_bytes, row_bytes)
    return notes is not None


def recorded(
    layer: MessagePassing,
    name: Any,
    make: Callable[..., Any],
    stock: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    transformed: Programs | None = None,
    reasons: Callable[[], list[str]] = list,
) -> Any:
    """Make a call and record it if possible; ``stock`` makes it as PyG does.

    Inside of a checkpoint, which counts saved tensors, a call of the new program must follow.

    Raises:
        Refused: if the call must be made in another way; it was not made, or its effects were
            undone.
    """
    if get_eval_frame_callback() is not None:
        return make(layer, *args, **kwargs)  # after a graph break Dynamo compiles this code
    whole, hooked = name == "call" and transformed is None, saved_tensors_are_hooked()
    programs = programs_of(layer, name) if transformed is None else transformed
    start = perf_counter()
    with (
        nullcontext() if transformed is None else during(transformed={}, unconditional=True),
        saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext(),
        ExitStack() as stack,
    ):
        result: Attempt | str = "another thread records a call"
        # That thread may wait for this one. So none waits for it but checkpoints, which must make
        # their calls again in the same way, and models on several ranks, which all make them alike.
        if _recording.acquire(timeout=60 if hooked or running.wire is not None else 0):
            stack.callback(_recording.release)
            result = attempt(programs, layer, name, make, args, kwargs, reasons, again=not hooked)
    if isinstance(result, str):
        if not whole:
            raise Refused(result)
        return make(layer, *args, **kwargs)
    program = programs.transformed(result.program, result.kind, tensors_in((args, kwargs)))
    if verifies() and result.formulas and transformed is None:
        verify(stock, layer, args, kwargs, result.out, result.before)
    if program is not None:
        programs.store(program, result.alike)
        leaves = program.signature.leaves(args, kwargs)
        sizes = program.state.sizes
        graph = leaves[sizes.graph]
        if result.formulas and graph.size(1) < sizes.fewest and not program.writes:
            # as it is in later calls
            result.before.restore()
            sizes.row_few.add(perf_counter() - start)
            with during(stock=True):
                return stock(layer, *args, **kwargs)
        programs.history.is_new(graph)  # so that it is not new in the next call
    if hooked:
        result.before.restore()
        raise Refused("" if result.program else programs.of_class.reason)
    if not result.formulas:
        return result.out  # propagate has counted it
    if program is not None and program is result.program:
        program.state.sizes.row.add(perf_counter() - start)
    else:
        count(type(layer).__name__, result.formulas, result.backends, "", perf_counter() - start)
    return result.out


def attempt(
    programs: Programs,
    layer: MessagePassing,
    name: Any,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reasons: Callable[[], list[str]] = list,
    *,
    again: bool = True,
) -> Attempt | str:
    """Make a call and record it; return the reason if it was not made.

    Args:
        programs: of the layer; the caller stores a new one. Failures are noted here.
        layer: of the call.
        name: as for :func:`why`.
        make: makes the call of the layer.
        args: of the call.
        kwargs: of the call.
        reasons: returns further, expensive reasons against the call.
        again: retry failed kinds of calls.
    """
    failed, now, different = programs.of_class.fail, context(), ""
    kind: Any = None
    try:
        kind = programs.kind(args, kwargs, now)
        if reason := programs.of_class.refusal(kind, again=again):
            return reason
    except NotComparable as error:
        different = str(error)
    reason = programs.refusal(args, kwargs) or _unrecordable(layer, name, args, kwargs)
    if reason := reason or "; ".join(reasons()) or different:
        programs.of_class.reason = programs.of_class.reason or reason
        return reason
    signature = Signature(args, kwargs)
    try:
        alike = next((p for p in matching(programs, now) if p.signature.is_like(signature)), None)
        tells = alike is not None and tells_apart(alike.guard.shared.reads.ran)
        if alike is not None:
            signature = Signature(args, kwargs, alike.signature, programs.drift)
            alike = alike if signature.dynamic or alike.exact else None
        exact, whole = alike is None and is_users(layer), name == "call" and is_users(layer)
        device = next(v.device for v in (*args, *kwargs.values()) if is_edge_index(v))
        saved = ModuleState(modules_in(layer), device)
        notes, arguments = _TraceNotes(), tuple(tensors_in((args, kwargs)))
        with during(notes=notes, arguments=arguments), record_choices() as backends:
            out, recorder, guard = record(
                layer, _ENTRIES[name if isinstance(name, str) else name[0]], make, args, kwargs,
                signature, exact=exact, tells=tells, whole=whole,
            )  # fmt: skip
    except NotComparable as error:
        failed(kind, str(error), again=error.may_change)
        return str(error)
    programs.overwrites = recorder.overwrites or (bool(programs.programs) and programs.overwrites)
    result = Attempt(out, notes.text(), "+".join(notes.backends) or "deferred", kind, saved)
    reason = recorder.reason
    if not (reason or notes.formulas or (notes.called and _is_plain(recorder.graph))):
        reason = "no reduction that could be fused"
    differs = alike is not None and not alike.agrees(recorder.graph, recorder.constants)
    if not reason and differs:
        reason = "what it does depends on sizes"  # a later call may not depend on them
    if reason or guard is None:
        failed(kind, reason, again=differs or recorder.may_change)
        return result
    state = State(settings.changes)
    state.overwrites, state.verified = programs.overwrites, verifies()
    program = LayerProgram(
        recorder.graph, guard, signature, now, notes.text(),
        "+".join(notes.backends | backends) or "deferred", recorder.exact,
        any(tensor.is_cuda for tensor in signature.leaves(args, kwargs)), state,
    )  # fmt: skip
    state.sizes = _sizes_of(layer, program, signature.leaves(args, kwargs), notes)
    unused = [p for p in programs.programs if p is not alike and p.context == now
              and p.admit(args, kwargs) and not p.state.used]  # fmt: skip
    if len(unused) >= _UNUSED:
        failed(kind, "what its code reads changes between calls", again=True)
    if programs.drift and alike is not None and alike.signature.dynamic:
        alike = None  # it stays for other sizes
    return result._replace(program=program, alike=alike)


def verifies() -> bool:
    """Return whether calls are verified: optimised models verify themselves, samples differ."""
    return settings.verify and in_force() is None and not running.unconditional


def _is_plain(graph: torch.fx.Graph) -> bool:
    """Whether PyG runs the same functions, of which no result is stored."""
    modules = [getattr(node.target, "__module__", None) or "" for node in graph.nodes]
    stored = any(DERIVED in node.meta for node in graph.nodes)
    return not (stored or any(module.startswith("pyg_accel") for module in modules))


def _sizes_of(
    layer: Module, program: LayerProgram, leaves: list[Tensor], notes: _TraceNotes
) -> Sizes:
    """Return the least sizes for which a program is faster than PyG's own path."""
    place = next(i for i, leaf in enumerate(leaves) if is_edge_index(leaf))
    name, device = type(layer).__name__, leaves[place].device.type
    if not notes.formulas:
        left = row_of(name, "", "PyG", "no reduction that could be fused")
        return Sizes(place, torch.is_grad_enabled(), NEVER, NEVER, left, left, left)
    work = work_of(notes.outer(), program.derives)
    gradient, least, least_new = torch.is_grad_enabled(), 0, 0  # no limits for samples
    if in_force() is None:
        least, least_new = (
            fewest_edges(device, work, notes.row_bytes, new=new, gradient=gradient)
            for new in (program.derives_anew, True)
        )
    row = row_of(name, program.formulas, program.backends, "")
    few, new = (
        row_of(name, "", "PyG", *size_reasons(-1, edges, new=new))
        for edges, new in ((least, False), (least_new, True))
    )
    return Sizes(place, gradient, least, least_new, row, few, new)


skip_code(recorded.__code__)  # Dynamo begins no graph here


def _unrecordable(
    layer: MessagePassing, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Return the reason against recording a call; empty without one."""
    if missing := cpu_unavailable_reasons():
        return missing[0]  # the library compares guards
    replaced = [method for method, value in vars(layer).copy().items() if method in _METHODS
           and not is_rendered(value)]  # fmt: skip
    if replaced:
        return f"{', '.join(replaced)} set on the instance"
    hooked = modules_in(layer) if name == "call" else ()
    if reasons := hook_reasons(layer) or [r for m in hooked for r in hooks_in(m)]:
        return "; ".join(reasons)
    if name == "call":
        seen = modes(whole=not running.unconditional)  # halos are a part of transformed programs
        plain = all(isinstance(mode, torch.device) for mode in seen)
        if not plain or torch._C._len_torch_dispatch_stack():
            return "inside a mode of torch"
        if saved_tensors_are_hooked():
            return "saved-tensor hooks are active"
    if not (sys.getprofile() is None or callable(sys.getprofile())):
        return "under a profiler in C, which Python cannot switch on again after a record"
    if reasons := transform_reasons():
        return "; ".join(reasons)
    if not any(map(is_edge_index, (*args, *kwargs.values()))):
        return "a graph that is not a plain edge_index"
    return ""
