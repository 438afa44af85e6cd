"""Edge tensors that are not computed until something needs them.

Inside an accelerated ``propagate`` the tensors ``x_i``, ``x_j`` and what ``message`` makes of them
are :class:`LazyTensor`: they have a shape and a formula, but no storage. A reduction over the
target nodes turns the formula into one kernel call and an ordinary tensor. PyG's own code runs on
them unchanged.

The call that a lazy tensor belongs to is a :class:`Tracer`. Its subclass
:class:`~pyg_accel.patching.trace.Trace` says what torch functions do to lazy tensors
(:mod:`pyg_accel.patching.rules`) and runs the formulas.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from pyg_accel.formula import Computation, Formula, Operand, map_operands, operands_of
from pyg_accel.graph import Graph
from pyg_accel.ops.gspmm import REDUCES
from pyg_accel.ops.plan import arguments
from pyg_accel.patching.reasons import subclass_reasons
from pyg_accel.patching.running import Unrecognised, running
from pyg_accel.record.edge_tensors import (
    EdgeTensor,
    asks,
    changed_in_place,
    name_of,
    plain_shape,
    replaced,
)
from pyg_accel.record.recorder import copied
from pyg_accel.runtime.cache import memory_of, saved_tensors_are_hooked, version_of

__all__ = [
    "IDENTITY",
    "LazyTensor",
    "PostReduce",
    "Tracer",
    "first_operand",
    "is_single_side",
]


@dataclass(frozen=True)
class PostReduce:
    """What is left to do to messages, and can be done to the reduced ones instead.

    Attributes:
        apply: a function of a tensor with its rows first.
        commutes_with: the reductions for which the order makes no difference.
    """

    apply: Callable[[Tensor], Tensor]
    commutes_with: Collection[str] = REDUCES

    def then(self, following: "PostReduce") -> "PostReduce":
        """Return both, one after the other."""
        both = set(self.commutes_with) & set(following.commutes_with)
        return PostReduce(lambda t: following.apply(self.apply(t)), both)


IDENTITY = PostReduce(lambda t: t)


class LazyTensor(EdgeTensor):
    """A tensor with an edge dimension and a formula in place of storage.

    Outside of the formula language it behaves as an ordinary tensor: narrow ones are computed when
    an unknown function asks for them, wide ones raise :class:`Unrecognised`.
    """

    tracer: "Tracer"
    formula: Formula
    edge_dim: int
    parts: "tuple[Tensor, ...] | None"
    later: PostReduce
    shared: bool
    summed: bool

    @staticmethod
    def __new__(
        cls,
        trace: "Tracer",
        formula: Formula,
        shape: Sequence[int],
        edge_dim: int,
        dtype: torch.dtype,
        parts: "tuple[Tensor, ...] | None" = None,
        later: PostReduce = IDENTITY,
        summed: bool = False,
    ) -> "LazyTensor":
        """Make one; ``parts`` are the pieces of a concatenation that waits for a linear layer.

        With something to do ``later``, ``shape`` is what comes out of that. One that is ``summed``
        has one number per edge, or per edge and head, and operands [rows, heads | 1, width | 1]
        over whose width its formula sums.
        """
        lazy = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=trace.device)
        lazy.tracer, lazy.formula, lazy.edge_dim, lazy.parts = trace, formula, edge_dim, parts
        lazy.later, lazy.summed = later, summed
        lazy.shared = False  # a view or the base of this tensor exists
        return lazy

    def edges(self) -> tuple[int, int]:
        """See :meth:`EdgeTensor.edges`."""
        return self.edge_dim, self.tracer.num_edges

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({self.formula}, shape={list(plain_shape(self))})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not running.traces:  # the call is over, and a message of it was kept
            args, kwargs = replaced(LazyTensor, lambda t: t.tracer.compute(t), args, kwargs)
            return func(*args, **kwargs)
        trace = running.traces[-1]
        trace.check_modes()
        return trace.rules.apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Every function is caught above; an operator that comes by another way has no formula.
        raise Unrecognised(f"'{func}' on messages")


class Tracer(TorchFunctionMode):
    """The lazy tensors of one call: their operands, and which tensors are rows of ``edge_index``.

    It sees the torch functions of the call.

    Attributes:
        watched: names of the functions that it looks at; the others just run.
        formulas: what has been run, for the report.
        layer: whose call it is.
        given: returns the tensors that were there before the call and cannot be put back.
        edge_index: the graph that the call was given, as a plain tensor.
        target: row of edge_index with the nodes that messages are sent to (1 unless the flow is
            turned round).
        rules: what torch functions do to the lazy tensors.
        operands: tensors that formulas refer to by index, rows first.
        failure: the first reason why the message has no formula. A message may catch the exception,
            and TorchScript and others raise one of their own in its place.
        gathered: node features and the row of edge_index that gathers them.
        size: of sources and targets, by row of edge_index, if the call was given it.
        writes_weights: whether attention weights are ordinary tensors, as they leave the layer.
        copies: what the message reads may be changed in place before its gradient is computed.
        network_bytes: bytes of a row of the widest network on edges.
        linear_bytes: the same of linear layers of both ends, which run on the nodes.
    """

    rules: ClassVar[ModuleType]  # pyg_accel.patching.rules
    watched: frozenset[str] = frozenset()
    runs_networks = True  # in blocks of target rows

    def __init__(self, edge_index: Tensor, flow: str) -> None:
        super().__init__()
        self.formulas: list[Computation] = []
        self.layer: torch.nn.Module | None = None
        self.inputs: Callable[[], Iterable[Tensor]] = tuple
        self._storages: set[int] | None = None
        self.edge_index = edge_index
        self.target = 1 if flow == "source_to_target" else 0
        self.num_edges = edge_index.size(1)
        self.device = edge_index.device
        self.failure: Unrecognised | None = None
        self.operands: list[Tensor] = []
        self._versions: list[int] = []
        self.records_gradients, self._hooked = torch.is_grad_enabled(), saved_tensors_are_hooked()
        self.sides: list[str] = []
        self.repeated: list[bool] = []  # operand has one row for all targets
        self.sizes: list[int | None] = [None, None]
        self._rows: dict[int, tuple[Tensor, int, int]] = {}  # by identity: row and version
        self.gathered: list[tuple[Tensor, int]] = []
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.size: Sequence[int | None] | None = None
        self.writes_weights = self.copies = False
        self.network_bytes = self.linear_bytes = 0

    @cached_property
    def networks(self) -> fx.Graph:
        """The functions that networks on edges consist of; its first input is a block of edges."""
        graph = fx.Graph()
        graph.placeholder("block")
        return graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in self.watched:
            return self.rules.intercept(self, func, args, kwargs)
        if changed := changed_in_place(name, args, kwargs):
            self.guard(name, changed)
        return func(*args, **kwargs)

    def guard(self, name: str, changed: Iterable[Tensor]) -> None:
        """Raise before a tensor is changed in place that this call did not make.

        PyG's path, should it run after this one, would change it a second time.
        """
        if self._storages is None:
            self._storages = set(map(memory_of, self.inputs()))
        if not self._storages.isdisjoint(map(memory_of, changed)):
            raise Unrecognised(f"'{name}' changes a tensor in place that the message was given")

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        running.traces.append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        running.traces.pop()
        ordinary = error is None or isinstance(error, Exception)
        if self.failure is not None and ordinary and error is not self.failure:
            raise self.failure from error

    def check_modes(self) -> None:
        """Raise where autograd does not do with all of a message what it did when the call began.

        A formula has gradients for all of its operands or for none. Inside of the ``forward`` of a
        ``torch.autograd.Function`` they are off as well: its ``backward`` is not ours to replace.
        """
        if torch.is_grad_enabled() != self.records_gradients:
            raise Unrecognised("gradients switched on or off inside of the message")
        if saved_tensors_are_hooked() != self._hooked:
            raise Unrecognised("a checkpoint inside of the message")

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on the operands of messages."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # -- edge_index and its rows -----------------------------------------------------------------

    def follow(self, index: Tensor, row: int) -> None:
        """Remember that a tensor is row 0 or 1 of edge_index, or made of it by views and copies."""
        self._rows[id(index)] = (index, row, _version(index))

    def followed(self, index: object) -> int | None:
        """Return the row of edge_index that a tensor was made of, whatever its shape is now."""
        entry = self._rows.get(id(index))
        return None if entry is None or entry[2] != _version(entry[0]) else entry[1]

    def row_of(self, index: object, shape: Sequence[int] | None = None, dim: int = 0) -> int | None:
        """Return which row of edge_index a tensor is, if it is one.

        Args:
            index: any object.
            shape: the row is to be repeated to; by default it is [E], the row itself.
            dim: of the shape, where the edges are.
        """
        row = self.followed(index)
        if row is None:
            return None
        assert isinstance(index, Tensor)
        wanted = (self.num_edges,) if shape is None else tuple(shape)
        if tuple(index.shape) != wanted or index.dtype != self.edge_index.dtype:
            return None
        # Of a view of [E] that repeats it, all strides but one are 0.
        others = (stride for d, stride in enumerate(index.stride()) if d != dim and wanted[d] != 1)
        return row if wanted[dim] == self.num_edges and not any(others) else None

    def end_of(self, side: str) -> int:
        """Return the row of edge_index that gathers the features of sources or of targets."""
        return self.target if side == "v" else 1 - self.target

    # -- making lazy tensors ---------------------------------------------------------------------

    def gather(self, source: Tensor, dim: int, row: int) -> Tensor:
        """``source.index_select(dim, edge_index[row])``, later."""
        dim = dim % source.dim()
        num_rows = self.sizes[row]
        if num_rows is not None and num_rows != source.size(dim):
            raise Unrecognised("node features of different numbers of rows")
        self.sizes[row] = source.size(dim)
        self.gathered.append((source, row))
        source = self.unchanged(source)
        side = "v" if row == self.target else "u"
        shape = [*source.shape]
        shape[dim] = self.num_edges
        # Not even a view where none is needed: an operand that comes twice is known by identity.
        return self.leaf(side, source.movedim(dim, 0) if dim else source, shape, dim)

    def unchanged(self, tensor: Tensor) -> Tensor:
        """Return features as they are now, where PyG's path copies them and code may change them.

        A function whose gradient reads its arguments has to see the tensor itself: torch raises
        where that was changed.
        """
        if not self.copies or type(tensor) not in (Tensor, Parameter):
            return tensor
        return self._copy(tensor, copied)

    def protected(self, tensor: Tensor) -> Tensor:
        """Return features that the layer's caller cannot change before their gradient is made.

        A function on edges reads copies of them in PyG's path, one on nodes would read themselves.
        """
        leaves = arguments.tensors if self.records_gradients else ()
        if not any(tensor is t or tensor._base is t for t in leaves):
            return tensor
        return self._copy(tensor, partial(self.apply, torch.clone))

    def _copy(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Copy features, once as they are."""
        key = id(tensor), _version(tensor)
        entry = self._copies.get(key)
        if entry is None:  # the tensor is held, so that no other one has its identity
            entry = self._copies[key] = tensor, copy(tensor)
        return entry[1]

    def leaf(
        self,
        side: str,
        operand: Tensor,
        shape: Sequence[int],
        edge_dim: int,
        *,
        repeated: bool = False,
    ) -> LazyTensor:
        """Make a lazy tensor of one operand, rows first."""
        number = self.add_operand(side, operand, repeated=repeated)
        return LazyTensor(self, Operand(side, number), shape, edge_dim, operand.dtype)

    def add_operand(self, side: str, operand: Tensor, *, repeated: bool = False) -> int:
        """Number an operand; one that is known at the same side keeps its number."""
        for number, other in enumerate(self.operands):
            if other is operand and (self.sides[number], self.repeated[number]) == (
                side,
                repeated,
            ):
                return number
        for reason in subclass_reasons(operand):
            raise Unrecognised(reason, permanent=False)
        self.operands.append(operand)
        self._versions.append(_version(operand))
        self.sides.append(side)
        self.repeated.append(repeated)
        return len(self.operands) - 1

    def own_numbers(self, lazy: LazyTensor) -> tuple[Formula, list[int]]:
        """Renumber the operands of a formula from 0; return the old numbers."""
        self.check_modes()
        if lazy.parts is not None:
            raise Unrecognised("a concatenation that is not the input of a linear layer")
        numbers = list(dict.fromkeys(o.index for o in operands_of(lazy.formula)))
        if any(self._versions[n] != _version(self.operands[n]) for n in numbers):
            raise Unrecognised("a tensor that the message read was changed in place afterwards")
        place = {old: new for new, old in enumerate(numbers)}
        formula = map_operands(lazy.formula, lambda o: Operand(o.side, place[o.index]))
        return formula, numbers

    def num_targets(self) -> int:
        """Return the number of target nodes."""
        size = self.sizes[self.target]
        size = self.sizes[1 - self.target] if size is None else size
        if size is None:
            raise Unrecognised("a message without node features")
        return size

    # -- running formulas, by :class:`~pyg_accel.patching.trace.Trace` ---------------------------

    def graph_of(self, num_rows: int) -> Graph:
        """Return the graph that a message of this many target nodes runs on."""
        raise NotImplementedError

    def reduce(
        self, lazy: LazyTensor, reduces: Sequence[str], num_rows: int | None = None
    ) -> list[Tensor]:
        """Reduce the messages over the target nodes; the edge dimension becomes the nodes'."""
        raise NotImplementedError

    def compute(self, lazy: LazyTensor) -> Tensor:
        """Write the tensor out: [.., E, ..]."""
        raise NotImplementedError

    def dot(self, lazy: LazyTensor) -> Tensor:
        """Sum over the last dimension: [E, ...] without it, written out."""
        raise NotImplementedError


def is_single_side(lazy: LazyTensor) -> bool:
    """Whether a lazy tensor is one operand, not yet combined with another side."""
    return isinstance(lazy.formula, Operand) and lazy.parts is None and lazy.later is IDENTITY


def first_operand(lazy: LazyTensor) -> Tensor:
    """Return the operand of a lazy tensor of one side."""
    assert isinstance(lazy.formula, Operand)
    return lazy.tracer.operands[lazy.formula.index]


def _version(operand: Tensor) -> int:
    """As :func:`version_of`; tensors that wait look after themselves, a compiler's have none."""
    return version_of(operand) if type(operand) in (Tensor, Parameter) else -1
