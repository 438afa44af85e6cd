"""A function on the edges of a graph as a value: equal for two calls that do the same."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pyg_accel.record.dims import Dim

__all__ = ["Steps"]


@dataclass(frozen=True)
class _Place:
    """Where a value is: inputs come first, then the result of each step."""

    number: int


@dataclass(frozen=True)
class Steps:
    """Functions that are called one after the other, without tensors of their own.

    Attributes:
        steps: of each function, itself, its arguments and its keyword arguments.
    """

    steps: tuple[tuple[Any, Any, Any], ...]

    @staticmethod
    def of(inputs: Sequence[fx.Node], nodes: Collection[fx.Node]) -> "Steps":
        """Return the functions of nodes; the last one computes the result.

        Sizes among the arguments that differ between calls are expected from then on.

        Args:
            inputs: nodes of the arguments.
            nodes: computed nodes, in order.
        """
        places = {node: _Place(number) for number, node in enumerate((*inputs, *nodes))}

        def frozen(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return places[value]
            return value.expected() if isinstance(value, Dim) else value

        return Steps(tuple(
            (node.target, map_aggregate(node.args, frozen), map_aggregate(node.kwargs, frozen))
            for node in nodes
        ))  # fmt: skip

    def __call__(self, first: Any, others: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, for the first input and a list of the others."""
        values = [first, *others]

        def filled(value: Any) -> Any:
            return values[value.number] if isinstance(value, _Place) else value

        for function, args, kwargs in self.steps:
            args, kwargs = map_aggregate(args, filled), map_aggregate(kwargs, filled)
            values.append(function(*args, **kwargs))
        result = values[-1]
        return result if isinstance(result, list) else [result]
