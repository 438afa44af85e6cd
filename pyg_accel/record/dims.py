"""Sizes that differ between calls of one program: integers with the node that computes them."""

import operator
import sys
from collections.abc import Callable
from typing import Any

from torch import fx

from pyg_accel.record.guard import is_package_file

__all__ = ["Dim", "Unexpected", "expect"]


class Dim(int):
    """A size of a tensor, or what was computed of sizes.

    Sums, differences, products and quotients are recorded; a comparison is recorded with its
    outcome (:func:`expect`), on which the code that was recorded depends.

    Attributes:
        node: computes it.
    """

    node: fx.Node

    @staticmethod
    def of(value: int, node: fx.Node) -> "Dim":
        """Make one."""
        made = Dim(value)
        made.node = node
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
        return Dim.of(result, node)

    def __hash__(self) -> int:
        return int.__hash__(self)


def _is_known(args: tuple[Any, ...]) -> bool:
    """Whether a comparison has one outcome, or is this package's, whose operators check sizes."""
    nodes = [a.node for a in args if isinstance(a, Dim)]
    if len(nodes) == 2 and nodes[0] is nodes[1]:
        return True
    if any(not isinstance(a, Dim) and (a < 2 or a >= 2**62) for a in args):
        return True  # a size that differs between calls is 2 at least
    return is_package_file(sys._getframe(3).f_code.co_filename)


def _add(name: str, function: Callable[..., Any]) -> None:
    setattr(Dim, f"__{name}__", lambda self, other: self._computed(function, self, other))


for _name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge"):
    _add(_name, getattr(operator, _name))
for _name in ("add", "sub", "mul", "floordiv"):
    _function = getattr(operator, _name)
    setattr(Dim, f"__r{_name}__",
            lambda self, other, f=_function: self._computed(f, other, self))  # fmt: skip
Dim.__bool__ = lambda self: self != 0  # type: ignore[method-assign]


class Unexpected(Exception):
    """Sizes that differ from those of the recorded call in a way that its code depends on."""


def expect(value: Any, recorded: Any) -> None:
    """Raise where a comparison of sizes has another outcome than in the recorded call.

    Raises:
        Unexpected: the call has to run the code of the layer.
    """
    if value is not recorded:
        raise Unexpected(f"{value} instead of {recorded}")
