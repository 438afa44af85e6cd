"""One accelerated call: the execution of its formulas."""

from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.formula import Computation, Formula, Operand, Sum
from pyg_accel.graph import Graph
from pyg_accel.ops.csr import graph_of
from pyg_accel.ops.layout import Layout
from pyg_accel.ops.messages import messages
from pyg_accel.patching import rules
from pyg_accel.patching.attention import Source, Weights, Where, attend
from pyg_accel.patching.edge_type_matmul import with_pairs_as_sources
from pyg_accel.patching.lazy import IDENTITY, LazyTensor, Tracer, is_single_side
from pyg_accel.patching.networks import Network, reduce_in_blocks
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.sampling import aggregate, in_force
from pyg_accel.record.edge_tensors import materialize, plain_shape
from pyg_accel.record.recorder import perform, quiet

__all__ = ["Trace"]


class Trace(Tracer):
    """One accelerated call: runs the formulas of its messages."""

    rules: ClassVar[ModuleType] = rules
    watched = frozenset({
        "index_select", "__getitem__", "unbind", "view", "reshape", "expand", "expand_as",
        "unsqueeze", "contiguous",
    })  # fmt: skip

    # -- running formulas ------------------------------------------------------------------------

    def graph(self, num_rows: int, num_cols: int) -> Graph:
        """Return the stored CSR form of the graph."""
        try:
            return perform(graph_of, self.edge_index, num_rows, num_cols, self.target, borrows=True)
        except (IndexError, ValueError) as error:  # PyG's path raises what PyG raises
            raise Unrecognised(str(error), permanent=False) from error

    def reduce(
        self, lazy: LazyTensor, reduces: Sequence[str], num_rows: int | None = None
    ) -> list[Tensor]:
        """Reduce messages over the target nodes, along the edge dimension."""
        if not set(reduces) <= set(lazy.later.commutes_with):
            raise Unrecognised(f"'{'+'.join(reduces)}' of messages that are sums")
        formula, numbers = self.own_numbers(lazy)
        if num_rows is None:
            num_rows = self.sizes[self.target] or self.num_targets()
        if any(isinstance(self.operands[n], Network) for n in numbers):
            return reduce_in_blocks(self, lazy, reduces, num_rows)
        if list(reduces) == ["sum"] and in_force() is None:  # sums may be sampled
            num_cols = self.sizes[1 - self.target]
            where = Where(
                self.edge_index, self.target, num_rows, num_rows if num_cols is None else num_cols
            )
            operands = [self.operands[n] for n in numbers]
            attended = attend(formula, operands, [self.repeated[n] for n in numbers], where)
            if attended is not None:
                out, computed = attended
                waiting = Computation(score=computed.score)
                self.formulas = [f for f in self.formulas if f != waiting] + [computed]
                return _finished(lazy, [out])
        graph = self.graph_of(num_rows)
        with quiet():
            operands = self._expanded(numbers, num_rows)
            paired = with_pairs_as_sources(formula, operands, self.target, num_rows)
            if paired is not None:
                graph, formula, operands = paired
            operands = [materialize(t) for t in operands]
            outs, note = aggregate(graph, formula, operands, reduces)
        self.formulas.append(Computation(formula, tuple(reduces), note=note, products=self.products,
            linear_bytes=self.linear_bytes, linear_terms=self.linear_terms))  # fmt: skip
        return _finished(lazy, outs)

    def compute(self, lazy: LazyTensor) -> Tensor:
        """Materialise the tensor: [.., E, ..]."""
        if lazy.parts is not None:
            with quiet():
                pieces = [self.compute(p) if isinstance(p, LazyTensor) else p for p in lazy.parts]
                return torch.cat(pieces, dim=-1)
        formula, numbers = self.own_numbers(lazy)
        with quiet():
            if is_single_side(lazy):
                return self._gathered(formula, numbers).movedim(0, lazy.edge_dim)
            graph = self.graph_of(self.num_targets())
            operands = self._operands(numbers, graph.num_rows)
            if lazy.summed:
                out = perform(messages, graph, formula, operands, edge_order=True)
                out = out.view(plain_shape(lazy))
            else:
                out = perform(ops.gspmm, graph, formula, operands, reduce="none", edge_order=True)
        self.formulas.append(Computation(formula))
        return lazy.later.apply(out).movedim(0, lazy.edge_dim)

    def _gathered(self, formula: Formula, numbers: list[int]) -> Tensor:
        assert isinstance(formula, Operand)
        if formula.side == "e":
            return materialize(self.operands[numbers[0]])
        (operand,) = self._operands(numbers, self.sizes[self.target] or 1)
        return operand.index_select(0, self.edge_index[self.end_of(formula.side)])

    def dot(self, lazy: LazyTensor) -> Tensor:
        """Materialise the sum over the last dimension: [E, ...]."""
        formula, numbers = self.own_numbers(lazy)
        graph = self.graph_of(self.num_targets())
        operands = self._operands(numbers, graph.num_rows)
        out: Tensor = perform(
            ops.gspmm, graph, Sum(formula), operands, reduce="none", edge_order=True
        )
        self.formulas.append(Computation(Sum(formula)))
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
        with quiet():
            leaves = [materialize(self.operands[n]) for n in numbers]
            operands = leaves if lazy.summed else [layout.fold(t) for t in leaves]
            source = Source(self.edge_index, self.target, graph, formula, leaves, operands,
                            [self.repeated[n] for n in numbers], lazy.dtype, shape)  # fmt: skip
        self.formulas.append(Computation(score=source.score))
        weights = source.written() if self.writes_weights else Weights.of(source)
        return self.leaf("e", weights, shape, 0)

    def _operands(self, numbers: list[int], num_rows: int) -> list[Tensor]:
        return [materialize(t) for t in self._expanded(numbers, num_rows)]

    def _expanded(self, numbers: list[int], num_rows: int) -> list[Tensor]:
        operands = ((self.operands[n], self.repeated[n]) for n in numbers)
        return [t.expand(num_rows, *t.shape[1:]) if again else t for t, again in operands]

    def graph_of(self, num_rows: int) -> Graph:
        """Return the graph of messages with a number of target nodes."""
        expected = self.sizes[self.target]
        if expected is not None and expected != num_rows:
            raise Unrecognised("a number of target nodes that is not that of their features")
        source = self.sizes[1 - self.target]
        if source is None and self.size is not None:  # the message only reads values of edges
            source = self.size[1 - self.target]
        return self.graph(num_rows, num_rows if source is None else source)


def _finished(lazy: LazyTensor, outs: list[Tensor]) -> list[Tensor]:
    """Return reduced messages after the function that waits for them, targets where edges were."""
    if lazy.later is IDENTITY and not lazy.edge_dim:
        return outs
    return [lazy.later.apply(out).movedim(0, lazy.edge_dim).contiguous() for out in outs]
