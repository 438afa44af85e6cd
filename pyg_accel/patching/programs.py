"""The programs of layers: which call has one, and when one is recorded.

A call whose arguments, modes and guard fit a program runs it, and none of the layer's code. The
first call of a kind is recorded, for all layers of the class of which its code reads equal values;
one that differs from a recorded one in sizes alone is recorded once more, with sizes that are
computed in each call, and serves for all sizes if both records agree in everything else.
"""

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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
from pyg_accel.derived import Seen
from pyg_accel.hooks import hook_reasons, hooks_in
from pyg_accel.matrices import is_edge_index
from pyg_accel.memo import tensors_in
from pyg_accel.module_state import ModuleState, modules_in
from pyg_accel.ops.plan import arguments
from pyg_accel.patching.context import context, modes
from pyg_accel.patching.overrides import is_rendered, template
from pyg_accel.patching.reasons import (
    forced,
    torch_records,
    transform_reasons,
)
from pyg_accel.patching.running import running
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.size import fewest_edges, size_reasons, work_of
from pyg_accel.record.code import is_library, module_of
from pyg_accel.record.finals import final
from pyg_accel.record.guard import NotComparable, Reads, unchanged
from pyg_accel.record.program import LayerProgram, State, record
from pyg_accel.record.recorder import running_recorder
from pyg_accel.record.signature import Signature
from pyg_accel.settings import settings

__all__ = [
    "KEY", "Attempt", "OfClass", "Programs", "Sizes", "adopt", "attempt", "find", "forget", "note",
    "overwrites", "own", "recorded", "why",
]  # fmt: skip

_MOST = 8  # programs of one layer
_OF_CLASS = 64  # programs of a class
_FAILURES = 16  # kinds of calls of a class whose record came to nothing
_WAITS = (2, 64)  # calls until a kind that came to nothing is tried again, and their growth
_WASTED = 32  # programs of a class, one after the other, that were never used
KEY = "_pyg_accel_programs"  # attribute of layers, and of classes
# The methods that a call begins with.
_ENTRIES = {
    "call": ("forward",),
    "propagate": ("propagate", "message", "aggregate", "update", "message_and_aggregate"),
    "edge_updater": ("edge_updater", "edge_update"),
}
_METHODS = {name for names in _ENTRIES.values() for name in names}


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
    """

    graph: int
    gradient: bool
    fewest: int
    fewest_new: int
    row: Row
    row_few: Row
    row_new: Row
    seen: Seen


class OfClass:
    """What was recorded of the calls of all layers of a class.

    Attributes:
        programs: by what code reads and by what it read of the layer, the latest first.
        failures: why records came to nothing, by kinds of calls; how many calls are left until the
            next record, and were in between.
        reason: why the last of them did.
        version: changes whenever there is a new program.
    """

    def __init__(self) -> None:
        self.programs: dict[Reads, dict[Any, list[LayerProgram]]] = {}
        self.failures: dict[Any, tuple[str, int, int]] = {}
        self.reason = ""
        self.version = 0
        self._recent: OrderedDict[State, tuple[Reads, Any]] = OrderedDict()
        self._wasted: list[State] = []  # the last programs, since one was used

    def add(self, program: LayerProgram, instead: LayerProgram | None) -> None:
        """Add a program, in place of another one if there is one."""
        self.version += 1
        used = any(state.used for state in self._wasted)
        self._wasted = [program.state] if used else [*self._wasted, program.state]
        if not program.guard.shareable:
            return
        place = program.guard.shared.reads, program.guard.key
        if instead is not None:
            self._drop(instead.state)
        self.programs.setdefault(place[0], {}).setdefault(place[1], []).insert(
            0, program.of(program.guard.detached())
        )
        self._recent[program.state] = place
        while len(self._recent) > _OF_CLASS:
            self._drop(next(iter(self._recent)))

    def _drop(self, state: State) -> None:
        reads, key = self._recent.pop(state, (None, None))
        kinds = self.programs.get(reads, {})  # type: ignore[arg-type]
        left = [program for program in kinds.pop(key, []) if program.state is not state]
        if left:
            kinds[key] = left

    def fail(self, kind: Any, reason: str, *, again: bool = False) -> None:
        """Note that a record came to nothing; soon it is tried again if it may succeed later."""
        grows = _WAITS[not again]
        waits = self.failures.get(kind, ("", 0, 0))[2] * grows or grows // 2
        self.reason, self.failures[kind] = reason, (reason, waits - 1, waits)

    def refusal(self, kind: Any) -> str:
        """Return why a kind of call is not recorded; empty if it is."""
        reason, left, waits = self.failures.get(kind, ("", 0, 0))
        if left:
            self.failures[kind] = reason, left - 1, waits
            return reason
        if waits:
            return ""
        if len(self.failures) >= _FAILURES:
            return self.reason
        wasted = len(self._wasted) >= _WASTED and not any(state.used for state in self._wasted)
        return "calls of many kinds" if wasted else ""


class Programs:
    """Of the calls of one layer, or of its propagate.

    Args:
        layer: the layer.
        of_class: what all layers of its class share.

    Attributes:
        programs: the latest first.
        overwrites: code of the layer may change what its messages read in place afterwards; so it
            is until a record of a whole call has shown that it does not.
        looked: version of the class when none of its programs served, and none could be recorded.
        switched: changes of patch() at which the layer was accelerated.
    """

    __slots__ = ("layer", "looked", "of_class", "overwrites", "programs", "switched")

    def __init__(self, layer: Module, of_class: OfClass) -> None:
        self.layer, self.of_class = layer, of_class
        self.programs: list[LayerProgram] = []
        self.overwrites, self.looked, self.switched = True, -1, -1

    def give_up(self, reason: str) -> None:
        """Drop all programs, and record no other call."""
        self.programs, self.of_class = [], OfClass()
        self.of_class.failures = dict.fromkeys(range(_FAILURES), (reason, 0, 0))
        self.of_class.reason = reason

    def insert(self, program: LayerProgram, instead: LayerProgram | None = None) -> None:
        """Add a program as the latest."""
        others = [p for p in self.programs if p is not instead and p.state is not program.state]
        self.programs = [program, *others][:_MOST]
        self.looked = -1


class _Own(dict[str, Any]):
    """The programs of a layer or a class, in an attribute of it: they live as long as it does.

    Copies of the layer, also those by pickle, get an empty dictionary in place of it.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {}


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


_running = _Running()
_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()  # layers and classes with programs


def forget() -> None:
    """Drop all programs."""
    while _owners:
        with suppress(KeyError):  # another thread may have been faster, or the owner has died
            owner = _owners.pop()
            if type(vars(owner).get(KEY)) is _Own:
                delattr(owner, KEY)


def own(layer: Module, name: str) -> Programs | None:
    """Return the programs of a layer that are still those of its class; None if there are none."""
    known = vars(layer).get(KEY)
    programs = None if known is None else known.get(name)
    if programs is None or programs.layer is not layer:
        return None  # a copy that shares the attributes
    return programs  # type: ignore[no-any-return]


def _made(layer: Module, name: str) -> Programs:
    """Return the programs of a layer, new ones if there are none."""
    programs, cls = own(layer, name), type(layer)
    of_class: Any = vars(cls).get(KEY)
    if type(of_class) is not _Own:
        of_class = _Own()
        setattr(cls, KEY, of_class)
        _owners.add(cls)
    kinds = of_class.setdefault(name, OfClass())
    if programs is None or programs.of_class is not kinds:
        known = vars(layer).get(KEY)
        if type(known) is not _Own or any(p.layer is not layer for p in known.values()):
            known = vars(layer)[KEY] = _Own()
            _owners.add(layer)
        programs = known[name] = Programs(layer, kinds)
    return programs


def why(layer: Module, name: str) -> str:
    """Return why the last call of a layer that was recorded came to no program.

    Args:
        layer: the layer.
        name: ``"call"`` of the whole layer, ``"propagate"`` or ``"edge_updater"``.
    """
    programs = own(layer, name)
    return "" if programs is None else programs.of_class.reason


def overwrites(layer: Module) -> bool:
    """Return whether what a message of a layer reads may be changed before its gradient is made."""
    recorder = running_recorder.recorder
    if recorder is not None and recorder.whole:
        return True
    programs = own(layer, "call")
    return is_users(layer) and (programs is None or programs.overwrites)


def is_users(layer: Module) -> bool:
    """Return whether the code of a layer is none of torch, PyG and this package."""
    return not is_library(module_of(type(layer)))


def adopt(
    layer: Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], now: tuple[Any, ...]
) -> bool:
    """Give a layer a program for a call that it has not made, or not with what it has now.

    It was recorded for another layer of the class, or for this one with equal values; False if
    there is none.
    """
    programs = own(layer, name)
    if programs is None:
        of_class = vars(type(layer)).get(KEY)
        if type(of_class) is not _Own or name not in of_class:
            return False
        programs = _made(layer, name)
    if programs.looked == programs.of_class.version:
        return False
    for program in _matching(programs, now):
        if program.admit(args, kwargs) is not None:
            programs.insert(program)
            programs.overwrites = program.state.overwrites
            return True
    return False


def _matching(programs: Programs, now: tuple[Any, ...]) -> Iterator[LayerProgram]:
    """Yield programs of a context whose guards hold: of a class, and of the layer alone."""
    for program in programs.programs:
        if not program.guard.shareable and program.context == now and program.guard.holds():
            yield program
    bound = {program.state: program for program in programs.programs}
    for reads, kinds in [*programs.of_class.programs.items()]:
        walk = reads.walk([])
        try:
            walk.follow("", programs.layer)
        except NotComparable:
            continue
        for program in [*kinds.get(tuple(walk.key), ())]:
            if program.context != now or not program.guard.serves(walk):
                continue
            mine = bound.get(program.state)
            if mine is None:
                mine = program.of(program.guard.of(programs.layer, walk))
            else:
                mine.guard.take(walk)
            yield mine


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
        leaves, guard = program.admit(args, kwargs), program.guard
        if leaves is not None and program.context == now:
            if not guard.apart(map(id, leaves)):
                continue
            if unchanged(guard.compared) or guard.renew():
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
    known = _made(layer, name)
    start = perf_counter()
    device = next((v.device for v in (*args, *kwargs.values()) if is_edge_index(v)), None)
    state = ModuleState(modules_in(layer), device or torch.device("cpu"))
    made = attempt(known, layer, name, make, args, kwargs)
    if isinstance(made, str):
        known.looked = known.of_class.version
        return make(layer, *args, **kwargs)
    if made.program is None:
        known.looked = known.of_class.version
    else:
        leaves = made.program.signature.leaves(args, kwargs)
        sizes = made.program.state.sizes
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
    if reason := _unrecordable(layer, name, args, kwargs):
        known.of_class.reason = known.of_class.reason or reason
        return reason
    failed = known.of_class.fail
    kind: Any = None
    try:
        signature = Signature(args, kwargs)
        now = context()
        kind = _structure(layer), signature.key, now
        if reason := known.of_class.refusal(kind):
            return reason
        alike = next((p for p in (*_held(known, now), *_matching(known, now))
                      if p.signature.is_like(signature)), None)  # fmt: skip
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
        failed(kind, str(error), again=error.may_change)
        return Attempt(make(layer, *args, **kwargs))
    known.overwrites = recorder.overwrites or (bool(known.programs) and known.overwrites)
    made = Attempt(out, None, seen.text(), "+".join(seen.backends) or "deferred")
    reason = recorder.reason
    if not reason and not seen.formulas:
        reason = "no propagate call that is accelerated"
    if not reason and alike is not None and not alike.agrees(recorder.graph, recorder.constants):
        reason = "what it does depends on sizes"
    if reason or guard is None:
        failed(kind, reason, again=recorder.may_change)
        return made
    state = State(settings.changes)
    state.overwrites = known.overwrites
    program = LayerProgram(
        recorder.graph, guard, signature, now, seen.text(),
        "+".join(seen.backends | backends) or "deferred", recorder.exact,
        any(tensor.is_cuda for tensor in signature.leaves(args, kwargs)), state,
    )  # fmt: skip
    state.sizes = _sizes_of(layer, program, signature.leaves(args, kwargs), seen)
    known.of_class.add(program, alike)
    known.insert(program, alike)
    return made._replace(program=program)


def _held(known: Programs, now: tuple[Any, ...]) -> Iterator[LayerProgram]:
    """Yield the programs of a layer of a context whose guards hold."""
    return (p for p in known.programs if p.context == now and p.guard.holds())


def _structure(layer: Module) -> tuple[Any, ...]:
    """Return what layers have in common that probably run the same code."""
    return tuple([
        (type(module), *filter(None, map(final, vars(module).values())))
        for module in modules_in(layer)
    ])  # fmt: skip


def _sizes_of(layer: Module, program: LayerProgram, leaves: list[Tensor], seen: _Seen) -> Sizes:
    """Return from which size on a program is faster than PyG's own path."""
    place = next(i for i, leaf in enumerate(leaves) if is_edge_index(leaf))
    name, device = type(layer).__name__, leaves[place].device.type
    work = work_of(seen.outer(), program.derives)
    gradient, least, least_new = torch.is_grad_enabled(), 0, 0  # samples are of any size
    if in_force() is None:
        least, least_new = (
            fewest_edges(device, work, seen.row_bytes, new=new, gradient=gradient)
            for new in (program.derives_anew, True)
        )
    row = row_of(name, program.formulas, program.backends, "")
    few, new = (
        row_of(name, "", "PyG", *size_reasons(-1, edges, new=new))
        for edges, new in ((least, False), (least_new, True))
    )
    return Sizes(place, gradient, least, least_new, row, few, new, Seen())


skip_code(recorded.__code__)  # Dynamo begins no graph here


def _unrecordable(
    layer: MessagePassing,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """Return why a call is not recorded, by what is known before; empty if it is."""
    if get_eval_frame_callback() is not None:
        return "a call that Dynamo runs"
    own = [method for method, value in vars(layer).copy().items() if method in _METHODS
           and not is_rendered(value)]  # fmt: skip
    if own:
        return f"{', '.join(own)} set on the instance"
    if reasons := hook_reasons(layer) or [r for m in modules_in(layer) for r in hooks_in(m)]:
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
