"""Programs: recorded calls of a layer, compiled to flat functions.

A program runs for calls with arguments of the same structure, types, dtypes, devices and sizes, in
the same modes of torch and settings of this package, as long as its guard holds.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pyg_accel.graph.derived import find, keep
from pyg_accel.record.dims import Dim, is_size
from pyg_accel.record.guard import Guard, NotComparable, Reading
from pyg_accel.record.metadata import WRITES
from pyg_accel.record.normalisation import on_nodes
from pyg_accel.record.recorder import Recorder
from pyg_accel.record.signature import Signature
from pyg_accel.record.split import DERIVED, STORED, derives_anew, split

__all__ = ["LayerProgram", "record"]


class State:
    """The common state of equal programs of all layers of a class.

    Attributes:
        sizes: least sizes for which they are faster than PyG's own path, once computed.
        changes: of settings, at the time of the record.
        overwrites: whether code of the layer changes inputs of its messages in place.
        used: whether one has run.
        verified: whether their results are compared with PyG's.
        unseen: number of consecutive calls with a new graph.
        new_graphs: whether a transform assumes a new graph in every call; None if irrelevant.
    """

    sizes: Any = None
    new_graphs: bool | None = None
    overwrites = True
    used = verified = False
    unseen = 0

    def __init__(self, changes: int) -> None:
        self.changes = changes


@dataclass(eq=False)
class LayerProgram:
    """A recorded call of a layer, from its arguments to its result.

    Attributes:
        graph: the recorded torch functions and operators, as a :class:`torch.fx.Graph`; a
            transform replaces it.
        guard: all other values that it depends on, and the constants.
        signature: of the arguments.
        context: modes of torch and settings, which are compared before it runs.
        formulas: for the report.
        backends: for the report.
        admit: a function that returns the tensors among arguments that fit, or None.
        parts: derivations from a graph, and the remainder; None without derivations.
        finish: runs the call, from these tensors and the result of :meth:`find`.
        derives: number of functions of the graph that run once per graph.
        derives_anew: whether one of them also reads other values, and runs in each call.
        writes: whether it changes tensors in place.
        exact: whether it expects sizes of the recorded call.
        by_nodes: whether to normalise by degrees of nodes, which is faster on a GPU.
        state: shared with equal programs of other layers.
        constants: parameters, buffers and other values that it reads, by their names in the graph.
    """

    graph: torch.fx.Graph
    guard: Guard
    signature: Signature
    context: tuple[Any, ...]
    formulas: str = ""
    backends: str = ""
    exact: bool = False
    by_nodes: bool = False
    state: State = field(default_factory=lambda: State(0))

    def __post_init__(self) -> None:
        """Compile the arguments and the graph."""
        self.admit = self.signature.compiled(self.guard.shared.reads.names)
        self.constants: dict[Any, Any] = vars(self.guard.values)
        self._compile(on_nodes(self.graph, self.constants) if self.by_nodes else self.graph)

    def of(self, guard: Guard) -> "LayerProgram":
        """Return the program of another layer of the class."""
        other = copy(self)
        other.guard, other.constants = guard, vars(guard.values)
        other._bind()
        return other

    def transformed(self, graph: torch.fx.Graph, formulas: str) -> "LayerProgram":
        """Return a program for the same calls, of any size, that runs another graph."""
        other = copy(self)
        other.formulas, other.state = formulas, copy(self.state)
        other.state.sizes = self.state.sizes.of_any_size(formulas)
        other._compile(graph)
        return other

    def _compile(self, graph: torch.fx.Graph) -> None:
        self.parts = split(graph)
        self.writes = any(WRITES in node.meta for node in self.graph.nodes)
        self.derives = sum(_remembers(node) for node in self.graph.nodes)
        self.derives_anew = derives_anew(graph)
        graphs = (graph,) if self.parts is None else (self.parts.remainder, self.parts.derive)
        self._functions = tuple(map(_compiled, graphs))
        self._tensor_constants: tuple[str, ...] = ()
        if self.parts is not None:
            self._tensor_constants = tuple(
                name for name in self.parts.constants if isinstance(self.constants[name], Tensor)
            )
        self._bind()

    def _bind(self) -> None:
        """Let the compiled functions read the constants of the layer."""
        self.finish, *derive = (MethodType(f, self.guard.values) for f in self._functions)
        self._derive = derive[0] if derive else None

    def find(self, leaves: tuple[Tensor, ...]) -> Any:
        """Return, in a tuple, the values derived from the tensors of a call; None if not stored.

        Programs without :attr:`parts` derive none.
        """
        assert self.parts is not None
        constants = map(self.constants.__getitem__, self._tensor_constants)
        owners = *map(leaves.__getitem__, self.parts.owners), *constants, self.state
        read = self.parts.sizes
        return find(owners, tuple([leaves[i].size(dim) for i, dim in read]) if read else ())

    def derive(self, leaves: tuple[Tensor, ...]) -> Any:
        """Compute and store the values that :meth:`find` returns."""
        assert self.parts is not None and self._derive is not None
        self.state.unseen += 1
        derived = (self._derive(*leaves),)
        constants = map(self.constants.__getitem__, self._tensor_constants)
        owners = *map(leaves.__getitem__, self.parts.owners), *constants, self.state
        keep(owners, tuple([leaves[i].size(dim) for i, dim in self.parts.sizes]), derived)
        return derived

    def run(self, *leaves: Tensor) -> Any:
        """Run a call, given the tensors among its arguments."""
        derived = () if self.parts is None else self.find(leaves) or self.derive(leaves)
        return self.finish(*leaves, *derived)

    def agrees(self, graph: torch.fx.Graph, constants: dict[Any, Any]) -> bool:
        """Return whether another recording is equal to this one, except for sizes."""
        first, second = _without_sizes(self.graph), _without_sizes(graph)
        if len(first) != len(second):
            return False
        pairs: dict[torch.fx.Node, torch.fx.Node] = {}
        for mine, other in zip(first, second, strict=True):
            if mine.op != other.op:
                return False
            if mine.op == "get_attr":
                if not _same(self.constants[str(mine.target)], constants[str(other.target)]):
                    return False
            elif mine.op != "placeholder" and mine.target != other.target:
                return False
            if not _same_arguments((mine.args, mine.kwargs), (other.args, other.kwargs), pairs):
                return False
            pairs[mine] = other
        return True


def _remembers(node: torch.fx.Node) -> bool:
    """Whether a node is a function of a graph that PyG runs in each call."""
    return DERIVED in node.meta and node.target not in STORED


def _without_sizes(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the nodes of a graph, without sizes and computations of sizes."""
    nodes: list[torch.fx.Node] = []
    sizes: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        serves = node.op.startswith("call") and node.users and sizes.issuperset(node.users)
        if serves or is_size(node):
            sizes.add(node)
        else:
            nodes.append(node)
    return nodes[::-1]


def _same(value: Any, other: Any) -> bool:
    return value is other or (not isinstance(value, Tensor) and bool(value == other))


def _same_arguments(value: Any, other: Any, pairs: dict[torch.fx.Node, torch.fx.Node]) -> bool:
    if isinstance(other, torch.fx.Node):
        if isinstance(value, torch.fx.Node):
            return pairs.get(value, other) is other  # nodes of sizes have no pair
        return isinstance(value, int)  # a size, which the other recording computes
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(
            _same_arguments(v, o, pairs) for v, o in zip(value, other, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(
            _same_arguments(v, other[k], pairs) for k, v in value.items()
        )
    if isinstance(value, slice):
        return all(
            _same_arguments(getattr(value, part), getattr(other, part), pairs)
            for part in ("start", "stop", "step")
        )
    return bool(value == other)


def _compiled(graph: torch.fx.Graph) -> FunctionType:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)
    function: FunctionType = names["forward"]
    return function


def record(
    layer: torch.nn.Module,
    entries: tuple[str, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: Signature,
    *,
    exact: bool = False,
    tells: bool = False,
    whole: bool = False,
) -> tuple[Any, Recorder, Guard | None]:
    """Run a call and record it.

    Args:
        layer: the layer that is called.
        entries: names of its methods that the call runs first.
        function: called with the layer and the arguments.
        args: of the call.
        kwargs: of the call.
        signature: of the arguments.
        exact: see :class:`~pyg_accel.record.sizes.Sizes`.
        tells: see :class:`~pyg_accel.record.sizes.Sizes`.
        whole: see :class:`~pyg_accel.record.recorder.Recorder`.

    Returns:
        The result, the recorder and the guard; no guard if the recorder has a reason.

    Raises:
        NotComparable: if the call cannot be recorded; it did not run.
    """
    reading = Reading(layer, [getattr(type(layer), name) for name in entries])
    inputs = signature.leaves(args, kwargs)
    recorder = Recorder(reading, inputs, signature.shapes, exact=exact, tells=tells, whole=whole)
    with recorder.watching():
        out = function(layer, *args, **kwargs)
    recorder.finish(out)
    if any(type(value) is Dim for value in tree_leaves(out)):
        out = tree_map_only(Dim, Dim.plain, out)
    if recorder.reason:
        return out, recorder, None
    try:
        guard = reading.settle()
        guard.fill(recorder.constants)
        guard.check(inputs)
        after = [*map(id, signature.leaves(args, kwargs))]
        if after != [*map(id, inputs)] or not signature.is_like(Signature(args, kwargs)):
            raise NotComparable("it changes a list among its arguments")
    except NotComparable as error:
        recorder.stop(str(error), may_change=error.may_change)
        return out, recorder, None
    guard.shareable &= recorder.is_shareable
    floats = {"" for value in tree_leaves((args, kwargs)) if type(value) is float}
    recorder.check_sizes(guard.floats | floats)
    return out, recorder, guard
