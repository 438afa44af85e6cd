"""Calls of layers on graphs that are known to be too small, told apart before anything else is.

A layer that leaves a call to PyG asks some thirty questions first, in each of the places where
patch() stands. All of them come to the same for a graph of no more nodes and edges: so a layer
remembers the largest graph that was too small for all that it does. Calls on such a graph run
PyG's path from the beginning, and no hook inside of them asks anything. Where a graph was too small
because it was new, this holds for other new graphs.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from pyg_accel.cache import TensorRef, saved_tensors_are_hooked
from pyg_accel.call_report import Row, row_of
from pyg_accel.derived import is_new
from pyg_accel.ops.csr import is_built_ahead
from pyg_accel.patching.layer_call import layer_call
from pyg_accel.patching.sampling import in_force
from pyg_accel.settings import settings

__all__ = ["Small", "find", "forget", "learn"]


# Of a call: the width of its features (of each type of nodes, where there are several), their rows,
# the edges of all graphs and of the largest, and the first graph. Not named: it is made each time.
_Given = tuple[int | tuple[int, ...], int, int, int, Tensor]


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
        new_to: those to whom the graph was new, and for that too small.
        nodes: rows of the features.
        edges: of the graph; of all, where there are several.
        largest: edges of the largest of several graphs.
        owner: the layer, with which this goes.
        shapes: of the features and the graph of a call that was found to be small.
        last: the edge_index of the last call, of a layer that remembers.
        misses: calls in a row, each on the graph of the one before, that found nothing remembered.
    """

    width: int | tuple[int, ...]
    grad: bool
    training: bool
    device: int
    row: Row
    remembers: bool
    new_to: tuple[Hashable, ...]
    owner: weakref.ref[torch.nn.Module]
    nodes: int = 0
    edges: int = 0
    largest: int = 0
    shapes: tuple[torch.Size, ...] = ()
    last: TensorRef | None = None
    misses: int = 0

    def covers(self, given: _Given) -> bool:
        """Whether a call is on a graph that is no larger, and on features of the width."""
        width, nodes, edges, largest, _ = given
        return (
            edges <= self.edges
            and nodes <= self.nodes
            and largest <= self.largest
            and width == self.width
        )

    def was_remembered(self, found: bool) -> None:
        """Note whether a call on the last call's graph found what was derived from it.

        The first such call shows that the graph comes again, and the second puts it there. If the
        third does not find it, the layer derives it from something else as well (weights that a
        network makes), and no call will.
        """
        self.misses = 0 if found else self.misses + 1
        self.remembers = self.misses < 3


_known: dict[int, Small] = {}  # by the identity of the layer: a weak dictionary takes longer


def forget() -> None:
    """Ask each layer anew."""
    _known.clear()


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Given | None:
    """Features and graphs of a call, where they are what layers take first."""
    x = args[0] if args else kwargs.get("x")
    edge_index = args[1] if len(args) > 1 else kwargs.get("edge_index")
    if type(x) is tuple and x:
        x = x[0]
    if type(x) is not Tensor or type(edge_index) is not Tensor:
        if type(x) is dict and type(edge_index) is dict:
            return _given_types([*x.values()], [*edge_index.values()])
        return None
    if edge_index.layout is not torch.strided:  # a matrix, whose sizes are those of nodes
        return None
    rows, graph = x.shape, edge_index.shape
    if len(rows) != 2 or len(graph) != 2:
        return None
    return rows[1], rows[0], graph[1], graph[1], edge_index


def _given_types(xs: list[Any], graphs: list[Any]) -> _Given | None:
    """The same of a call with dictionaries, by types of nodes and of edges."""
    plain = all(type(t) is Tensor and t.layout is torch.strided and t.dim() == 2
                for t in xs + graphs)  # fmt: skip
    if not (xs and graphs and plain):
        return None
    widths, edges = tuple([x.size(1) for x in xs]), [graph.size(1) for graph in graphs]
    return widths, sum([x.size(0) for x in xs]), sum(edges), max(edges), graphs[0]


def find(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Small | None:
    """Return what is known of a layer if a call of it is small by that.

    Every call of every layer asks this first. What it touches was put out of the processor's cache
    by the layers before, so each look at something else counts, more than operations do.
    """
    known = _known.get(id(module))
    if known is None or layer_call.small:  # a part of another layer's call, with a graph of its own
        return None
    x, edge_index = args[:2] if len(args) > 1 else (None, None)
    if type(x) is tuple and x:
        x = x[0]
    shapes = (x.shape, edge_index.shape) if type(x) is Tensor and type(edge_index) is Tensor else ()
    if not shapes or shapes != known.shapes:
        given = _given(args, kwargs)
        if given is None or not known.covers(given):
            return None
        known.shapes, edge_index = shapes, given[-1]
    if (
        edge_index.get_device() != known.device
        or is_grad_enabled() != known.grad
        or module.training != known.training
        or settings.always
        or in_force() is not None
    ):
        return None
    if not (known.remembers or known.new_to):
        return known
    # A checkpoint expects the same of a call that it makes again, whatever was seen meanwhile.
    if saved_tensors_are_hooked():
        return None
    if known.new_to and (is_built_ahead(edge_index) or not _is_new(known.new_to, edge_index)):
        return None
    if known.remembers:
        layer_call.again = known.last is not None and known.last.fits(edge_index)
        if not layer_call.again:
            known.last = TensorRef(edge_index)
    return known


def _is_new(to: tuple[Hashable, ...], edge_index: Tensor) -> bool:
    """Whether a graph is new to some; it will not be another time."""
    return all([is_new(edge_index, by) for by in to])


def learn(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember of a layer what its call has shown, if all parts of it were too small."""
    given = _given(args, kwargs) if layer_call.reason and not layer_call.others else None
    key = id(module)
    if given is None:
        _known.pop(key, None)
        return
    width, nodes, edges, largest, edge_index = given
    new_to = tuple(dict.fromkeys(layer_call.new_to))
    if new_to:
        _is_new(new_to, edge_index)  # what was new to them may be another, derived from this one
    facts = width, is_grad_enabled(), module.training, edge_index.get_device()
    known = _known.get(key)
    before = known and (known.width, known.grad, known.training, known.device, known.new_to)
    if known is None or before != (*facts, new_to):
        known = _known[key] = Small(
            *facts, row_of(type(module).__name__, "", "PyG", layer_call.reason),
            layer_call.remembers, new_to, weakref.ref(module, lambda _: _known.pop(key, None)),
        )  # fmt: skip
    # All at once, as all are asked for: each of two graphs may have more of one.
    if edges >= known.edges and nodes >= known.nodes and largest >= known.largest:
        known.edges, known.nodes, known.largest = edges, nodes, largest
    known.last = TensorRef(edge_index)
