"""Everything besides arguments that a recorded call depends on.

A program replaces the code of a layer as long as all that this code reads is unchanged. What it
reads is found by :class:`~pyg_accel.record.walk.Walk`, first while the code runs, by the names in
it, and again when it has run. A warm call compares identities, by loops in C; where one differs, the
layer is walked once more, and the program stays valid if all final values are equal. It then takes
the tensors that the walk has found. By such a walk a program also serves other layers of a class.
"""

import operator
import types
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from gc import get_referents
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook

from pyg_accel.record.code import codes_of, names_of
from pyg_accel.record.walk import NotComparable, Walk

__all__ = ["Guard", "NotComparable", "Reading", "Reads", "unchanged"]

_CALLED = ("forward", "__call__")  # methods of modules that torch calls


class Reads(NamedTuple):
    """What code reads by name.

    Attributes:
        names: of attributes.
        of_modules: those that this package reads.
        asked: those that may be absent.
        ran: code objects.
    """

    names: frozenset[str]
    of_modules: frozenset[str]
    asked: frozenset[str]
    ran: frozenset[types.CodeType]

    def walk(self, outer: list[Any] | None = None) -> Walk:
        """Begin a walk by these names."""
        return Walk(self.names, self.ran, of_modules=self.of_modules, asked=self.asked, outer=outer)


class _Compared(NamedTuple):
    """What a walk has noted, as loops in C compare it: live objects, and what they had."""

    sized: list[Any]
    lengths: list[int]
    keyed: list[Mapping[Any, Any]]
    keys: list[Any]
    views: list[Iterable[Any]]
    items: list[Any]
    getters: list[Callable[[Any], tuple[Any, ...]]]
    spaces: list[Mapping[str, Any]]
    values: list[Any]
    lacking: list[Mapping[str, Any]]
    lacked: list[str]
    objects: list[Any]
    types: list[type]
    classes: list[type]
    bases: list[tuple[type, ...]]
    functions: list[types.FunctionType]
    referents: int
    get_parts: Callable[[Any], tuple[Any, ...]]
    parts: tuple[Any, ...]
    cells: list[types.CellType]
    contents: list[Any]

    @classmethod
    def of(cls, walk: Walk) -> "_Compared":
        """Return what a walk has noted."""
        tables = [*walk.tables.values()]
        lists = [(c, items) for c, items in walk.lists.values()]
        orders = [(table, [*items]) for table, items in tables] + [*walk.orders.values()]
        views = [(table.values(), [*items.values()]) for table, items in tables] + lists
        spaces = [(space, noted) for space, noted in walk.spaces.values() if noted]
        getters = [_getter(noted) for _, noted in spaces]
        lacking = [(space, name) for space, names in walk.absent.values() for name in names]
        cells = [*walk.cells.values()]
        sized = [container for container, _ in (*orders, *lists)] + walk.sized
        orders, views = ([e for e in entries if e[1]] for entries in (orders, views))
        return cls(
            sized, [*map(len, sized)],
            [space for space, _ in orders], [name for _, names in orders for name in names],
            [view for view, _ in views], [item for _, items in views for item in items],
            getters, [space for space, _ in spaces],
            [*chain.from_iterable(g(noted) for g, (_, noted) in zip(getters, spaces, strict=True))],
            [space for space, _ in lacking], [name for _, name in lacking],
            walk.objects, [*map(type, walk.objects)],
            walk.classes, [*map(_bases_of, walk.classes)],
            walk.followed, *_parts_of(walk.followed),
            [cell for cell, _ in cells], [content for _, content in cells],
        )  # fmt: skip


class Shared:
    """The part of what code reads that all layers of a class share: classes, modules, functions.

    Args:
        reads: by name.
        roots: where it begins.
    """

    def __init__(self, reads: Reads, roots: list[Any]) -> None:
        self.reads, self._roots = reads, roots
        self.walk = self._walked()
        self.compared = _Compared.of(self.walk)

    def _walked(self) -> Walk:
        walk = self.reads.walk()
        for root in self._roots:
            if isinstance(root, types.FunctionType):
                walk.follow(root.__name__, root)
            walk.share(root)
        return walk

    def holds(self) -> bool:
        """Return whether all final values are unchanged."""
        if unchanged(self.compared):
            return True
        try:
            walk = self._walked()
        except NotComparable:
            return False
        if walk.key != self.walk.key or any(map(_is_not, walk.tensors, self.walk.tensors)):
            return False
        self.walk, self.compared = walk, _Compared.of(walk)
        return True


class Guard:
    """What the code of a program reads of one layer, and what all layers share of it.

    Args:
        layer: the layer.
        reads: by name.
        shared: what layers share; None to find it.
        roots: functions that a call runs first.

    Attributes:
        key: equal for layers that a program serves.
        compared: what is compared of the layer.
        shared: what layers share.
        shareable: whether other layers may have the same shared part.
        floats: names of floats.
        values: constants of the program, as its compiled functions read them.

    Raises:
        NotComparable: naming what cannot be compared.
    """

    def __init__(
        self, layer: Module, reads: Reads, shared: Shared | None, roots: Iterable[Any] = ()
    ) -> None:
        outer: list[Any] = [*roots]
        walk = reads.walk(outer)
        walk.follow("", layer)
        self._layer, self._walk, self.key = layer, walk, tuple(walk.key)
        self.shared = Shared(reads, outer) if shared is None else shared
        self.shareable = shared is not None or not walk.meets(self.shared.walk)
        self.compared, self.floats = _Compared.of(walk), walk.floats | self.shared.walk.floats
        self.values, self._places = types.SimpleNamespace(), dict[str, int]()

    def unchanged_since(self, before: Walk) -> bool:
        """Return whether all that is compared was the same in an earlier walk."""
        return all(walk.unchanged_since(before) for walk in (self._walk, self.shared.walk))

    def fill(self, constants: dict[str, Any]) -> None:
        """Take the constants of a program, and note where tensors of the layer are."""
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
        read = {id(t) for walk in (self._walk, self.shared.walk) for t in walk.tensors}
        for tensor in inputs:
            if id(tensor) in read:
                raise NotComparable("an argument that is an attribute of the layer too")
            if not self.shared.reads.names.isdisjoint(vars(tensor)):
                raise NotComparable("an attribute of a tensor")

    def detached(self) -> "Guard":
        """Return a guard of no layer, for :meth:`of`."""
        other, constants = copy(self), vars(self.values).items()
        other.values = types.SimpleNamespace(**{k: v for k, v in constants if k not in self._places})
        del other._layer, other._walk, other.compared
        return other

    def of(self, layer: Module, walk: Walk) -> "Guard":
        """Return the guard of another layer, given a walk of it with the same key."""
        other = copy(self)
        other._layer, other.values = layer, types.SimpleNamespace(**vars(self.values))
        other.take(walk)
        return other

    def take(self, walk: Walk) -> None:
        """Compare with another walk of the layer from now on, and read the tensors of that."""
        self._walk, self.compared, values = walk, _Compared.of(walk), vars(self.values)
        for name, place in self._places.items():
            values[name] = walk.tensors[place]

    def holds(self) -> bool:
        """Return whether all final values are unchanged."""
        return unchanged(self.compared, self.shared.compared) or self.renew()

    def renew(self) -> bool:
        """Walk again; return whether all final values are unchanged."""
        walk = self.shared.reads.walk([])
        try:
            walk.follow("", self._layer)
        except NotComparable:
            return False
        if tuple(walk.key) != self.key or not self.shared.holds():
            return False
        self.take(walk)
        return True


def unchanged(*parts: _Compared) -> bool:
    """Return whether nothing that was compared is another object now."""
    try:
        for (sized, lengths, keyed, keys, views, items, getters, spaces, values, lacking, lacked,
             objects, classes_of, classes, bases, functions, referents, get_parts, function_parts,
             cells, contents) in parts:  # fmt: skip
            if (
                [*map(len, sized)] != lengths
                or [*_chained(keyed)] != keys
                or any(map(contains, lacking, lacked))
                or not all(map(is_, _chained(views), items))
                or not all(map(is_, _chained(map(_call, getters, spaces)), values))
                or not all(map(is_, map(type, objects), classes_of))
                or not all(map(is_, map(_bases_of, classes), bases))
                or not all(map(is_, map(_content_of, cells), contents))
            ):
                return False
            now = get_referents(*functions)
            if len(now) != referents or not all(map(is_, get_parts(now), function_parts)):
                return False
    # A name or the content of a cell was deleted, or another thread changes a dictionary.
    except (KeyError, ValueError, RuntimeError):
        return False
    return not _has_any_global_hook()


class Reading:
    """What the code of a layer reads while it runs.

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
        self._walk.name(names_of(code).attributes, of_modules=True)

    def settle(self) -> Guard:
        """Return the guard of what has run; called once, after the call was recorded."""
        before = self._walk
        inner = {inside for code in before.functions if code in self._ran for inside in codes_of(code)}
        for code in self._ran - inner:
            raise NotComparable(f"'{code.co_name}' is not reached by a name or an attribute")
        reads = Reads(*map(frozenset, (before.names, before.of_modules, before.asked, self._ran)))
        guard = Guard(self._layer, reads, None, self._entries)
        if not guard.unchanged_since(before):
            raise NotComparable("it changes what it reads: an attribute or a container")
        return guard


_content_of, _bases_of = attrgetter("cell_contents"), attrgetter("__mro__")
_chained = chain.from_iterable
# operator.call() is new in Python 3.11.
_call: Callable[..., Any] = getattr(operator, "call", lambda function, value: function(value))


def _is_not(value: Any, other: Any) -> bool:
    return value is not other


def _getter(keys: Iterable[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values at these keys of a dictionary or a list."""
    names = (*keys,)
    return itemgetter(*names, *names[:1]) if names else lambda mapping: ()  # one key, no tuple


def _parts_of(functions: list[types.FunctionType]) -> tuple[int, Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]:
    """Return how many objects functions refer to, what picks code and defaults, and these.

    Their attributes are not read: each time Python would call the audit hooks of the process, and
    filelock, which torch imports, has one.
    """
    referents = get_referents(*functions)
    compared = attrgetter("__code__", "__defaults__", "__kwdefaults__")
    wanted = {id(part) for f in functions for part in compared(f) if part is not None}
    places = [place for place, part in enumerate(referents) if id(part) in wanted]
    get = _getter(places)
    return len(referents), get, get(referents)
