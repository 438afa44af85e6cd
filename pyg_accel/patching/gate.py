"""The gate of all accelerated calls, and their report.

A call of a layer with a program runs it (:func:`by_program`), after comparisons of one tuple of
settings and modes, and of one least size. Every other call of a replaced function passes
:func:`enter`, with the reasons against acceleration and the function that computes its result.
Calls are verified, timed and counted here only.
"""

import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_tracing, is_grad_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.nn import Module

from pyg_accel.backends.notes import record_choices
from pyg_accel.costs import NEVER, Work, fewest_edges, size_reasons
from pyg_accel.formula import Computation, text_of
from pyg_accel.graph.derived import GraphHistory
from pyg_accel.patching import programs, recording
from pyg_accel.patching.context import context
from pyg_accel.patching.reasons import Unrecognised, is_active, switches
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.verification import verify
from pyg_accel.record.dims import Unexpected
from pyg_accel.record.guard import unchanged
from pyg_accel.runtime.module_state import PROGRAMS, ModuleState, modules_in
from pyg_accel.runtime.report import record
from pyg_accel.runtime.state import running
from pyg_accel.settings import settings

__all__ = ["NOTHING", "Call", "by_program", "enter", "leave", "too_small"]

NOTHING = object()
UNSEEN = 2  # after so many calls in a row with a new graph, every call is assumed to have one
_histories: "weakref.WeakKeyDictionary[object, GraphHistory]" = weakref.WeakKeyDictionary()


class Call(NamedTuple):
    """A call of a replaced function.

    Attributes:
        original: the function.
        owner: the layer, or None if the function is no method.
        args: after the layer.
        kwargs: of the call.
    """

    original: Callable[..., Any]
    owner: Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The name in the report."""
        return self.original.__name__ if self.owner is None else type(self.owner).__name__

    def stock(self) -> Any:
        """Make the call as PyG does."""
        owner = () if self.owner is None else (self.owner,)
        return self.original(*owner, *self.args, **self.kwargs)


def by_program(
    layer: Module,
    name: Any,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call by a program, or by PyG's path if it is too small.

    Args:
        layer: of the call.
        name: ``"call"`` of the whole layer, ``"propagate"`` or ``"edge_updater"``.
        original: PyG's function, which takes the layer and the arguments.
        args: of the call.
        kwargs: of the call.

    Returns:
        The result; :data:`NOTHING` if no program fits the call.
    """
    if get_eval_frame_callback() or _is_tracing():
        return NOTHING  # Dynamo would compile this code, and sizes are tensors in a trace
    now: tuple[Any, ...] | None = None
    leaves: tuple[Tensor, ...] | None
    adopted = stale = False
    if (hooked := saved_tensors_hooks(False) is not None) and name == "call":
        return NOTHING  # a checkpoint expects that a repeated call does the same
    transformed = running.transformed
    cached: Any = transformed.get(layer) if transformed and name == "call" else None
    from_layer = cached is None
    while True:
        if from_layer:
            cached = vars(layer).get(PROGRAMS)
            cached = None if cached is None else cached.get(name)
            if cached is not None and cached.layer is not layer:
                cached = None  # a copy that shares the attributes
            if cached is not None and cached.switched != switches.changes:
                if not is_active(layer):
                    return NOTHING
                cached.switched = switches.changes
        for program in () if cached is None else cached.programs:
            leaves, state = program.admit(args, kwargs), program.state
            if leaves is None:
                continue
            sizes, guard = state.sizes, program.guard
            if (
                (edges := leaves[sizes.graph].size(1)) < sizes.fewest_new
                and sizes.gradient is is_grad_enabled()
                and state.changes == settings.changes
                and in_force() is None
                and (sizes.fewest < NEVER or program.context == (now := now or context()))
                and (sizes.fewest < NEVER or unchanged(guard.compared))
                and (
                    (few := edges < sizes.fewest)
                    or hooked
                    or cached.history.is_new(leaves[sizes.graph])
                )
            ):
                outside, running.stock = running.stock, True  # no acceleration inside of it either
                start = perf_counter()
                try:
                    return original(layer, *args, **kwargs)
                finally:
                    running.stock = outside
                    (sizes.row_few if few else sizes.row_new).add(perf_counter() - start)
            now = now or context()
            if program.context == now and guard.apart(map(id, leaves)):
                if unchanged(guard.compared):
                    if state.new_graphs is (state.unseen <= UNSEEN):
                        program = cached.again(program, leaves)
                    break
                stale = True
        else:
            if adopted or not programs.adopt(cached, layer, name, args, kwargs, now, stale):
                return NOTHING
            adopted = True
            continue
        break
    assert leaves is not None
    program.state.used = True
    before = None
    if program.state.verified:
        before = ModuleState(modules_in(layer), leaves[program.state.sizes.graph].device)
    start = perf_counter()
    outer, running.arguments = running.arguments, leaves
    try:
        derived = () if program.parts is None else program.find(leaves)
        if derived is None:
            try:
                derived = program.derive(leaves)
            except RuntimeError:
                return NOTHING  # invalid edges: effects of the layer come before PyG's error
        else:
            program.state.unseen = 0
        out = program.finish(*leaves, *derived)
    except (Unexpected, IndexError, ValueError):
        return NOTHING  # inconsistent sizes: PyG raises its own error
    finally:
        running.arguments = outer
    program.state.sizes.row.add(perf_counter() - start)
    if before is not None:
        verify(original, layer, args, kwargs, out, before)
    return out


def enter(
    call: Call,
    reasons: Iterable[str],
    ours: Callable[[Call], tuple[Any, Iterable[Computation]]],
    device: torch.device,
    *,
    traced: bool = False,
    row_bytes: int = 0,
    counts: bool = True,
) -> Any:
    """Make a call without a program, accelerated unless there are reasons against it.

    Args:
        call: the call.
        reasons: against acceleration.
        ours: returns its result and formulas, the latter empty if it accelerated nothing. If it
            raises for unsupported arguments or inconsistent sizes, PyG makes the call.
        device: of the random numbers.
        traced: ours runs code of the layer: its state is restored after
            :class:`Unrecognised`, and other errors are raised to the user.
        row_bytes: bytes of the features of a node or an edge.
        counts: the report also lists calls by PyG.
    """
    reasons, state, owner = list(reasons), None, call.owner
    if not reasons:
        if traced or settings.verify:
            with torch._C.DisableTorchFunction():
                state = ModuleState(modules_in(owner), device)
        refused: tuple[type[Exception], ...] = (IndexError, ValueError)
        if traced:
            refused = (Unrecognised,)
        start = perf_counter()
        try:
            with record_choices() as backends:
                out, formulas = ours(call)
        except refused as error:
            reasons = [str(error)]
            if state is not None:
                with torch._C.DisableTorchFunction():
                    state.restore()
        else:
            seconds = perf_counter() - start
            # A recorded call is verified as a whole.
            if recording.verifies() and running.recorder is None:
                assert state is not None
                verify(call.original, owner, call.args, call.kwargs, out, state)
            text = text_of(formulas)
            if not (recording.note(formulas, backends, row_bytes) and text):
                why = "" if text else "no reduction that could be fused"
                backend = ("+".join(backends) or "deferred") if text else "PyG"
                record(call.name, text, backend, why, seconds)
            return out
    return leave(call, reasons, counts=counts)


def leave(call: Call, reasons: Iterable[str], *, counts: bool = True) -> Any:
    """Make a call as PyG does, and add the reasons to the report."""
    start = perf_counter()
    out = call.stock()
    if counts:
        record(call.name, "", "PyG", "; ".join(reasons), perf_counter() - start)
    return out


def too_small(
    owner: object, graph: Tensor, edges: int, work: Work, row_bytes: int, *, built: bool = False
) -> list[str]:
    """Return why a call without a program is too small.

    Args:
        owner: of the call, with its history of graphs.
        graph: a tensor that identifies the graph.
        edges: number of edges.
        work: of the call.
        row_bytes: bytes of the features of a node or an edge.
        built: everything that the call needs is built already.
    """
    if settings.always or running.unconditional or in_force() is not None:
        return []
    device, gradient = graph.device.type, torch.is_grad_enabled()
    fewest = fewest_edges(device, work, row_bytes, new=False, gradient=gradient)
    if reasons := size_reasons(edges, fewest):
        return reasons
    fewest = fewest_edges(device, work, row_bytes, new=True, gradient=gradient)
    if built or edges >= fewest:
        return []
    # A checkpoint repeats the call, and then the graph is not new any more.
    if not (new := saved_tensors_hooks(False) is not None):
        with torch._C.DisableTorchFunction():
            new = _histories.setdefault(owner, GraphHistory()).is_new(graph)
    return size_reasons(edges, fewest, new=True) if new else []


skip_code(by_program.__code__)  # Dynamo begins no graph here
