"""Layers as users write them, one a line: a base, and methods that are given to it."""

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.nn import MessagePassing

NUMBERS = count()


def written(*bases: type, **methods: Any) -> Any:
    """A class of layers with these methods, as a `class` statement makes it.

    PyG reads the arguments of `propagate` in the source of a class; these have none, so a base
    names them in `propagate_type`. It also tells classes by their names, so each has a number.
    """
    for key, method in methods.items():
        if isinstance(method, Callable):
            method.__name__ = key
    return type(f"Written{next(NUMBERS)}", bases or (Layer,), {"__module__": __name__, **methods})


def says(message: Callable[..., Tensor], *bases: type, **attributes: Any) -> Callable[[], Any]:
    """How to make a layer with this message and these attributes."""
    cls = written(*bases, message=message)
    return lambda: cls(**attributes)


def says_by(message: Callable[..., Tensor], **attributes: Any) -> Callable[[], Any]:
    """The same, with something for each edge: its third argument."""
    return says(message, Weighted, **attributes)


class Layer(MessagePassing):
    """Sends the features of nodes along edges; attributes are arguments."""

    propagate_type: ClassVar = dict(x=Any)

    def __init__(self, aggr: Any = "sum", node_dim: int = -2, **attributes: Any) -> None:
        super().__init__(aggr=aggr, node_dim=node_dim)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)


class Weighted(Layer):
    """With something for each edge, `w`."""

    propagate_type: ClassVar = dict(x=Any, w=Any)

    def forward(self, x: Any, edge_index: Tensor, w: Any = None, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, w=w, size=size)
