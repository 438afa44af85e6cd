"""The short way of :func:`.gspmm` in eager mode: one autograd node from features to features.

What depends on the kind of a call alone (layout, backend, formulas of the gradients) is decided the
first time and kept. A call then checks the numbers of rows, and launches. Calls that somebody
watches, compiles or transforms go through the registered operator, and so does a backward pass that
is to be differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import asked_for, prefer_backend
from pyg_accel.graph import Graph
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.gspmm_backward import gradients, kinds_of, plan_gradients
from pyg_accel.ops.launch import run_gspmm
from pyg_accel.ops.layout import Layout, contiguous_rows
from pyg_accel.ops.operator import each_gradient, is_batch, somebody_listens
from pyg_accel.ops.steps import fit, shapes_of

__all__ = ["Reduction"]


class Reduction:
    """A kind of call: a formula and its reductions, on operands of these trailing shapes.

    Args:
        text: the formula; without sums over the width.
        reduces: of its messages.
        sides: of every operand, by index.
        layout: in which the operands meet; each has all heads or one, all of the width or 1.
        edge_order: edge operands are in the order of the edge list.
        needs: which operands need gradients.
    """

    def __init__(
        self,
        text: str,
        reduces: tuple[str, ...],
        sides: Sequence[str],
        layout: Layout,
        *,
        edge_order: bool,
        needs: tuple[bool, ...],
    ) -> None:
        self.text, self.reduces, self.sides = text, reduces, tuple(sides)
        self.layout, self.edge_order, self.needs = layout, edge_order, needs
        self.differentiable = any(needs)
        self.want_arg = any(needs) and not {"max", "min"}.isdisjoint(reduces)
        self._kept: tuple[bool, ...] | None = None

    def __call__(self, graph: Graph, operands: list[Tensor]) -> tuple[Tensor, ...]:
        """Return a result for each reduction, [rows, *layout.trailing]."""
        if not self.differentiable:
            return tuple(self.forward(graph, operands))
        outs: tuple[Tensor, ...] = _Reduce.apply(self, graph, *operands)  # type: ignore[no-untyped-call]
        return outs

    def forward(self, graph: Graph, operands: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, and the winners of maxima and minima behind them."""
        folded = [self.layout.fold(t) for t in operands]
        csr = graph.csr(edge_order=self.edge_order)
        outs = run_gspmm(csr, self.text, self.reduces, folded, want_arg=self.want_arg)
        for i in range(len(self.reduces)):
            out = outs[i] if outs[i]._base is None else outs[i].clone()
            # In its final shape without being a view, which nobody could change in place.
            outs[i] = out.resize_(out.size(0), *self.layout.trailing)
        return outs

    def kept(self, folded: Sequence[Tensor]) -> tuple[bool, ...]:
        """Return which operands the gradients read: a plain sum keeps no features at all."""
        if self._kept is None:
            steps = plan_gradients(self.text, self.reduces, self.needs,
                                   (True,) * len(self.reduces), kinds_of(folded))  # fmt: skip
            used = {i for step in steps for i in step.used}
            everything = "prod" in self.reduces
            self._kept = tuple(everything or i in used for i in range(len(self.sides)))
        return self._kept

    def backward(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients of the operands, in their shapes."""
        if any(g is not None and is_batch(g) for g in grads):
            found: Any = each_gradient(lambda *one: tuple(self.backward(ctx, one)), grads)
            return list(found)
        if all(g is None for g in grads):
            return [None] * len(self.sides)
        if ctx.asked_for != "auto":
            with prefer_backend(ctx.asked_for):
                return self._gradients(ctx, grads)
        return self._gradients(ctx, grads)

    def _gradients(self, ctx: Any, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        n, layout, graph = len(self.sides), self.layout, ctx.graph
        saved = ctx.saved_tensors
        operands = [None if t is None else layout.fold(t) for t in saved[:n]]
        heads, width = layout.heads, layout.width
        folded = [None if g is None else contiguous_rows(g.reshape(g.size(0), heads, width))
                  for g in grads]  # fmt: skip
        transposed = any(
            side == "u" and needs for side, needs in zip(self.sides, self.needs, strict=True)
        )
        arrays = Arrays.of(graph, edge_order=self.edge_order, transposed=transposed)
        if torch.is_grad_enabled() or somebody_listens():
            found = gradients(arrays, operands, list(saved[n:]), folded, self.text, self.reduces,
                              self.needs, ctx.shapes)  # fmt: skip
        else:
            found = self._launch(arrays, operands, list(saved[n:]), folded, ctx.shapes)
        return [
            None if g is None else g.reshape(rows, *trailing)
            for g, (rows, trailing) in zip(found, ctx.sizes, strict=True)
        ]

    def _launch(
        self,
        arrays: Arrays,
        operands: list[Tensor | None],
        winners: list[Tensor],
        grads: list[Tensor | None],
        shapes: tuple[tuple[int, int], ...],
    ) -> list[Tensor | None]:
        """Gradients of which no derivative will be asked for: a plain sum has a short way."""
        if self.reduces == ("sum",) and self.text == "u0" and grads[0] is not None:
            turned = arrays.transposed._replace(eid=None)
            (grad,) = run_gspmm(turned, "u0", ("sum",), [grads[0]], want_arg=False)
            return [fit(grad, shapes[0])]
        return gradients(arrays, operands, winners, grads, self.text, self.reduces, self.needs,
                         shapes)  # fmt: skip


class _Reduce(torch.autograd.Function):
    """A call of a :class:`Reduction`."""

    @staticmethod
    def forward(ctx: Any, reduction: Reduction, graph: Graph, *operands: Tensor) -> Any:
        outs = reduction.forward(graph, operands)
        count = len(reduction.reduces)
        folded = [reduction.layout.fold(t) for t in operands]
        kept = reduction.kept(folded)
        keep = [t if k else None for t, k in zip(operands, kept, strict=True)]
        winners = iter(outs[count:])
        ctx.save_for_backward(
            *keep,
            *(next(winners, None) if r in ("max", "min") else None for r in reduction.reduces),
        )
        ctx.reduction, ctx.graph, ctx.asked_for = reduction, graph, asked_for()
        ctx.shapes = shapes_of(folded)
        ctx.sizes = [(t.size(0), t.shape[1:]) for t in operands]
        ctx.set_materialize_grads(False)
        return tuple(outs[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.reduction.backward(ctx, grads))
