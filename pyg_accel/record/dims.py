"""Sizes that differ between calls of one program: integers that know how they were computed."""

import operator
import sys
from collections.abc import Callable
from typing import Any

from torch import fx

from pyg_accel.record.guard import is_package_file

__all__ = ["Dim", "Unexpected", "expect"]

_MOST = 2**62  # no size is as large


class Dim(int):
    """A size of a tensor, or what was computed of sizes.

    Sums, differences, products and quotients are recorded; a comparison is recorded with its
    outcome (:func:`expect`), on which the code that was recorded depends.

    Attributes:
        node: computes it.
        least: what it is at least, whatever the call.
    """

    node: fx.Node
    least: int

    @staticmethod
    def of(value: int, node: fx.Node, least: int) -> "Dim":
        """Make one."""
        made = Dim(value)
        made.node, made.least = node, least
        return made

    def _computed(self, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*(int(a) if isinstance(a, Dim) else a for a in args))
        if not isinstance(result, int) or not all(isinstance(a, int) for a in args):
            return result
        if isinstance(result, bool) and _is_known(args):
            return result
        given = tuple(a.node if isinstance(a, Dim) else a for a in args)
        node = self.node.graph.call_function(function, given)
        if isinstance(result, bool):
            self.node.graph.call_function(expect, (node, result))
            return result
        return Dim.of(result, node, -_MOST)

    def __hash__(self) -> int:
        self._computed(operator.eq, self, int.__int__(self))  # a dictionary may have it as a key
        return int.__hash__(self)


def _is_known(args: tuple[Any, ...]) -> bool:
    """Whether a comparison has one outcome, or is this package's, whose operators check sizes."""
    dims = [a for a in args if isinstance(a, Dim)]
    if len(dims) == 2 and dims[0].node is dims[1].node:
        return True
    if any(not isinstance(a, Dim) and (a < dims[0].least or a >= _MOST) for a in args):
        return True
    return is_package_file(sys._getframe(3).f_code.co_filename)


def _add(name: str, function: Callable[..., Any], *more: int) -> None:
    setattr(
        Dim, f"__{name}__", lambda self, *others: self._computed(function, self, *others, *more)
    )


for _name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge"):
    _add(_name, getattr(operator, _name))
for _name in ("add", "sub", "mul", "floordiv"):
    _function = getattr(operator, _name)
    setattr(Dim, f"__r{_name}__",
            lambda self, other, f=_function: self._computed(f, other, self))  # fmt: skip
_add("bool", operator.ne, 0)


class Unexpected(Exception):
    """Sizes that differ from those of the recorded call in a way that its code depends on."""


def expect(value: Any, recorded: Any) -> None:
    """Raise where a comparison of sizes has another outcome than in the recorded call.

    Raises:
        Unexpected: the call has to run the code of the layer.
    """
    if value is not recorded:
        raise Unexpected(f"{value} instead of {recorded}")
