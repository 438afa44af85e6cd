"""Sizes that differ between calls of one program: integers with the node that computes them."""

import operator
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from pyg_accel.record.code import is_package_file

__all__ = ["SIZES", "Dim", "Unexpected", "expect", "is_size"]

_MOST = 2**62  # larger than any size


class Dim(int):
    """A size of a tensor, or a number computed from sizes.

    Sums, differences, products and quotients of integers are recorded; a comparison is recorded
    with its result (:func:`expect`), as the recorded code may depend on it. Any other function uses
    the number itself, which is then expected in each call.

    Attributes:
        node: the node that computes it.
        least: a lower bound for all calls.
    """

    node: fx.Node
    least: int

    @staticmethod
    def of(value: int, node: fx.Node, least: int) -> "Dim":
        """Return the number that a node computes."""
        dim = Dim(value)
        dim.node, dim.least = node, least
        return dim

    def plain(self) -> int:
        """Return the number."""
        return int.__int__(self)

    def expected(self) -> int:
        """Return the number, and expect it in each call."""
        is_equal = self.node.graph.call_function(operator.eq, (self.node, self.plain()))
        self.node.graph.call_function(expect, (is_equal, True))
        return self.plain()

    def _computed(self, function: Callable[..., Any], *args: Any) -> Any:
        if not all(isinstance(a, int) for a in args):
            if not any(isinstance(a, Tensor) for a in args) and not _by_package():
                self.expected()  # a function of torch gets it as it is
            return NotImplemented
        result = function(*map(int.__int__, args))
        if isinstance(result, bool) and _is_known(args):
            return result
        nodes = tuple(a.node if isinstance(a, Dim) else a for a in args)
        node = self.node.graph.call_function(function, nodes)
        if isinstance(result, bool):
            self.node.graph.call_function(expect, (node, result))
            return result
        return Dim.of(result, node, -_MOST)


def _is_known(args: tuple[Any, ...]) -> bool:
    """Whether a comparison has the same result in all calls, or is in code of this package."""
    dims = [a for a in args if isinstance(a, Dim)]
    if len(dims) == 2 and dims[0].node is dims[1].node:
        return True
    if any(not isinstance(a, Dim) and (a < dims[0].least or a >= _MOST) for a in args):
        return True
    return _by_package(4)


def _by_package(depth: int = 3) -> bool:
    """Whether code of this package uses a number."""
    return is_package_file(sys._getframe(depth).f_code.co_filename)


def _add(name: str, function: Callable[..., Any], *more: int) -> None:
    setattr(
        Dim, f"__{name}__", lambda self, *others: self._computed(function, self, *others, *more)
    )


def _fix(name: str, method: Callable[..., Any]) -> None:
    call = method if callable(method) else method.__get__

    def fixed(self: Dim, *args: Any) -> Any:
        return call(self.plain() if _by_package(2) else self.expected(), *args)

    setattr(Dim, name, fixed if callable(method) else property(fixed))


for _name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge"):
    _add(_name, getattr(operator, _name))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(Dim, f"__r{_name}__",
            lambda self, other, f=_function: self._computed(f, other, self))  # fmt: skip
_add("bool", operator.ne, 0)
for _name, _value in vars(int).items():
    if _name not in (*vars(Dim), "__new__", "__getattribute__", "__doc__", "from_bytes"):
        _fix(_name, _value)
_fix("__hash__", int.__hash__)  # it may be the key of a dictionary


class Unexpected(Exception):
    """A comparison of sizes has another result than in the recorded call."""


def expect(value: Any, recorded: Any) -> None:
    """Check that a comparison of sizes has the same result as in the recorded call.

    Raises:
        Unexpected: if not: the call has to run the code of the layer.
    """
    if value is not recorded:
        raise Unexpected(f"{value} instead of {recorded}")


# Functions of sizes in a recording.
SIZES = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.eq,
         operator.ne, operator.lt, operator.le, operator.gt, operator.ge, expect)  # fmt: skip


def is_size(node: fx.Node) -> bool:
    """Return whether a node of a recording is a size, or computed from sizes."""
    return node.target in SIZES or (node.op == "call_method" and node.target == "size")
