"""Edge tensors that are not computed until something needs them.

Inside an accelerated ``propagate`` the tensors ``x_i``, ``x_j`` and the messages computed from them
are :class:`LazyTensor`: they have a shape and a formula, but no storage. A reduction over the
target nodes runs the formula as one kernel call and returns an ordinary tensor. PyG's own code runs
on them unchanged.

The call of a lazy tensor is a :class:`Tracer`. Its subclass
:class:`~pyg_accel.patching.trace.Trace` applies rules for torch functions
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

from pyg_accel.formula import Computation, Formula, Operand, renumbered
from pyg_accel.graph import Graph
from pyg_accel.ops.gspmm import REDUCES
from pyg_accel.patching.reasons import Unrecognised, subclass_reasons
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
from pyg_accel.runtime.state import running

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
    """A function that commutes with the reduction of messages, and is applied after it.

    Attributes:
        apply: takes a tensor with its rows first.
        commutes_with: the reductions that it commutes with.
    """

    apply: Callable[[Tensor], Tensor]
    commutes_with: Collection[str] = REDUCES

    def then(self, following: "PostReduce") -> "PostReduce":
        """Return the composition."""
        both = set(self.commutes_with) & set(following.commutes_with)
        return PostReduce(lambda t: following.apply(self.apply(t)), both)


IDENTITY = PostReduce(lambda t: t)


class LazyTensor(EdgeTensor):
    """A tensor with an edge dimension and a formula in place of storage.

    Functions outside of the formula language compute narrow tensors, and raise
    :class:`Unrecognised` for wide ones.
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
        """Return a lazy tensor; ``parts`` are the pieces of a deferred concatenation.

        ``shape`` includes the effect of ``later``. A ``summed`` tensor has one number per edge, or
        per edge and head: its formula sums over the width of operands [rows, heads | 1, width | 1].
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
        if not running.traces:  # a stored message of a call that is over
            args, kwargs = replaced(LazyTensor, lambda t: t.tracer.compute(t), args, kwargs)
            return func(*args, **kwargs)
        trace = running.traces[-1]
        trace.check_modes()
        return trace.rules.apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Functions are handled above; operators from elsewhere have no formula.
        raise Unrecognised(f"'{func}' on messages")


class Tracer(TorchFunctionMode):
    """The lazy tensors of a call, their operands, and the tensors that are rows of ``edge_index``.

    Attributes:
        watched: names of intercepted functions; others just run.
        formulas: computed so far, for the report.
        layer: of the call.
        inputs: returns the tensors that existed before the call and cannot be restored.
        edge_index: the graph of the call, as a plain tensor.
        target: row of edge_index with the target nodes (1 unless the flow is reversed).
        rules: of torch functions on lazy tensors.
        operands: tensors that formulas refer to by index, rows first.
        failure: the first reason why the message has no formula. A message may catch the exception,
            and TorchScript and others replace it by their own.
        gathered: node features and the row of edge_index that gathers them.
        size: numbers of sources and targets, by row of edge_index, if passed to the call.
        writes_weights: whether attention weights are materialised, as they leave the layer.
        copies: whether inputs may change in place before the gradient is computed.
        network_bytes: bytes of a row of the widest network on edges.
        linear_bytes: the same for linear layers of both ends, which run on the nodes, together,
            and for matrices of relations.
        linear_terms: number of these layers, beyond one for each of PyG's, so far.
        products: number of products with these.
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
        self.network_bytes = self.linear_bytes = self.linear_terms = self.products = 0

    @cached_property
    def networks(self) -> fx.Graph:
        """The functions of networks on edges; the first input is a block of edges."""
        graph = fx.Graph()
        graph.placeholder("block")
        return graph

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:  # it hides messages
            raise Unrecognised("a transform of torch.func inside of the message")
        name = name_of(func)
        if name in self.watched:
            return self.rules.intercept(self, func, args, kwargs)
        if changed := changed_in_place(name, args, kwargs):
            self.guard(name, changed)
        return func(*args, **kwargs)

    def guard(self, name: str, changed: Iterable[Tensor]) -> None:
        """Raise before an in-place change of an input, which PyG's path might repeat."""
        if self._storages is None:
            self._storages = set(map(memory_of, self.inputs()))
        if not self._storages.isdisjoint(map(memory_of, changed)):
            raise Unrecognised(f"'{name}' changes a tensor in place that the message was given")

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        running.traces += (self,)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        running.traces = running.traces[:-1]
        ordinary = error is None or isinstance(error, Exception)
        if self.failure is not None and ordinary and error is not self.failure:
            raise self.failure from error

    def check_modes(self) -> None:
        """Raise if modes of autograd have changed since the call began.

        A formula has gradients for all of its operands or for none. In the ``forward`` of a
        ``torch.autograd.Function`` they are off too: its ``backward`` must not be replaced.
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
        """Note that a tensor is row 0 or 1 of edge_index, or a view or copy of it."""
        self._rows[id(index)] = (index, row, _version(index))

    def followed(self, index: object) -> int | None:
        """Return the row of edge_index that a tensor is a view or copy of, in any shape."""
        entry = self._rows.get(id(index))
        return None if entry is None or entry[2] != _version(entry[0]) else entry[1]

    def row_of(self, index: object, shape: Sequence[int] | None = None, dim: int = 0) -> int | None:
        """Return the row of edge_index that a tensor is, or None.

        Args:
            index: any object.
            shape: required shape, to which the row is repeated; by default [E].
            dim: dimension of the edges in the shape.
        """
        row = self.followed(index)
        if row is None:
            return None
        assert isinstance(index, Tensor)
        wanted = (self.num_edges,) if shape is None else tuple(shape)
        if tuple(index.shape) != wanted or index.dtype != self.edge_index.dtype:
            return None
        # A view that repeats [E] has only one nonzero stride.
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
        # No unneeded view: repeated operands are recognised by identity.
        return self.leaf(side, source.movedim(dim, 0) if dim else source, shape, dim)

    def unchanged(self, tensor: Tensor) -> Tensor:
        """Return a copy of features, as in PyG's path, if code may change them in place.

        Functions that save their arguments get the tensor itself: torch raises if it has changed.
        """
        if not self.copies or type(tensor) not in (Tensor, Parameter):
            return tensor
        return self._copy(tensor, copied)

    def protected(self, tensor: Tensor) -> Tensor:
        """Return features that the caller of the layer cannot change before the gradient.

        In PyG's path functions on edges read copies, but functions on nodes would not.
        """
        leaves = running.arguments if self.records_gradients else ()
        if not any(tensor is t or tensor._base is t for t in leaves):
            return tensor
        return self._copy(tensor, partial(self.apply, torch.clone))

    def _copy(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Copy features, once per version."""
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
        """Return a lazy tensor of one operand, rows first."""
        number = self.add_operand(side, operand, repeated=repeated)
        return LazyTensor(self, Operand(side, number), shape, edge_dim, operand.dtype)

    def add_operand(self, side: str, operand: Tensor, *, repeated: bool = False) -> int:
        """Return the number of an operand; a repeated one at the same side keeps its number."""
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
        (formula,), numbers = renumbered(lazy.formula)
        if any(self._versions[n] != _version(self.operands[n]) for n in numbers):
            raise Unrecognised("a tensor that the message read was changed in place afterwards")
        return formula, [*numbers]

    def num_targets(self) -> int:
        """Return the number of target nodes."""
        size = self.sizes[self.target]
        size = self.sizes[1 - self.target] if size is None else size
        if size is None:
            raise Unrecognised("a message without node features")
        return size

    # -- running formulas, by :class:`~pyg_accel.patching.trace.Trace` ---------------------------

    def graph_of(self, num_rows: int) -> Graph:
        """Return the graph of messages with a number of target nodes."""
        raise NotImplementedError

    def reduce(
        self, lazy: LazyTensor, reduces: Sequence[str], num_rows: int | None = None
    ) -> list[Tensor]:
        """Reduce messages over the target nodes, along the edge dimension."""
        raise NotImplementedError

    def compute(self, lazy: LazyTensor) -> Tensor:
        """Materialise the tensor: [.., E, ..]."""
        raise NotImplementedError

    def dot(self, lazy: LazyTensor) -> Tensor:
        """Materialise the sum over the last dimension: [E, ...]."""
        raise NotImplementedError


def is_single_side(lazy: LazyTensor) -> bool:
    """Whether a lazy tensor is a single operand."""
    return isinstance(lazy.formula, Operand) and lazy.parts is None and lazy.later is IDENTITY


def first_operand(lazy: LazyTensor) -> Tensor:
    """Return the operand of a lazy tensor that is a single one."""
    assert isinstance(lazy.formula, Operand)
    return lazy.tracer.operands[lazy.formula.index]


def _version(operand: Tensor) -> int:
    """As :func:`version_of`; -1 for deferred tensors, and for tensors of a compiler."""
    return version_of(operand) if type(operand) in (Tensor, Parameter) else -1
