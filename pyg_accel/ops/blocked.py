"""Functions of a graph's edges, run a block of target rows at a time.

The results are those of one call on all edges. Intermediate tensors are freed with their block,
and the backward pass computes them again: peak memory is that of a block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import asked_for, prefer_backend
from pyg_accel.ops.autograd import each_gradient, is_batch
from pyg_accel.ops.blocks import Block

__all__ = ["Function", "in_blocks"]

# Of a block and the parts of all tensors that belong to it: results per target, or per edge.
Function = Callable[[Block, list[Tensor]], list[Tensor]]


def in_blocks(
    blocks: Sequence[Block],
    function: Function,
    tensors: Sequence[Tensor],
    sides: Sequence[str],
    num_rows: int,
    *,
    of_edges: bool = False,
) -> list[Tensor]:
    """Run a function on every block, and put its results together.

    Args:
        blocks: of a graph.
        function: gets a block, and of every tensor what belongs to it. It must draw no random
            numbers, change nothing, and read no tensor with gradients that it is not given.
        tensors: what it reads.
        sides: of every tensor: ``"u"`` has a row for each source node, ``"v"`` one for each target,
            ``"e"`` one for each edge, and ``"w"`` is read as a whole by all blocks.
        num_rows: of the results.
        of_edges: results have a row for each edge, in the order of the edge list; by default one
            for each target.
    """
    how = (tuple(blocks), function, tuple(sides), num_rows, of_edges)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        outs: tuple[Tensor, ...] = _Blocked.apply(how, *tensors)  # type: ignore[no-untyped-call]
        return list(outs)
    return _forward(how, tensors)


_How = tuple[tuple[Block, ...], Function, tuple[str, ...], int, bool]


def _part(block: Block, side: str, tensor: Tensor) -> Tensor:
    """What of a tensor belongs to a block."""
    if side == "w":
        return tensor
    return tensor.index_select(0, _places(block, side))


def _places(block: Block, side: str) -> Tensor:
    return {"u": block.sources, "v": block.rows, "e": block.edges}[side]


def _forward(how: _How, tensors: Sequence[Tensor]) -> list[Tensor]:
    blocks, function, sides, num_rows, of_edges = how
    outs: list[Tensor] = []
    for block in blocks:
        parts = [_part(block, side, t) for side, t in zip(sides, tensors, strict=True)]
        made = function(block, parts)
        if not outs:
            outs = [t.new_empty(num_rows, *t.shape[1:]) for t in made]
        where = block.edges if of_edges else block.rows
        for out, t in zip(outs, made, strict=True):
            out.index_copy_(0, where, t)
    return outs


class _Blocked(torch.autograd.Function):
    """A call of :func:`in_blocks` that keeps nothing but what it was given."""

    @staticmethod
    def forward(ctx: Any, how: _How, *tensors: Tensor) -> Any:
        ctx.how, ctx.asked_for = how, asked_for()
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(_forward(how, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if any(g is not None and is_batch(g) for g in grads):
            return each_gradient(lambda *one: _Blocked.backward(ctx, *one), grads)
        tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        # What autocast did in the forward pass, nothing, must not depend on where this runs.
        with prefer_backend(ctx.asked_for), torch.autocast(tensors[0].device.type, enabled=False):
            if torch.is_grad_enabled():
                return (None, *_differentiable(ctx.how, tensors, needs, grads))
            return (None, *_backward(ctx.how, tensors, needs, grads))


def _backward(
    how: _How, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Run every block again, and add up its gradients: those of half precision in float32."""
    blocks, function, sides, _, of_edges = how
    found = [
        t.new_zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32)) if need else None
        for t, need in zip(tensors, needs, strict=True)
    ]
    given = [n for n, grad in enumerate(grads) if grad is not None]
    wanted = [n for n, need in enumerate(needs) if need]
    for block in blocks if given else ():
        with torch.enable_grad():
            parts = [
                _part(block, side, t.detach()).detach().requires_grad_(need)
                for side, t, need in zip(sides, tensors, needs, strict=True)
            ]
            made = function(block, parts)
        where = block.edges if of_edges else block.rows
        chosen = [n for n in given if made[n].requires_grad]
        if not chosen:
            continue
        seeds = [_row(grads[n], where) for n in chosen]
        got = torch.autograd.grad(
            [made[n] for n in chosen], [parts[n] for n in wanted], seeds, allow_unused=True
        )
        for n, grad in zip(wanted, got, strict=True):
            total = found[n]
            assert total is not None
            if grad is None:
                continue
            if sides[n] == "w":
                total += grad
            elif sides[n] == "u":  # each once in a block, so the sum has one order
                total.index_add_(0, block.sources, grad.to(total.dtype))
            else:  # each once in all blocks
                total.index_copy_(0, _places(block, sides[n]), grad.to(total.dtype))
    return [None if g is None else g.to(t.dtype) for g, t in zip(found, tensors, strict=True)]


def _row(grad: Tensor | None, where: Tensor) -> Tensor:
    assert grad is not None
    return grad.index_select(0, where)


def _differentiable(
    how: _How, tensors: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients as autograd follows them: of a pass over all blocks that keeps everything."""
    blocks, function, sides, _, of_edges = how
    # Each a tensor of its own: one may be read at several sides, or be made from another.
    tensors = [t.view_as(t) for t in tensors]
    columns: list[list[Tensor]] = []
    for block in blocks:
        parts = [_part(block, side, t) for side, t in zip(sides, tensors, strict=True)]
        columns.append(function(block, parts))
    places = torch.cat([block.edges if of_edges else block.rows for block in blocks])
    outs = [torch.cat(made) for made in zip(*columns, strict=True)]
    chosen = [n for n, g in enumerate(grads) if g is not None and outs[n].requires_grad]
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
    seeds = [_row(grads[n], places) for n in chosen]
    got = iter(torch.autograd.grad([outs[n] for n in chosen], wanted, seeds, allow_unused=True,
                                   create_graph=True))  # fmt: skip
    return [next(got) if need else None for need in needs]
