"""The gate: what every accelerated call passes, and what is said of it afterwards.

A call of a layer with a program runs it (:func:`by_program`): settings and modes are one tuple that
is compared, and whether the call is large enough is one number. Every other call of a function that
was replaced passes :func:`enter`, with the reasons against it and what computes its result. Here
alone calls are verified, timed and counted.
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

from pyg_accel.backends.dispatch import record_choices
from pyg_accel.costs import Work, fewest_edges, size_reasons
from pyg_accel.formula import Computation, text_of
from pyg_accel.graph.derived import GraphHistory
from pyg_accel.ops.plan import arguments
from pyg_accel.patching import programs, recording
from pyg_accel.patching.context import context
from pyg_accel.patching.reasons import is_active, switches, unconditional
from pyg_accel.patching.running import Unrecognised, running
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.verification import verify
from pyg_accel.record.dims import Unexpected
from pyg_accel.record.guard import unchanged
from pyg_accel.record.recorder import running_recorder
from pyg_accel.runtime.module_state import PROGRAMS, ModuleState, modules_in
from pyg_accel.runtime.report import record
from pyg_accel.settings import settings

__all__ = ["NOTHING", "Call", "by_program", "enter", "leave", "too_small"]

NOTHING = object()
UNSEEN = 2  # after so many calls in a row with a new graph, every call is assumed to have one
_histories: "weakref.WeakKeyDictionary[object, GraphHistory]" = weakref.WeakKeyDictionary()


class Call(NamedTuple):
    """A call of a function that was replaced.

    Attributes:
        original: the function.
        owner: the layer that it is called with, or None if it is no method.
        args: those behind the layer.
        kwargs: likewise.
    """

    original: Callable[..., Any]
    owner: Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The name that the report shows."""
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
    """Make a call by a program, or as PyG does if it is too small for that.

    Args:
        layer: whose call it is.
        name: ``"call"`` of the whole layer, ``"propagate"`` or ``"edge_updater"``.
        original: PyG's function, of the layer and the arguments.
        args: of the call.
        kwargs: of the call.

    Returns:
        The result; :data:`NOTHING` if no program fits the call.
    """
    if get_eval_frame_callback() or _is_tracing():
        return NOTHING  # Dynamo would compile what runs here, and sizes are tensors in a trace
    now: tuple[Any, ...] | None = None
    leaves: tuple[Tensor, ...] | None
    adopted = False
    if (hooked := saved_tensors_hooks(False) is not None) and name == "call":
        return NOTHING  # a checkpoint expects the same of a call made again
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
            sizes = state.sizes
            if (
                (edges := leaves[sizes.graph].size(1)) < sizes.fewest_new
                and sizes.gradient is is_grad_enabled()
                and state.changes == settings.changes
                and in_force() is None
                and (
                    (few := edges < sizes.fewest)
                    or hooked
                    or cached.history.is_new(leaves[sizes.graph])
                )
            ):
                outside, running.stock = running.stock, True  # functions inside of it are PyG's too
                start = perf_counter()
                try:
                    return original(layer, *args, **kwargs)
                finally:
                    running.stock = outside
                    (sizes.row_few if few else sizes.row_new).add(perf_counter() - start)
            now, guard = now or context(), program.guard
            if (
                program.context == now
                and guard.apart(map(id, leaves))
                and unchanged(guard.compared)
            ):
                if state.new_graphs is (state.unseen <= UNSEEN):
                    program = cached.again(program, leaves)
                break
        else:
            if adopted or not programs.adopt(cached, layer, name, args, kwargs, now or context()):
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
    outer, arguments.tensors = arguments.tensors, leaves
    try:
        derived = () if program.parts is None else program.find(leaves)
        if derived is None:
            derived = program.derive(leaves)
        else:
            program.state.unseen = 0
        out = program.finish(*leaves, *derived)
    except (Unexpected, IndexError, ValueError):
        return NOTHING  # sizes that do not agree, which PyG explains
    finally:
        arguments.tensors = outer
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
    """Make a call that has no program, ours if there is nothing against it.

    Args:
        call: the call.
        reasons: why it is PyG's.
        ours: returns its result and formulas, the latter empty if it accelerated nothing. Where it
            raises for what it cannot do or for sizes that do not agree, the call is PyG's.
        device: of the random numbers.
        traced: ours runs the layer's code, so that the state before is put back where it raises
            :class:`Unrecognised`, and other errors are the user's.
        row_bytes: bytes of the features of a node or an edge.
        counts: the report lists the call if it is PyG's too.
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
            # A call that is being recorded is verified as a whole.
            if recording.verifies() and running_recorder.recorder is None:
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
    """Make a call as PyG does, and let the report say why."""
    start = perf_counter()
    out = call.stock()
    if counts:
        record(call.name, "", "PyG", "; ".join(reasons), perf_counter() - start)
    return out


def too_small(
    owner: object, graph: Tensor, edges: int, work: Work, row_bytes: int, *, known: bool = False
) -> list[str]:
    """Return why a call without a program is too small.

    Args:
        owner: whose call it is: each has seen graphs of its own.
        graph: what tells whether it is made on something new.
        edges: of the graph.
        work: what the call does.
        row_bytes: bytes of the features of a node or an edge.
        known: nothing is built for the call that is not there already.
    """
    if settings.always or unconditional.on or in_force() is not None:
        return []
    device, gradient = graph.device.type, torch.is_grad_enabled()
    fewest = fewest_edges(device, work, row_bytes, new=False, gradient=gradient)
    if reasons := size_reasons(edges, fewest):
        return reasons
    fewest = fewest_edges(device, work, row_bytes, new=True, gradient=gradient)
    if known or edges >= fewest:
        return []
    # A checkpoint repeats what ran now, and then the graph is not new any more.
    if not (new := saved_tensors_hooks(False) is not None):
        with torch._C.DisableTorchFunction():
            new = _histories.setdefault(owner, GraphHistory()).is_new(graph)
    return size_reasons(edges, fewest, new=True) if new else []


skip_code(by_program.__code__)  # Dynamo begins no graph here
