"""The programs of layers: which call has one, and when one is recorded.

A call whose arguments, modes and guard fit a program runs it, and none of the layer's code. The
first call of a kind is recorded; one that differs from a recorded one in sizes alone is recorded
once more, with sizes that are computed in each call, and serves for all sizes if both records agree
in everything else.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import record_choices
from pyg_accel.cache import saved_tensors_are_hooked
from pyg_accel.call_report import Row, row_of
from pyg_accel.call_report import record as count
from pyg_accel.derived import Seen, derived
from pyg_accel.hooks import hook_reasons, hooks_in
from pyg_accel.matrices import is_edge_index
from pyg_accel.memo import tensors_in
from pyg_accel.module_state import ModuleState, modules_in
from pyg_accel.ops.plan import arguments
from pyg_accel.patching.context import context, modes
from pyg_accel.patching.overrides import is_rendered, template
from pyg_accel.patching.reasons import (
    forced,
    is_active,
    torch_records,
    transform_reasons,
)
from pyg_accel.patching.running import running
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.size import fewest_edges, size_reasons, work_of
from pyg_accel.record.code import is_library, module_of
from pyg_accel.record.guard import NotComparable
from pyg_accel.record.program import LayerProgram, record
from pyg_accel.record.recorder import running_recorder
from pyg_accel.record.signature import Signature
from pyg_accel.settings import settings

__all__ = [
    "NONE", "Attempt", "Programs", "Sizes", "attempt", "find", "forget",
    "forget_unpatched", "layers", "note", "overwrites", "recorded",
    "why",
]  # fmt: skip

_MOST = 8  # programs of one layer, and records that came to nothing
_RECORDS = 32  # that are made of one layer, whose numbers may differ in every call
NONE: dict[str, Any] = {}
# The methods that a call begins with.
_ENTRIES = {
    "call": ("forward",),
    "propagate": ("message", "aggregate", "update", "message_and_aggregate"),
    "edge_updater": ("edge_update",),
}
_METHODS = {"forward", "propagate", "edge_updater"}.union(*_ENTRIES.values())


class Sizes(NamedTuple):
    """From which size on calls are made by a program.

    Attributes:
        graph: place of the edge_index among the tensors of a call.
        gradient: gradients are recorded.
        fewest: edges from which on the program is faster than PyG's own path.
        fewest_new: the same on a graph that was not seen before.
        row: of the report.
        row_few: the same for calls on fewer edges.
        row_new: the same for calls on a new graph of fewer.
        seen: graphs of fewer edges than that.
        limit: of the number of layers that share a new graph, returns ``fewest_new``.
    """

    graph: int
    gradient: bool
    fewest: int
    fewest_new: int
    row: Row
    row_few: Row
    row_new: Row
    seen: Seen
    limit: Callable[[int], int]


@dataclass
class Programs:
    """Of the calls of one layer, or of its propagate.

    Attributes:
        programs: the latest first.
        changes: of settings and backends, when the first of them was made; all are dropped after
            the next one.
        records: how many were made.
        failures: records that came to nothing.
        reason: why the last of them did.
        overwrites: code of the layer may change what its messages read in place afterwards; so it
            is until a record of a whole call has shown that it does not.
    """

    programs: list[LayerProgram] = field(default_factory=list)
    changes: int = 0
    records: int = 0
    failures: int = 0
    reason: str = ""
    overwrites: bool = True

    def give_up(self, reason: str) -> None:
        """Drop all programs, and record no other call."""
        self.programs, self.failures, self.reason = [], _MOST, reason


@dataclass
class _Seen:
    """What was seen of the propagate calls of a call that is being recorded."""

    formulas: dict[str, None] = field(default_factory=dict)
    backends: dict[str, None] = field(default_factory=dict)
    row_bytes: int = 0

    def outer(self) -> list[str]:
        """The formulas, but for attention weights that are computed inside of another."""
        inside = {f for f in self.formulas for g in self.formulas
                  if f != g and f.startswith("softmax_j(") and f in g}  # fmt: skip
        return [f for f in self.formulas if f not in inside]

    def text(self) -> str:
        """What the report shows of them."""
        return "; ".join(self.outer())


class Attempt(NamedTuple):
    """A call that was recorded, if it could be.

    Attributes:
        out: what it returned.
        program: of the call; None if there is none.
        formulas: for the report; empty if nothing was accelerated.
        backends: for the report.
    """

    out: Any
    program: LayerProgram | None = None
    formulas: str = ""
    backends: str = ""


class _Running(threading.local):
    seen: _Seen | None = None


_running, _UNKNOWN = _Running(), Programs()
layers: "weakref.WeakKeyDictionary[Module, dict[str, Programs]]" = weakref.WeakKeyDictionary()


def forget() -> None:
    """Drop all programs."""
    layers.clear()


def forget_unpatched() -> None:
    """Drop the programs of layers that are not accelerated any more."""
    for known in layers.keyrefs():  # other threads may add layers meanwhile
        layer = known()
        if layer is not None and not is_active(layer):
            layers.pop(layer, None)


def why(layer: Module, name: str) -> str:
    """Return why the last call of a layer that was recorded came to no program.

    Args:
        layer: the layer.
        name: ``"call"`` of the whole layer, ``"propagate"`` or ``"edge_updater"``.
    """
    known = layers.get(layer, NONE).get(name)
    return "" if known is None else known.reason


def overwrites(layer: Module) -> bool:
    """Return whether what a message of a layer reads may be changed before its gradient is made."""
    recorder = running_recorder.recorder
    if recorder is not None and recorder.whole:
        return True
    return is_users(layer) and layers.get(layer, NONE).get("call", _UNKNOWN).overwrites


def is_users(layer: Module) -> bool:
    """Return whether the code of a layer is none of torch, PyG and this package."""
    return not is_library(module_of(type(layer)))


def note(formulas: Iterable[str], backends: dict[str, None], row_bytes: int) -> bool:
    """Take a note of a propagate call of the layer that is being recorded, if one is."""
    seen = _running.seen
    if seen is not None:
        seen.formulas |= dict.fromkeys(formulas)
        seen.backends |= backends
        seen.row_bytes = max(seen.row_bytes, row_bytes)
    return seen is not None


def find(
    known: Programs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[LayerProgram, tuple[Tensor, ...]] | None:
    """Return the program that a call fits, and the tensors among its arguments.

    Args:
        known: programs of the layer.
        args: of the call.
        kwargs: of the call.
    """
    now = context()
    for program in known.programs:
        leaves = program.admit(args, kwargs)
        if leaves is not None and program.context == now and program.guard.holds():
            return program, leaves
    return None


def recorded(
    layer: MessagePassing,
    name: str,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call and record it, if it can be."""
    if get_eval_frame_callback() is not None:
        return make(layer, *args, **kwargs)  # after a break of its graph Dynamo sees what runs here
    known = layers.get(layer, NONE).get(name)
    if known is None:
        known = layers.setdefault(layer, {})[name] = Programs(changes=settings.changes)
    if known.changes != settings.changes:
        known = layers[layer][name] = Programs(changes=settings.changes)
    start = perf_counter()
    device = next((v.device for v in (*args, *kwargs.values()) if is_edge_index(v)), None)
    state = ModuleState(modules_in(layer), device or torch.device("cpu"))
    made = attempt(known, layer, name, make, args, kwargs)
    if isinstance(made, str):
        return make(layer, *args, **kwargs)
    if made.program is not None:
        leaves = made.program.signature.leaves(args, kwargs)
        sizes = made.program.sizes
        graph = leaves[sizes.graph]
        if graph.size(1) < sizes.fewest and not made.program.writes:  # as it is in later calls
            state.restore()
            stock = make if name == "call" else template(layer, name)
            sizes.row_few.add(perf_counter() - start)
            before, running.stock = running.stock, True
            try:
                return stock(layer, *args, **kwargs)
            finally:
                running.stock = before
        sizes.seen.is_new(graph)  # it is not in the next call
    if made.formulas:
        count(type(layer).__name__, made.formulas, made.backends, "", perf_counter() - start)
    return made.out


def attempt(
    known: Programs,
    layer: MessagePassing,
    name: str,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Attempt | str:
    """Make a call and record it, or return why that is not tried; then the call was not made.

    Args:
        known: programs of the layer; a new one is added, and a reason if there is none.
        layer: whose call it is.
        name: as of :func:`why`.
        make: makes the call of the layer.
        args: of the call.
        kwargs: of the call.
    """
    if reason := _unrecordable(known, layer, name, args, kwargs):
        known.reason = known.reason or reason
        return reason
    try:
        signature = Signature(args, kwargs)
        now = context()
        same = [p for p in known.programs if p.context == now and p.signature.is_like(signature)]
        alike = next((program for program in same if program.guard.holds()), None)
        if alike is not None:
            signature = Signature(args, kwargs, alike.signature)
            alike = alike if signature.dynamic or alike.exact else None
        exact, whole = alike is None and is_users(layer), name == "call" and is_users(layer)
        before, _running.seen = _running.seen, _Seen()
        seen = _running.seen
        outer, arguments.tensors = arguments.tensors, tuple(tensors_in((args, kwargs)))
        try:
            with record_choices() as backends:
                out, recorder, guard = record(
                    layer, _ENTRIES[name], make, args, kwargs, signature, exact=exact, whole=whole
                )
        finally:
            _running.seen, arguments.tensors = before, outer
    except NotComparable as error:
        known.failures, known.reason = _MOST, str(error)
        return Attempt(make(layer, *args, **kwargs))
    known.overwrites = recorder.overwrites or (known.records > 0 and known.overwrites)
    known.records += 1
    made = Attempt(out, None, seen.text(), "+".join(seen.backends) or "deferred")
    reason = recorder.reason
    if not reason and not seen.formulas:
        reason = "no propagate call that is accelerated"
    if not reason and alike is not None and not alike.agrees(recorder.graph, recorder.constants):
        reason = "what it does depends on sizes"
    if reason:
        known.failures, known.reason = known.failures + 1, reason
        return made
    program = LayerProgram(
        recorder.graph, recorder.constants, guard, signature, now,
        seen.text(), "+".join(seen.backends | backends) or "deferred", recorder.exact,
    )  # fmt: skip
    program.sizes = _sizes_of(layer, program, signature.leaves(args, kwargs), seen)
    _share(layer, program, signature.leaves(args, kwargs)[program.sizes.graph])
    known.programs = [program, *(p for p in known.programs if p is not alike)][:_MOST]
    return made._replace(program=program)


def _sizes_of(layer: Module, program: LayerProgram, leaves: list[Tensor], seen: _Seen) -> Sizes:
    """Return from which size on a program is faster than PyG's own path."""
    place = next(i for i, leaf in enumerate(leaves) if is_edge_index(leaf))
    name, device = type(layer).__name__, leaves[place].device.type
    work = work_of(seen.outer(), program.derives)
    gradient, any_size = torch.is_grad_enabled(), in_force() is not None  # as samples are of

    def limit(layers: int, new: bool = True) -> int:
        if any_size:
            return 0
        return fewest_edges(device, work, seen.row_bytes, new=new, gradient=gradient, layers=layers)

    fewest = limit(1, new=program.derives_anew), limit(1)
    row = row_of(name, program.formulas, program.backends, "")
    few, new = (
        row_of(name, "", "PyG", *size_reasons(-1, least, new=new))
        for least, new in zip(fewest, (False, True), strict=True)
    )
    return Sizes(place, gradient, *fewest, row, few, new, Seen(), limit)


def _share(layer: Module, program: LayerProgram, graph: Tensor) -> None:
    """Set the limits of all layers that were recorded on a graph: they will share new ones too."""
    key = "layers", program.sizes.gradient
    sharing: weakref.WeakKeyDictionary[Module, weakref.ref[LayerProgram]]
    sharing = derived((graph,), key, weakref.WeakKeyDictionary)
    sharing[layer] = weakref.ref(program)
    programs = [sharing[other]() for known in sharing.keyrefs() if (other := known()) is not None]
    for each in [program for program in programs if program is not None]:
        least, row = each.sizes.limit(len(sharing)), each.sizes.row_new
        new = row_of(row.layer, "", "PyG", *size_reasons(-1, least, new=True))
        each.sizes = each.sizes._replace(fewest_new=least, row_new=new)


skip_code(recorded.__code__)  # Dynamo begins no graph here


def _unrecordable(
    known: Programs,
    layer: MessagePassing,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Return why a call is not recorded, by what is known before; empty if it is."""
    if known.failures >= _MOST or known.records >= _RECORDS:
        return known.reason or "calls of many kinds"
    if get_eval_frame_callback() is not None:
        return "a call that Dynamo runs"
    own = [method for method, value in vars(layer).copy().items() if method in _METHODS
           and not is_rendered(value)]  # fmt: skip
    if own:
        return f"{', '.join(own)} set on the instance"
    if reasons := hook_reasons(layer) or (hooks_in(layer) if name == "call" else []):
        return "; ".join(reasons)
    others = any(not isinstance(mode, torch.device) for mode in modes())
    if others or torch._C._len_torch_dispatch_stack():
        return "inside a mode of torch"
    if saved_tensors_are_hooked():
        return "saved-tensor hooks are active"
    if (settings.verify and not forced.on) or torch_records():
        return "calls that are verified, or that torch records"
    if not (sys.getprofile() is None or callable(sys.getprofile())):
        return "under a profiler in C, which Python cannot switch on again after a record"
    if reasons := transform_reasons():
        return "; ".join(reasons)
    if not any(map(is_edge_index, (*args, *kwargs.values()))):
        return "a graph that is not a plain edge_index"
    return ""
