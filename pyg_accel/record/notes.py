"""The notes of a walk over the values that code reads."""

import types
from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import Tensor

__all__ = ["Notes"]


class Notes:
    """The values that a guard compares.

    Attributes:
        key: equal for walks over equal values, apart from the values of tensors.
        tensors: reached tensors, in order.
        floats: names of floats.
        functions: reached functions, by their code.
        followed: reached functions that ran.
        tables: dictionaries, and copies of them.
        lists: other containers, and their items in order.
        spaces: attributes of objects, classes and modules, and globals: values by name.
        absent: names that modules and globals do not have.
        orders: all names of objects and classes.
        sized: attributes of classes, of which only the number is compared.
        cells: of closures, and their contents.
        objects: to compare their classes.
        classes: to compare their bases.
        named: classes and functions of users, if code reads their names.
    """

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self.floats: set[str] = set()
        self.functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self.followed: list[types.FunctionType] = []
        self.tables: dict[int, tuple[Mapping[Any, Any], dict[Any, Any]]] = {}
        self.lists: dict[int, tuple[Any, list[Any]]] = {}
        self.spaces: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self.absent: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self.orders: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        self.cells: dict[int, tuple[types.CellType, Any]] = {}
        self.sized: list[Mapping[str, Any]] = []
        self.objects: list[Any] = []
        self.classes: list[type] = []
        self.named: list[Any] = []
        self._places: dict[int, int] = {}  # places of values, by identity

    def aliases(self, other: "Notes") -> list[tuple[int, int]]:
        """Return the places of values in both walks."""
        theirs = other._places
        return [(place, theirs[key]) for key, place in self._places.items() if key in theirs]

    def unchanged_since(self, before: "Notes") -> bool:
        """Return whether an earlier walk has noted the same values."""
        for number, (_, names) in self.orders.items():
            if before.orders.get(number, (None, None))[1] != names:
                return False
        for number, (_, items) in (*self.tables.items(), *self.spaces.items()):
            then = before.spaces if number in before.spaces else before.tables
            noted = then.get(number, (None, {}))[1]
            if any(noted.get(name, noted) is not value for name, value in items.items()):
                return False
        for number, (_, items) in self.tables.items():
            if len(items) != len(before.tables[number][1]):
                return False
        for number, (_, values) in self.lists.items():
            earlier = before.lists.get(number, (None, [number]))[1]
            if len(earlier) != len(values) or not all(map(is_, earlier, values)):
                return False
        return all(
            before.cells.get(number, (None, before))[1] is content
            for number, (_, content) in self.cells.items()
        )
