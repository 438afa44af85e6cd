"""Calls of layers on graphs that are known to be too small, told apart before anything else is.

A layer that leaves a call to PyG asks some thirty questions first, in each of the places where
patch() stands. All of them come to the same for a graph of no more nodes and edges: so a layer
remembers the largest graph that was too small for all that it does. Calls on such a graph run
PyG's path from the beginning, and no hook inside of them asks anything.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import saved_tensors_are_hooked
from pyg_accel.call_report import Row, row_of
from pyg_accel.patching.layer_call import layer_call
from pyg_accel.patching.sampling import in_force
from pyg_accel.settings import settings

__all__ = ["Small", "find", "forget", "learn"]


@dataclass(slots=True)
class Small:
    """The largest graph that was too small for a layer, on features of one width.

    Attributes:
        width: of the features.
        grad: gradients were recorded.
        training: the layer was in training mode, on which its kind of call may depend.
        device: index of the graph's device, -1 for the CPU.
        row: of the report.
        remembers: the layer derives something of its edge_index, which is remembered for a graph
            that comes again.
        nodes: rows of the features.
        edges: of the graph.
        last: the edge_index of the last call.
        misses: calls in a row, each on the graph of the one before, that found nothing remembered.
    """

    width: int
    grad: bool
    training: bool
    device: int
    row: Row
    remembers: bool
    nodes: int = 0
    edges: int = 0
    last: weakref.ref[Tensor] | None = None
    misses: int = 0

    def was_remembered(self, found: bool) -> None:
        """Note whether a call on the last call's graph found what was derived from it.

        The first such call shows that the graph comes again, and the second puts it there. If the
        third does not find it, the layer derives it from something else as well (weights that a
        network makes), and no call will.
        """
        self.misses = 0 if found else self.misses + 1
        self.remembers = self.misses < 3


_known: "weakref.WeakKeyDictionary[torch.nn.Module, Small]" = weakref.WeakKeyDictionary()


def forget() -> None:
    """Ask each layer anew."""
    _known.clear()


def _graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Features and edge_index of a call, where they are what layers take first."""
    x = args[0] if args else kwargs.get("x")
    edge_index = args[1] if len(args) > 1 else kwargs.get("edge_index")
    if type(x) is tuple and x:
        x = x[0]
    if type(x) is not Tensor or type(edge_index) is not Tensor:
        return None
    if edge_index.layout is not torch.strided:  # a matrix, whose sizes are those of nodes
        return None
    return (x, edge_index) if x.dim() == 2 and edge_index.dim() == 2 else None


def find(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Small | None:
    """Return what is known of a layer if a call of it is small by that.

    Every call of every layer asks this first.
    """
    known = _known.get(module)
    if known is None or layer_call.small:  # a part of another layer's call, with a graph of its own
        return None
    given = _graph(args, kwargs)
    if given is None:
        return None
    x, edge_index = given
    if (
        edge_index.size(1) > known.edges
        or x.size(0) > known.nodes
        or x.size(1) != known.width
        or edge_index.get_device() != known.device
        or torch.is_grad_enabled() != known.grad
        or module.training != known.training
        or settings.always
        or in_force() is not None
    ):
        return None
    if known.remembers:
        # A checkpoint expects the same of a call that it makes again, whatever was seen meanwhile.
        if saved_tensors_are_hooked():
            return None
        layer_call.again = known.last is not None and known.last() is edge_index
        if not layer_call.again:
            known.last = weakref.ref(edge_index)
    return known


def learn(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember of a layer what its call has shown, if all parts of it were too small."""
    given = _graph(args, kwargs) if layer_call.reason and not layer_call.others else None
    if given is None:
        _known.pop(module, None)
        return
    x, edge_index = given
    facts = x.size(1), torch.is_grad_enabled(), module.training, edge_index.get_device()
    known = _known.get(module)
    if known is None or (known.width, known.grad, known.training, known.device) != facts:
        known = _known[module] = Small(
            *facts, row_of(type(module).__name__, "", "PyG", layer_call.reason),
            layer_call.remembers,
        )  # fmt: skip
    # Both at once, as both are asked for: each of two graphs may have more of one.
    if edge_index.size(1) >= known.edges and x.size(0) >= known.nodes:
        known.edges, known.nodes = edge_index.size(1), x.size(0)
    known.last = weakref.ref(edge_index)
