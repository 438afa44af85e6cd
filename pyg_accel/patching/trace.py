"""One accelerated call: what it gathers, and the kernels that its formulas run on."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel import ops
from pyg_accel.cache import saved_tensors_are_hooked, version_of
from pyg_accel.formula import Formula, Operand, Sum, map_operands, operands_of
from pyg_accel.graph import Graph
from pyg_accel.ops.csr import graph_of
from pyg_accel.ops.layout import Layout
from pyg_accel.ops.messages import messages
from pyg_accel.patching.attention import Source, Weights, Where, attend, weighs_edges
from pyg_accel.patching.edge_tensors import asks, materialize, name_of, plain_shape
from pyg_accel.patching.edge_type_matmul import with_pairs_as_sources
from pyg_accel.patching.lazy import (
    IDENTITY,
    LazyTensor,
    Unrecognised,
    is_single_side,
    rules,
    running,
)
from pyg_accel.patching.networks import Network, reduce_in_blocks
from pyg_accel.patching.reasons import subclass_reasons
from pyg_accel.patching.sampling import aggregate, in_force
from pyg_accel.patching.steps import ON_OPERANDS, REPEATABLE, VIEWS
from pyg_accel.patching.watch import Watch

__all__ = ["Done", "Made", "Trace"]


_WEIGHTS = 8  # numbers per edge up to which they are weights, and no features


# What this package asks of tensors; methods that do have no plan (:mod:`.readable`).
_ASKED = frozenset({"__get__", "stride", "storage_offset", "untyped_storage", "is_contiguous"})


class Made(NamedTuple):
    """An ordinary tensor that a message made, and how; function None: not to be made again."""

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


class Done(NamedTuple):
    """A reduction of messages, as a plan makes it again.

    Attributes:
        formula: of the messages.
        operands: as they were given, with the row of edge_index that gathers each (-1: none does),
            and whether all targets share one row.
        reduce: of the messages; several where an aggregation combines them.
        result: what came out.
    """

    formula: Formula
    operands: list[tuple[Tensor, int, bool]]
    reduce: str | tuple[str, ...]
    result: Tensor


class Trace(Watch):
    """One accelerated call: follows which tensors are gathered by which row of ``edge_index``.

    Attributes:
        edge_index: the graph that the call was given, as a plain tensor.
        owner: the tensor that the user holds; its graph is kept for as long as it lives.
        target: row of edge_index with the nodes that messages are sent to (1 unless the flow is
            turned round).
        operands: tensors that formulas refer to by index, rows first.
        failure: the first reason why this is none for a formula. A message may catch the exception,
            and TorchScript and others raise one of their own in its place.
        done: the last reduction, if it can be made again from its operands.
        softmaxed: the attention weights that were made, likewise.
        gathered: node features and the row of edge_index that gathers them.
        made: views of ordinary tensors, and what repeatable functions made of them.
        others: whether any other function ran on ordinary tensors, or returned one.
        drawn: how many random masks of attention weights were drawn.
        size: of sources and targets, by row of edge_index, if the call was given it.
    """

    runs_networks = True  # in blocks of target rows

    def __init__(self, edge_index: Tensor, flow: str, owner: Tensor | None = None) -> None:
        super().__init__()
        self.edge_index = edge_index
        self.owner = edge_index if owner is None else owner
        self.target = 1 if flow == "source_to_target" else 0
        self.num_edges = edge_index.size(1)
        self.device = edge_index.device
        self.failure: Unrecognised | None = None
        self.operands: list[Tensor] = []
        self._versions: list[int] = []
        self._grad, self._hooked = torch.is_grad_enabled(), saved_tensors_are_hooked()
        self.sides: list[str] = []
        self.repeated: list[bool] = []  # operand has one row for all targets
        self.sizes: list[int | None] = [None, None]
        self._rows: dict[int, tuple[Tensor, int, int]] = {}  # by identity: row and version
        self.done: Done | None = None
        self.softmaxed: Done | None = None
        self.gathered: list[tuple[Tensor, int]] = []
        self.made: list[Made] = []
        self.others = False
        self.drawn = 0
        self.size: Sequence[int | None] | None = None

    def __enter__(self) -> "Trace":
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
        if torch.is_grad_enabled() != self._grad:
            raise Unrecognised("gradients switched on or off inside of the message")
        if saved_tensors_are_hooked() != self._hooked:
            raise Unrecognised("a checkpoint inside of the message")

    watched = frozenset({
        "index_select", "__getitem__", "unbind", "view", "reshape", "expand", "expand_as",
        "unsqueeze", "contiguous",
    })  # fmt: skip

    def see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find gathers, follow views of edge_index."""
        result = rules().intercept(self, func, args, kwargs)
        if type(result) is Tensor:
            known = func in VIEWS or func is Tensor.__getitem__
            self.made.append(Made(func if known else None, args, kwargs, result))
        return result

    def pass_on(self, func: Any, args: Any = (), kwargs: Any = None, result: Any = None) -> None:
        """Take a note of a function that just ran."""
        if func in REPEATABLE and type(result) is Tensor:
            self.made.append(Made(func, args, kwargs or {}, result))
        elif not (asks(func) or name_of(func) in _ASKED):
            self.others = True

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on the operands of messages, and take a note of it."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in ON_OPERANDS and type(result) is Tensor:
            self.made.append(Made(func, args, kwargs, result))
        return result

    # -- edge_index and its rows -----------------------------------------------------------------

    def follow(self, index: Tensor, row: int) -> None:
        """Remember that a tensor is row 0 or 1 of edge_index, or made of it by views and copies."""
        self._rows[id(index)] = (index, row, _version(index))

    def followed(self, index: object) -> int | None:
        """Return the row of edge_index that a tensor was made of, whatever its shape is now."""
        known = self._rows.get(id(index))
        return None if known is None or known[2] != _version(known[0]) else known[1]

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

    def graph(self, num_rows: int, num_cols: int) -> Graph:
        """Return the CSR form of the graph, from the cache if it can."""
        try:
            with torch._C.DisableTorchFunction():
                return graph_of(self.edge_index, num_rows, num_cols, self.target, self.owner)
        except (IndexError, ValueError) as error:  # PyG's path raises what PyG raises
            raise Unrecognised(str(error), permanent=False) from error

    def kind(self) -> str:
        """What kind of call this was: one of :data:`~pyg_accel.patching.thresholds.KINDS`."""
        if any(isinstance(operand, Network) for operand in self.operands):
            if len(self.formulas) > 1 and all("network" in text for text in self.formulas):
                return "edge attention"  # a softmax in blocks runs the network several times
            return "edge matrices" if "outer" in "".join(self.formulas) else "edge networks"
        both = zip(self.operands, self.sides, strict=True)
        wide = [side for operand, side in both if plain_shape(operand)[1:].numel() > _WEIGHTS]
        if wide and self.formulas and "_j" not in "".join(self.formulas):  # all written out
            return "edge networks"
        if self.done and self.done.reduce == "attention" and weighs_edges(self.done.operands):
            return "edge attention"
        if "e" in wide:
            return "edge features"
        if any("softmax" in formula for formula in self.formulas):
            return "attention"
        return "messages" if len(wide) > 1 else "sums"

    # -- making lazy tensors ---------------------------------------------------------------------

    def gather(self, source: Tensor, dim: int, row: int) -> Tensor:
        """``source.index_select(dim, edge_index[row])``, later."""
        dim = dim % source.dim()
        known = self.sizes[row]
        if known is not None and known != source.size(dim):
            raise Unrecognised("node features of different numbers of rows")
        self.sizes[row] = source.size(dim)
        self.gathered.append((source, row))
        side = "v" if row == self.target else "u"
        shape = [*source.shape]
        shape[dim] = self.num_edges
        # Not even a view where none is needed: an operand that comes twice is known by identity.
        return self.leaf(side, source.movedim(dim, 0) if dim else source, shape, dim)

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
        for number, known in enumerate(self.operands):
            if known is operand and (self.sides[number], self.repeated[number]) == (
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

    # -- running formulas ------------------------------------------------------------------------

    def reduce(
        self, lazy: LazyTensor, reduces: Sequence[str], num_rows: int | None = None
    ) -> list[Tensor]:
        """Reduce the messages over the target nodes; the edge dimension becomes the nodes'."""
        if not set(reduces) <= set(lazy.later.commutes_with):
            raise Unrecognised(f"'{'+'.join(reduces)}' of messages that are sums")
        formula, numbers = self.own_numbers(lazy)
        if num_rows is None:
            num_rows = self.sizes[self.target] or self.rows_of_side("v")
        if any(isinstance(self.operands[n], Network) for n in numbers):
            self.others = True
            return reduce_in_blocks(self, lazy, reduces, num_rows)
        if list(reduces) == ["sum"] and in_force() is None:  # samples are of sums alone
            known = self.sizes[1 - self.target]
            where = Where(self.owner, self.target, num_rows, num_rows if known is None else known)
            operands = [self.operands[n] for n in numbers]
            attended = attend(formula, operands, [self.repeated[n] for n in numbers], where)
            if attended is not None:
                out, text, waiting = attended
                self.formulas = [f for f in self.formulas if f != waiting] + [text]
                if lazy.later is IDENTITY and lazy.edge_dim == 0:
                    self.done = Done(formula, self._given_places(numbers), "attention", out)
                    return [out]
                return [lazy.later.apply(out).movedim(0, lazy.edge_dim).contiguous()]
        graph = self.graph_of(num_rows)
        with torch._C.DisableTorchFunction():
            operands = self._given(numbers, num_rows)
            paired = with_pairs_as_sources(formula, operands, self.target, num_rows)
            if paired is not None:
                graph, formula, operands = paired
            operands = [materialize(t) for t in operands]
            outs, note = aggregate(graph, formula, operands, reduces)
        self.formulas.append(f"{'+'.join(reduces)}_j {formula}{note}")
        self.done = None
        if lazy.later is not IDENTITY or lazy.edge_dim:
            return [lazy.later.apply(out).movedim(0, lazy.edge_dim).contiguous() for out in outs]
        if paired is None:
            self.done = Done(formula, self._given_places(numbers), reduces[0], outs[0])
        return outs

    def _given_places(self, numbers: Sequence[int]) -> list[tuple[Tensor, int, bool]]:
        rows = {"u": 1 - self.target, "v": self.target, "e": -1}
        return [(self.operands[n], rows[self.sides[n]], self.repeated[n]) for n in numbers]

    def compute(self, lazy: LazyTensor) -> Tensor:
        """Write the tensor out: [.., E, ..]."""
        self.others = True
        if lazy.parts is not None:
            with torch._C.DisableTorchFunction():
                pieces = [self.compute(p) if isinstance(p, LazyTensor) else p for p in lazy.parts]
                return torch.cat(pieces, dim=-1)
        formula, numbers = self.own_numbers(lazy)
        with torch._C.DisableTorchFunction():
            if is_single_side(lazy):
                return self._gathered(formula, numbers).movedim(0, lazy.edge_dim)
            graph = self.graph_of(self.rows_of_side("v"))
            operands = self._operands(numbers, graph.num_rows)
            if lazy.summed:
                out = messages(graph, formula, operands, edge_order=True).view(plain_shape(lazy))
            else:
                out = ops.gspmm(graph, formula, operands, reduce="none", edge_order=True)
        self.formulas.append(f"{formula}")
        return lazy.later.apply(out).movedim(0, lazy.edge_dim)

    def _gathered(self, formula: Formula, numbers: list[int]) -> Tensor:
        assert isinstance(formula, Operand)
        if formula.side == "e":
            return materialize(self.operands[numbers[0]])
        row = self.target if formula.side == "v" else 1 - self.target
        (operand,) = self._operands(numbers, self.sizes[self.target] or 1)
        return operand.index_select(0, self.edge_index[row])

    def dot(self, lazy: LazyTensor) -> Tensor:
        """Sum over the last dimension: [E, ...] without it, written out."""
        self.others = True
        formula, numbers = self.own_numbers(lazy)
        graph = self.graph_of(self.rows_of_side("v"))
        operands = self._operands(numbers, graph.num_rows)
        with torch._C.DisableTorchFunction():
            out: Tensor = ops.gspmm(graph, Sum(formula), operands, reduce="none", edge_order=True)
        self.formulas.append(f"sum({formula})")
        return out

    def softmax(self, lazy: Tensor, num_rows: int) -> "LazyTensor":
        """Normalise scores [E] or [E, H] over the edges of each target, later."""
        if isinstance(lazy, LazyTensor) and (lazy.later is not IDENTITY or lazy.parts is not None):
            lazy = self.compute(lazy)
        if not isinstance(lazy, LazyTensor):
            lazy = self.leaf("e", lazy, lazy.shape, 0)
        formula, numbers = self.own_numbers(lazy)
        shape = tuple(plain_shape(lazy))
        graph = self.graph_of(num_rows)
        layout = Layout(shape[1:], len(shape) - 1)
        with torch._C.DisableTorchFunction():
            operands = [materialize(self.operands[n]) for n in numbers]
            if not lazy.summed:
                operands = [layout.fold(t) for t in operands]
            source = Source(self.owner, self.target, graph, formula, operands,
                            [self.repeated[n] for n in numbers], lazy.dtype, shape)  # fmt: skip
        self.formulas.append(source.text())
        weights = Weights(source)
        self.others = self.others or self.softmaxed is not None
        self.softmaxed = Done(formula, self._given_places(numbers), "softmax", weights)
        return self.leaf("e", weights, shape, 0)

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

    def _operands(self, numbers: list[int], num_rows: int) -> list[Tensor]:
        return [materialize(t) for t in self._given(numbers, num_rows)]

    def _given(self, numbers: list[int], num_rows: int) -> list[Tensor]:
        operands = ((self.operands[n], self.repeated[n]) for n in numbers)
        return [t.expand(num_rows, *t.shape[1:]) if again else t for t, again in operands]

    def rows_of_side(self, side: str) -> int:
        """Return the number of nodes at one side."""
        row = self.target if side == "v" else 1 - self.target
        size = self.sizes[1 - row] if self.sizes[row] is None else self.sizes[row]
        if size is None:
            raise Unrecognised("a message without node features")
        return size

    def graph_of(self, num_rows: int) -> Graph:
        """Return the graph that a message of this many target nodes runs on."""
        known = self.sizes[self.target]
        if known is not None and known != num_rows:
            raise Unrecognised("a number of target nodes that is not that of their features")
        source = self.sizes[1 - self.target]
        if source is None and self.size is not None:  # the message reads values of edges alone
            source = self.size[1 - self.target]
        return self.graph(num_rows, num_rows if source is None else source)


def _version(operand: Tensor) -> int:
    """As :func:`version_of`; tensors that wait look after themselves, a compiler's have none."""
    return version_of(operand) if type(operand) in (Tensor, Parameter) else -1
