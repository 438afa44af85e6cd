"""The short way of :func:`.gspmm` in eager mode: one autograd node from features to features.

What depends on the kind of a call alone (layout, backend, formulas of the gradients) is decided the
first time and kept. A call then checks the numbers of rows, and launches. Calls that are
observed, compiled or transformed go through the registered operator, as does a backward pass that
is to be differentiated again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import asked_for, prefer_backend
from pyg_accel.backends.spec import Shapes
from pyg_accel.formula import operands_of
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.gspmm_backward import (
    MEAN_GRADIENTS,
    gradients,
    kinds_of_shapes,
    mean_share,
    plan_gradients,
)
from pyg_accel.ops.launch import Launch
from pyg_accel.ops.layout import Layout
from pyg_accel.ops.operator import each_gradient, is_batch, is_observed
from pyg_accel.ops.steps import Step, fit

__all__ = ["Reduction"]


class _Gradient(NamedTuple):
    """The only gradient of a call, as one launch.

    Attributes:
        operand: whose it is.
        source: it is summed over the transposed graph.
        numbered: it reads edges in an order of their own.
        used: operands that it reads; behind them, the gradient of the result.
        launch: of its formula.
    """

    operand: int
    source: bool
    numbered: bool
    used: tuple[int, ...]
    launch: Launch


class Reduction:
    """A kind of call: a formula and its reductions, on operands of these trailing shapes.

    Args:
        text: the formula; without sums over the width.
        reduces: of its messages.
        sides: of every operand, by index.
        layout: in which the operands meet; each has all heads or one, all of the width or 1.
        trailings: shape of every operand without its rows.
        shapes: (heads, width) of every operand in that layout.
        edge_order: edge operands are in the order of the edge list.
        needs: which operands need gradients.
    """

    def __init__(
        self,
        text: str,
        reduces: tuple[str, ...],
        sides: Sequence[str],
        layout: Layout,
        trailings: Sequence[tuple[int, ...]],
        shapes: Shapes,
        *,
        edge_order: bool,
        needs: tuple[bool, ...],
    ) -> None:
        self.text, self.reduces, self.sides, self.needs = text, reduces, tuple(sides), needs
        self.layout, self.trailings, self.shapes = layout, tuple(trailings), shapes
        self.edge_order = edge_order
        want_arg = any(needs) and not {"max", "min"}.isdisjoint(reduces)
        self._launch = Launch(text, reduces, want_arg=want_arg)
        self._transposed = any(
            side == "u" and wanted for side, wanted in zip(self.sides, needs, strict=True)
        )
        steps = plan_gradients(text, reduces, needs, (True,) * len(reduces),
                               kinds_of_shapes(shapes))  # fmt: skip
        used = {i for step in steps for i in step.used}
        everything = "prod" in reduces
        # Which operands the gradients read: a plain sum keeps no features at all.
        self.kept = tuple(everything or i in used for i in range(len(self.sides)))
        self.keeps = want_arg or True in self.kept
        self._single = _single(steps, reduces) if len(steps) == sum(needs) else None
        self._of_mean: dict[str, Launch] = {}
        if reduces == ("mean",) and text == "u0":
            self._of_mean = {f: Launch(f, ("sum",), want_arg=False) for f in MEAN_GRADIENTS}

    def __call__(self, graph: Graph, operands: list[Tensor]) -> tuple[Tensor, ...]:
        """Return a result for each reduction, [rows, *layout.trailing]."""
        if True not in self.needs:
            return tuple(self.forward(graph, operands))
        outs: tuple[Tensor, ...] = _Reduce.apply(self, graph, *operands)  # type: ignore[no-untyped-call]
        return outs

    def forward(self, graph: Graph, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, and the winners of maxima and minima behind them."""
        folded = [self.layout.fold(t) for t in operands]
        outs = self._launch(graph.csr(edge_order=self.edge_order), folded)
        for i in range(len(self.reduces)):
            out = outs[i] if outs[i]._base is None else outs[i].clone()
            # In its final shape without being a view, which could not be changed in place.
            outs[i] = out.resize_(out.size(0), *self.layout.trailing)
        return outs

    def backward(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients of the operands, in their shapes."""
        if any([g is not None and is_batch(g) for g in grads]):
            found: Any = each_gradient(lambda *one: tuple(self.backward(ctx, one)), grads)
            return list(found)
        if all([g is None for g in grads]):
            return [None] * len(self.sides)
        if ctx.asked_for != "auto":
            with prefer_backend(ctx.asked_for):
                return self._gradients(ctx, grads)
        return self._gradients(ctx, grads)

    def _gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        layout, graph = self.layout, ctx.graph
        folded = [None if g is None else layout.fold(g) for g in grads]
        found: list[Tensor | None]
        # One launch computes the pass, which is neither differentiated nor observed.
        if (self._single or self._of_mean) and not (torch.is_grad_enabled() or is_observed()):
            assert folded[0] is not None
            place, grad = self._launched(ctx, folded[0])
            found = [None] * len(self.sides)
            found[place] = grad
        else:
            n = len(self.sides)
            saved = ctx.saved_tensors if self.keeps else (None,) * (n + len(self.reduces))
            operands = [None if t is None else layout.fold(t) for t in saved[:n]]
            arrays = Arrays.of(graph, edge_order=self.edge_order, transposed=self._transposed)
            found = gradients(arrays, operands, saved[n:], folded, self.text, self.reduces,
                              self.needs, self.shapes)  # fmt: skip
        return [
            None if g is None else g.reshape(g.size(0), *trailing)
            for g, trailing in zip(found, self.trailings, strict=True)
        ]

    def _launched(self, ctx: Any, grad: Tensor) -> tuple[int, Tensor]:
        """Return the operand whose gradient a single launch computes, and that gradient."""
        graph: Graph = ctx.graph
        if self._of_mean:
            turned = graph.transposed()._replace(eid=None)
            share, formula = mean_share(graph.rowptr, turned, grad.dtype)
            (found,) = self._of_mean[formula](turned, [grad, share])
            return 0, found
        assert self._single is not None
        operand, source, numbered, used, launch = self._single
        csr: CSR = (graph.transposed if source else graph.csr)(edge_order=self.edge_order)
        if not numbered and csr.eid is not None:
            csr = csr._replace(eid=None)
        n = len(self.sides)
        saved = ctx.saved_tensors if self.keeps else ()
        (found,) = launch(csr, [grad if i >= n else self.layout.fold(saved[i]) for i in used])
        return operand, fit(found, self.shapes[operand])


def _single(steps: Sequence[Step], reduces: tuple[str, ...]) -> _Gradient | None:
    """The gradient of a sum for one operand; None where there are several, or of others."""
    if len(steps) != 1 or reduces != ("sum",):
        return None
    step = steps[0]
    numbered = step.side == "e" or any(o.side == "e" for o in operands_of(step.formula))
    reduce = "none" if step.side == "e" else "sum"
    launch = Launch(str(step.formula), (reduce,), want_arg=False)
    return _Gradient(step.operand, step.side == "u", numbered, step.used, launch)


class _Reduce(torch.autograd.Function):
    """A call of a :class:`Reduction`."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, graph: Graph, *operands: Tensor) -> Any:
        outs = reduction.forward(graph, operands)
        reduces = reduction.reduces
        count = len(reduces)
        if reduction.keeps:
            keep = [t if k else None for t, k in zip(operands, reduction.kept, strict=True)]
            winners = iter(outs[count:])
            ctx.save_for_backward(
                *keep, *[next(winners, None) if r in ("max", "min") else None for r in reduces]
            )
        ctx.reduction, ctx.graph, ctx.asked_for = reduction, graph, asked_for()
        ctx.set_materialize_grads(False)
        return tuple(outs[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.reduction.backward(ctx, grads))
