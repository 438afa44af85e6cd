"""A function on the edges of a graph as a value: equal for two calls that do the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from pyg_accel.record.dims import Dim

__all__ = ["Steps"]


class _Place(NamedTuple):
    """Where a value is: inputs come first, then the result of each step."""

    number: int


@dataclass(frozen=True)
class Steps:
    """Functions that are called one after the other, without tensors of their own.

    Attributes:
        steps: of each function, itself, its arguments, and its keyword arguments as pairs.
        root: where the result is.
    """

    steps: tuple[tuple[Callable[..., Any], Any, Any], ...]
    root: _Place

    @staticmethod
    def of(inputs: Sequence[fx.Node], root: fx.Node) -> "Steps":
        """Return what makes a node.

        Sizes among the arguments that differ between calls are expected from then on.

        Args:
            inputs: the nodes that are given.
            root: the node.
        """
        places = {node: _Place(number) for number, node in enumerate(inputs)}
        needed, pending = dict.fromkeys([root]), [root]
        for node in pending:  # as it grows
            new = [n for n in node.all_input_nodes if n not in needed and n not in places]
            needed.update(dict.fromkeys(new))
            pending += new
        steps: list[tuple[Any, Any, Any]] = []
        for node in root.graph.nodes:
            if node in needed and node not in places:
                args = _frozen(node.args, places)
                kwargs = tuple((k, _frozen(v, places)) for k, v in node.kwargs.items())
                steps.append((node.target, args, kwargs))
                places[node] = _Place(len(places))
        return Steps(tuple(steps), places[root])

    def __call__(self, *given: Any) -> list[Tensor]:
        """Return the results, for the first input and a list of the others."""
        first, others = given
        values = [first, *others]
        for function, args, kwargs in self.steps:
            named = {name: _filled(value, values) for name, value in kwargs}
            values.append(function(*_filled(args, values), **named))
        made = values[self.root.number]
        return made if isinstance(made, list) else [made]


def _frozen(value: Any, places: dict[fx.Node, _Place]) -> Any:
    """Return an argument with places for nodes."""
    if isinstance(value, fx.Node):
        return places[value]
    if isinstance(value, (tuple, list)):  # those of torch.fx are lists of another class
        items = [_frozen(item, places) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, slice):
        return slice(*(_frozen(v, places) for v in (value.start, value.stop, value.step)))
    return value.expected() if isinstance(value, Dim) else value


def _filled(value: Any, values: list[Any]) -> Any:
    """Return an argument with values for places."""
    if isinstance(value, _Place):
        return values[value.number]
    if type(value) in (tuple, list):
        return type(value)([_filled(item, values) for item in value])
    return value
