"""Everything besides arguments that a recorded call depends on.

A program replaces the code of a layer while all values that this code reads are unchanged. A
:class:`~pyg_accel.record.walk.Walk` finds these by the names in the code, first while it runs, and
again afterwards. A warm call compares identities in C (csrc/cpu/guard.cpp). If one differs, the
layer is walked once more, and the program stays valid if all final values are equal; it then takes
the tensors of that walk. Such a walk also lets a program serve other layers of a class.
"""

import types
from collections.abc import Callable, Iterable
from copy import copy
from gc import get_referents
from operator import is_not
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook

from pyg_accel.record.code import attributes_in, codes_of
from pyg_accel.record.walk import NotComparable, Walk
from pyg_accel.runtime.native import identities_hold

__all__ = ["Guard", "NotComparable", "Reading", "Reads", "unchanged"]

_CALLED = ("forward", "__call__")  # methods of modules that torch calls


class Reads(NamedTuple):
    """Names that code reads.

    Attributes:
        names: of attributes.
        of_modules: of attributes that this package reads from modules.
        optional: of attributes that may be absent.
        ran: code objects.
    """

    names: frozenset[str]
    of_modules: frozenset[str]
    optional: frozenset[str]
    ran: frozenset[types.CodeType]

    def walk(self, outer: list[Any] | None = None) -> Walk:
        """Begin a walk by these names."""
        return Walk(self.names, self.ran, self.of_modules, self.optional, outer)


# Kinds of entries (kind, subjects, names, values), as in csrc/cpu/guard.cpp.
_LENGTHS, _TYPES, _ATTRIBUTES, _ITEMS, _LACKS, _ELEMENTS, _REFERENTS, _CALL = range(8)
_Entry = tuple[int, Any, Any, tuple[Any, ...]]


def _entries_of(walk: Walk) -> tuple[_Entry, ...]:
    """Return the notes of a walk for the comparison in C: live objects, and their values."""
    contents: list[tuple[Any, Iterable[Any]]] = [*walk.orders.values(), *walk.lists.values()]
    for table, items in walk.tables.values():
        contents += (table, items), (table.values(), items.values())
    sized = [(space, len(space)) for space in walk.sized]
    sized += [(container, 0) for container, items in contents if not items]
    objects, cells = (*walk.objects,), [*walk.cells.values()]
    entries: list[_Entry] = [
        (_LENGTHS, tuple(c for c, _ in sized), (), tuple(length for _, length in sized)),
        (_TYPES, objects, (), tuple(map(type, objects))),
        (_ATTRIBUTES, objects, "__dict__", tuple(map(vars, objects))),
        (_ATTRIBUTES, (*walk.classes,), "__mro__", tuple(c.__mro__ for c in walk.classes)),
        (_ATTRIBUTES, tuple(c for c, _ in cells), "cell_contents", tuple(v for _, v in cells)),
        (_ATTRIBUTES, (*walk.named,), "__name__", tuple(value.__name__ for value in walk.named)),
        # Their code and defaults; reading attributes of functions calls audit hooks of the process,
        # and filelock, which torch imports, has one.
        (_REFERENTS, (*walk.followed,), (), (*get_referents(*walk.followed),)),
    ]  # fmt: skip
    entries = [entry for entry in entries if entry[1]]
    entries += [(_LACKS, space, (*names,), ()) for space, names in walk.absent.values() if names]
    entries += [(_ELEMENTS, c, (), (*items,)) for c, items in contents if items]
    entries += [(_ITEMS, space, (*noted,), (*noted.values(),))
                for space, noted in walk.spaces.values() if noted]  # fmt: skip
    if walk.tensors:
        guards = TensorGuards(*walk.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        entries.append((_CALL, guards.check, (*walk.tensors,), ()))
    return (*entries,)


class Shared:
    """The part of what code reads that all layers of a class share: classes, modules, functions.

    Args:
        reads: by name.
        entries: functions that a call runs first.
        roots: classes, modules and globals that the layer refers to.
    """

    def __init__(
        self, reads: Reads, entries: Iterable[Callable[..., Any]], roots: list[Any]
    ) -> None:
        self.reads, self._entries, self._roots = reads, entries, roots
        self.walk = self._walked()
        self.compared = _entries_of(self.walk)

    def _walked(self) -> Walk:
        walk = self.reads.walk()
        walk.share(Tensor)  # by instructions and names, anything calls its methods
        for entry in self._entries:
            walk.follow(entry.__name__, entry)
        for root in self._roots:
            walk.share(root)
        return walk

    def holds(self) -> bool:
        """Return whether all final values are unchanged."""
        if unchanged((self.compared,)):
            return True
        try:
            walk = self._walked()
        except NotComparable:
            return False
        if walk.key != self.walk.key or any(map(is_not, walk.tensors, self.walk.tensors)):
            return False
        self.walk, self.compared = walk, _entries_of(walk)
        return True


class Guard:
    """The values that the code of a program reads: of one layer, and shared by all layers.

    Args:
        layer: the layer.
        reads: by name.
        shared: the shared part; None to find it.
        entries: functions that a call runs first.

    Attributes:
        key: equal for layers that a program serves.
        compared: entries of the layer, and of the shared part.
        apart: returns whether tensors, by identity, differ from all read tensors.
        shared: the shared part.
        aliases: objects of the layer that the shared part reaches too.
        shareable: whether other layers may have the same shared part.
        floats: names of floats.
        values: constants of the program for its compiled functions.

    Raises:
        NotComparable: naming an incomparable value.
    """

    def __init__(
        self, layer: Module, reads: Reads, shared: Shared | None, entries: Iterable[Any] = ()
    ) -> None:
        outer: list[Any] = []
        walk = reads.walk(outer)
        walk.follow("", layer)
        self._layer, self._walk, self.key = layer, walk, tuple(walk.key)
        self.shared = Shared(reads, entries, outer) if shared is None else shared
        self.shareable, self.floats = True, walk.floats | self.shared.walk.floats
        self.aliases = walk.aliases(self.shared.walk)
        self.values, self._places = types.SimpleNamespace(), dict[str, int]()
        self.take(walk)

    def unchanged_since(self, before: Walk) -> bool:
        """Return whether all compared values were the same in an earlier walk."""
        return all(walk.unchanged_since(before) for walk in (self._walk, self.shared.walk))

    def fill(self, constants: dict[str, Any]) -> None:
        """Store the constants of a program, and the places of tensors of the layer."""
        places = {id(tensor): place for place, tensor in enumerate(self._walk.tensors)}
        others = {id(tensor) for tensor in self.shared.walk.tensors}
        for name, value in constants.items():
            if not isinstance(value, Tensor):
                continue
            if id(value) in places:
                self._places[name] = places[id(value)]
            elif id(value) in others:
                self.shareable = False
            else:
                raise NotComparable("a tensor that no function of torch has made")
        self.values = types.SimpleNamespace(**constants)

    def check(self, inputs: Iterable[Tensor]) -> None:
        """Raise if code reads more of the arguments than tensors."""
        if not self.apart(map(id, inputs)):
            raise NotComparable("an argument that is an attribute too", may_change=True)
        for tensor in inputs:
            if not self.shared.reads.names.isdisjoint(vars(tensor)):
                raise NotComparable("an attribute of a tensor", may_change=True)

    def detached(self) -> "Guard":
        """Return a guard of no layer, for :meth:`of`."""
        other, constants = copy(self), vars(self.values).items()
        other.values = types.SimpleNamespace(
            **{k: v for k, v in constants if k not in self._places}
        )
        del other._layer, other._walk, other.compared, other.apart
        return other

    def of(self, layer: Module, walk: Walk) -> "Guard":
        """Return the guard of another layer, given a walk of it with the same key."""
        other = copy(self)
        other._layer, other.values = layer, types.SimpleNamespace(**vars(self.values))
        other.take(walk)
        return other

    def take(self, walk: Walk) -> None:
        """Compare with another walk of the layer from now on, and read its tensors."""
        self._walk, values = walk, vars(self.values)
        for name, place in self._places.items():
            values[name] = walk.tensors[place]
        self.apart = frozenset(map(id, (*walk.tensors, *self.shared.walk.tensors))).isdisjoint
        # Last, or another thread would run the program with the values of before.
        self.compared = _entries_of(walk), self.shared.compared

    def holds(self) -> bool:
        """Return whether all final values are unchanged."""
        return unchanged(self.compared) or self.renew()

    def renew(self) -> bool:
        """Walk again; return whether all final values are unchanged."""
        walk = self.shared.reads.walk([])
        try:
            walk.follow("", self._layer)
        except NotComparable:
            return False
        if tuple(walk.key) != self.key or not self.serves(walk):
            return False
        self.take(walk)
        return True

    def serves(self, walk: Walk) -> bool:
        """Return whether the shared part is unchanged, given a walk with the same key."""
        return self.shared.holds() and walk.aliases(self.shared.walk) == self.aliases


def unchanged(parts: tuple[tuple[_Entry, ...], ...]) -> bool:
    """Return whether all compared objects are the same."""
    return identities_hold()(parts) == 1 and not _has_any_global_hook()


class Reading:
    """The values that the code of a layer reads while it runs.

    Args:
        layer: the layer.
        entries: functions that a call runs first, such as the layer's ``forward``.

    Raises:
        NotComparable: naming what cannot be compared.
    """

    def __init__(self, layer: Module, entries: Iterable[Callable[..., Any]]) -> None:
        self._layer, self._entries = layer, [*entries]
        self._walk = Walk()
        self._walk.name((*_CALLED, *(entry.__name__ for entry in self._entries)))
        self._walk.follow("", layer)
        for entry in self._entries:
            self._walk.follow(entry.__name__, entry)
        self._ran: set[types.CodeType] = set()

    def is_reached(self, code: types.CodeType) -> bool:
        """Return whether code belongs to a function that was reached by names."""
        return code in self._walk.functions

    def enter(self, code: types.CodeType) -> None:
        """Note that code runs."""
        if code not in self._ran:
            self._ran.add(code)
            self._walk.enter(code)

    def name(self, code: types.CodeType) -> None:
        """Note that code of this package reads the layer."""
        self._walk.name(attributes_in(code), of_modules=True)

    def settle(self) -> Guard:
        """Return the guard of the code that ran; called once, after the call was recorded."""
        before = self._walk
        inner = {
            inside for code in before.functions if code in self._ran for inside in codes_of(code)
        }
        for code in self._ran - inner:
            raise NotComparable(f"'{code.co_name}' is not reached by a name or an attribute")
        reads = Reads(
            frozenset(before.names), frozenset(before.of_modules), frozenset(before.optional),
            frozenset(self._ran),
        )  # fmt: skip
        guard = Guard(self._layer, reads, None, self._entries)
        if not guard.unchanged_since(before):
            reason = "it changes what it reads: an attribute or a container"
            raise NotComparable(reason, may_change=True)
        return guard
