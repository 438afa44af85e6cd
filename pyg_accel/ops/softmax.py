"""Softmax over the edges of every target node."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide
from pyg_accel.backends.notes import note_choice
from pyg_accel.graph import CSR, Graph, check_graph
from pyg_accel.graph.csr import Edges
from pyg_accel.ops.arrays import ROW_ARRAYS, Arrays
from pyg_accel.ops.autograd import Gradient, OperatorPlan, Result
from pyg_accel.ops.operator import Recorded, call, define
from pyg_accel.ops.plan import computing, run

__all__ = ["edge_softmax", "softmax_of"]


def edge_softmax(graph: Graph, scores: Tensor, *, edge_order: bool = False) -> Tensor:
    """Normalise scores over the edges that share a target node.

    Args:
        graph: the graph.
        scores: [E] or [E, H].
        edge_order: scores are in the order of the edge list; by default in CSR order.

    Returns:
        The same shape; the values of a target's edges add up to 1, head by head.

    Raises:
        ValueError: for shapes or dtypes that do not fit.
        BackendNotSupported: if no backend can run it.
    """
    out: Tensor | None = run(graph, _make_plan, (edge_order,), (scores,))
    if out is not None:
        return out
    check_graph(graph)
    if not isinstance(scores, Tensor) or scores.dim() not in (1, 2):
        raise ValueError("expected 'scores' to be a tensor [E] or [E, H]")
    if scores.size(0) != graph.num_edges or not scores.is_floating_point():
        raise ValueError(f"expected 'scores' to be floating-point with {graph.num_edges} rows")
    if scores.device != graph.device:
        raise ValueError(f"expected 'scores' on {graph.device} (got {scores.device})")
    arrays = graph.csr(edge_order=edge_order)[:4]
    wide = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    out = call("edge_softmax", *arrays, wide)
    return out.view_as(scores)


def _make_plan(
    graph: Graph, kind: tuple[Any, ...], operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> OperatorPlan | None:
    (scores,), (edge_order,) = operands, kind
    fits = scores.dim() in (1, 2) and scores.size(0) == graph.num_edges
    if not fits or not scores.is_floating_point() or scores.device != graph.device:
        return None  # the operator raises
    rule = _Rule(edge_order, scores.shape[1:].numel())
    backends, launch = rule.launch(graph, scores)
    softmax = launch.bound()
    one = Launch(lambda scores: softmax(scores, None))
    plan = OperatorPlan(computing(one, (rule.fold,), (tuple(scores.shape),)), backends)
    if needs[0]:
        plan.rule, plan.keeps = rule, (1,)
    return plan


class _Rule(NamedTuple):
    """The gradient: the same kernel, on the result and its gradient.

    Attributes:
        edge_order: scores are in the order of the edge list.
        heads: of the scores.
        place: of the scores among the operands.
    """

    edge_order: bool
    heads: int
    place: int = 0

    def fold(self, scores: Tensor) -> Tensor:
        """Return scores as [E, H]."""
        return scores.reshape(scores.size(0), self.heads).contiguous()

    def csr(self, graph: Graph | CSR) -> CSR:
        """Return the arrays of a graph."""
        return graph if isinstance(graph, CSR) else graph.csr(edge_order=self.edge_order)

    def launch(self, graph: Graph | CSR, scores: Tensor) -> tuple[dict[str, None], Launch]:
        """Return the backend, and the launch of its kernel without the last argument."""
        csr = self.csr(graph)
        name, kernel = softmax_of(csr, self.fold(scores))
        return {name: None}, Launch(kernel, (csr,))

    def bind(self, graph: Graph | CSR, tensors: list[Tensor]) -> Gradient:
        """Plan the pass of a kernel."""
        backends, launch = self.launch(graph, tensors[0])
        return self._gradient(launch.bound(), tensors[0], backends)

    def operators(self, graph: Graph | CSR, edges: Edges | None, tensors: list[Tensor]) -> Gradient:
        """Plan the pass of an operator."""
        function = partial(call, "edge_softmax_backward", *self.csr(graph)[:4])
        return self._gradient(function, tensors[0], {})

    def _gradient(
        self, function: Callable[..., Any], like: Tensor, backends: dict[str, None]
    ) -> Gradient:
        folds = [(0, self.fold), (1, self.fold)]
        results = (Result(self.place, methodcaller("reshape", like.shape)),)
        return Gradient((), folds, [(function, False, (0, 1), results)], backends)


def softmax_of(csr: CSR, scores: Tensor) -> tuple[str, Callable[..., Tensor]]:
    """Return the backend of a kind of call, and its kernel."""
    decision = decide(OpSpec.on("edge_softmax", csr, scores, scores.size(1), 1))
    return decision.backend.name, decision.kernel.run


def _run(csr: CSR, scores: Tensor, grad: Tensor | None) -> Any:
    name, kernel = softmax_of(csr, scores)
    note_choice(name)
    return kernel(csr, scores, grad)


def _row_sum(arrays: list[Any], values: Tensor) -> Tensor:
    """The sum over each row, for each of its edges."""
    graph = Arrays.join(CSR(arrays[0], arrays[1], arrays[2], arrays[3], False))
    (sums,) = call("gspmm", *graph, [values.unsqueeze(-1)], "e0", ["sum"], False)
    (back,) = call("gspmm", *graph, [sums], "v0", ["none"], False)
    result: Tensor = back.squeeze(-1)
    return result


define(
    f"edge_softmax({ROW_ARRAYS}, Tensor scores) -> Tensor",
    lambda rowptr, col, eid, n, scores: _run(CSR(rowptr, col, eid, n, False), scores, None),
    lambda rowptr, col, eid, n, scores: torch.empty_like(scores),
    lambda rowptr, col, eid, n, scores: Recorded(
        _Rule(True, scores.size(1), 4), (5,), CSR(rowptr, col, eid, n, False)
    ),
)
# The backward pass is ``out * (grad - total)``, ``total`` the row sum of ``out * grad``.
define(
    f"edge_softmax_backward({ROW_ARRAYS}, Tensor out, Tensor grad) -> Tensor",
    lambda rowptr, col, eid, n, out, grad: _run(CSR(rowptr, col, eid, n, False), out, grad),
    lambda rowptr, col, eid, n, out, grad: torch.empty_like(out),
    {
        "out": lambda seed, arrays, out, grad: (
            seed * (grad - _row_sum(arrays, out * grad)) - grad * _row_sum(arrays, seed * out)
        ),
        "grad": lambda seed, arrays, out: out * (seed - _row_sum(arrays, seed * out)),
    },
)
