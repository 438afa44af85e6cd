"""The programs of layers and of their classes.

A call runs the program that fits its arguments, modes and guard, in place of the code of the layer.
Layers of a class share programs if the code reads equal values from them.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from pyg_accel.graph.derived import GraphHistory
from pyg_accel.patching.context import context, kind_of
from pyg_accel.record.code import is_library, module_of
from pyg_accel.record.guard import NotComparable, Reads
from pyg_accel.record.program import LayerProgram, State
from pyg_accel.record.signature import key_of
from pyg_accel.runtime.module_state import PROGRAMS, modules_in
from pyg_accel.runtime.report import Row, row_of
from pyg_accel.runtime.state import running

__all__ = [
    "FAILURES", "OfClass", "Programs", "Sizes", "adopt", "find", "forget", "is_users",
    "matching", "overwrites", "programs_of", "why",
]  # fmt: skip

_MOST = 8  # programs of one layer
_OF_CLASS = 64  # programs of a class
FAILURES = 16  # kinds of calls of a class with failed records
_WAITS = (2, 64)  # calls until a failed kind is recorded again, and their growth
_WASTED = 32  # consecutive unused programs of a class
_OPTIONS = {bool, int, float, str, type(None)}


class Sizes(NamedTuple):
    """The least sizes of calls by a program.

    Attributes:
        graph: place of the edge_index among the tensors of a call.
        gradient: whether gradients are recorded.
        fewest: least edges for which the program is faster than PyG's own path.
        fewest_new: the same for a new graph.
        row: of the report.
        row_few: row for calls on fewer edges.
        row_new: row for calls on a new graph with fewer edges.
    """

    graph: int
    gradient: bool
    fewest: int
    fewest_new: int
    row: Row
    row_few: Row
    row_new: Row

    def of_any_size(self, formulas: str) -> "Sizes":
        """Return sizes without limits, for a program of other formulas."""
        row = row_of(self.row.layer, formulas, self.row.backend, "")
        return self._replace(fewest=0, fewest_new=0, row=row)


class OfClass:
    """The programs of all layers of a class.

    Attributes:
        programs: by the names that code reads and by their values, the latest first.
        failures: by kind of call, the reason of a failed record, the calls until the next record,
            and the last number of these.
        reason: of the last failure.
        version: changes with every new program.
    """

    def __init__(self) -> None:
        self.programs: dict[Reads, dict[Any, list[LayerProgram]]] = {}
        self.failures: dict[Any, tuple[str, int, int]] = {}
        self.reason = ""
        self.version = 0
        self._recent: OrderedDict[State, tuple[Reads, Any]] = OrderedDict()
        self._wasted: list[State] = []  # the last programs, since the last used one

    def add(self, program: LayerProgram, instead: LayerProgram | None) -> None:
        """Add a program, possibly in place of another one."""
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
        """Note a failed record, which is repeated soon if it may succeed ``again``."""
        grows = _WAITS[not again]
        waits = self.failures.get(kind, ("", 0, 0))[2] * grows or grows // 2
        self.reason, self.failures[kind] = reason, (reason, waits - 1, waits)

    def refusal(self, kind: Any, *, again: bool = True) -> str:
        """Return why a kind of call is not recorded; empty if it is."""
        reason, left, waits = self.failures.get(kind, ("", 0, 0))
        if waits and again and not left:
            return ""
        if waits:
            self.failures[kind] = reason, left - again, waits
            return reason
        if len(self.failures) >= FAILURES:
            return self.reason
        wasted = len(self._wasted) >= _WASTED and not any(state.used for state in self._wasted)
        return "calls of many kinds" if wasted else ""


class Programs:
    """The programs of one layer, or of its propagate; subclasses transform programs.

    Args:
        layer: the layer.
        of_class: programs of its class.

    Attributes:
        programs: the latest first.
        overwrites: whether code of the layer may change inputs of its messages in place; True
            until a record of a whole call shows the contrary.
        looked: version of the class in which no program fitted; of calls for which a program is
            stale, by kind.
        switched: changes of patch() at which the layer was accelerated.
        history: graphs with fewer edges than new ones need.
        drift: largest factor between sizes of a call and of a transformed program; 0 for any.
    """

    __slots__ = ("history", "layer", "looked", "of_class", "overwrites", "programs", "switched")
    drift = 0

    def __init__(self, layer: Module, of_class: OfClass) -> None:
        self.layer, self.of_class, self.history = layer, of_class, GraphHistory()
        self.programs, self.looked = list[LayerProgram](), dict[Any, int]()
        self.overwrites, self.switched = True, -1

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why a call is not transformed; empty if it is."""
        return ""

    def kind(self, args: tuple[Any, ...], kwargs: dict[str, Any], now: tuple[Any, ...]) -> Any:
        """Return a key of calls that probably run the same code, or raise NotComparable."""
        arguments = key_of(args, kwargs)
        values = [v for m in modules_in(self.layer) for v in (type(m), *vars(m).copy().values())]
        options = tuple([v for v in values if type(v) in _OPTIONS or isinstance(v, type)])
        return options, arguments, kind_of(now)

    def transformed(
        self, program: LayerProgram | None, kind: Any, leaves: list[Tensor]
    ) -> LayerProgram | None:
        """Return the program to store for a call that was recorded.

        Args:
            program: as recorded; None if there is none.
            kind: of the call, to note a failure.
            leaves: the tensors among the arguments of the call.
        """
        return program

    def give_up(self, reason: str) -> None:
        """Drop all programs, and record no other call."""
        self.programs, self.of_class = [], OfClass()
        self.of_class.failures = dict.fromkeys(range(FAILURES), (reason, 0, 0))
        self.of_class.reason = reason

    def store(self, program: LayerProgram, instead: LayerProgram | None = None) -> None:
        """Add a program as the latest, for all layers of the class."""
        self.of_class.add(program, instead)
        self.insert(program, instead)

    def insert(self, program: LayerProgram, instead: LayerProgram | None = None) -> None:
        """Add a program as the latest."""
        others = [p for p in self.programs if p is not instead and p.state is not program.state]
        self.looked = {} if len(others) == len(self.programs) else self.looked  # one may be dropped
        self.programs = [program, *others][:_MOST]


class Owned(dict[str, Any]):
    """The programs of a layer or a class, stored in an attribute of it.

    Copies of the layer, and its pickles, get an empty dictionary instead.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {}


_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()  # layers and classes with programs


def forget() -> None:
    """Drop all programs."""
    while _owners:
        with suppress(KeyError):  # removed by another thread, or a dead owner
            owner = _owners.pop()
            if type(vars(owner).get(PROGRAMS)) is Owned:
                delattr(owner, PROGRAMS)


def find(layer: Module, name: Any) -> Programs | None:
    """Return the programs of a layer; None if there are none."""
    owned = vars(layer).get(PROGRAMS)
    programs = None if owned is None else owned.get(name)
    if programs is None or programs.layer is not layer:
        return None  # a copy that shares the attributes
    return programs  # type: ignore[no-any-return]


def programs_of(layer: Module, name: Any) -> Programs:
    """Return the programs of a layer, new ones if there are none."""
    programs, cls = find(layer, name), type(layer)
    of_class: Any = vars(cls).get(PROGRAMS)
    if type(of_class) is not Owned:
        of_class = Owned()
        setattr(cls, PROGRAMS, of_class)
        _owners.add(cls)
    kinds = of_class.setdefault(name, OfClass())
    if programs is None or programs.of_class is not kinds:
        owned = vars(layer).get(PROGRAMS)
        if type(owned) is not Owned or any(p.layer is not layer for p in [*owned.values()]):
            owned = vars(layer)[PROGRAMS] = Owned()
            _owners.add(layer)
        programs = owned[name] = Programs(layer, kinds)
    return programs


def why(layer: Module, name: Any) -> str:
    """Return why the last record of a layer failed.

    Args:
        layer: the layer.
        name: ``"call"`` of the whole layer, ``"propagate"`` or ``"edge_updater"``.
    """
    programs = find(layer, name)
    return "" if programs is None else programs.of_class.reason


def overwrites(layer: Module) -> bool:
    """Return whether inputs of messages may change in place before their gradient."""
    recorder = running.recorder
    if recorder is not None and recorder.whole:
        return True
    programs = find(layer, "call")
    return is_users(layer) and (programs is None or programs.overwrites)


def is_users(layer: Module) -> bool:
    """Return whether the class of a layer is not from torch, PyG or this package."""
    return not is_library(module_of(type(layer)))


def adopt(
    programs: Programs | None,
    layer: Module,
    name: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    now: tuple[Any, ...] | None,
    stale: bool,
) -> bool:
    """Add a program from the class to a layer, if one fits a call; return whether it did.

    It was recorded for another layer of the class, or for earlier values of this one: ``stale`` if
    a program of the layer would fit but for what its code reads.
    """
    if programs is None:
        if name not in vars(type(layer)).get(PROGRAMS, ()):
            return False
        programs = programs_of(layer, name)
    version, looked = programs.of_class.version, programs.looked
    kind = programs.kind(args, kwargs, now) if now and stale else None
    if looked.get(kind) == version:
        return False
    for program in matching(programs, now or context()):
        if (leaves := program.admit(args, kwargs)) and program.guard.apart(map(id, leaves)):
            programs.insert(program)
            programs.overwrites = program.state.overwrites
            return True
    programs.looked = {**(looked if len(looked) < FAILURES else {}), kind: version}
    return False


def matching(programs: Programs, now: tuple[Any, ...]) -> Iterator[LayerProgram]:
    """Yield the programs of a context with valid guards, from the layer and its class."""
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
