"""Functions of a graph's edges, run a block of target rows at a time.

The results equal one call on all edges. Intermediate tensors are freed with their block,
and the backward pass computes them again: peak memory does not grow with the graph.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import asked_for
from pyg_accel.graph import Graph
from pyg_accel.ops.autograd import Gradient, OperatorPlan, Result, apply, computed_again
from pyg_accel.ops.blocks import Block, blocks_of, edges_of_a_block

__all__ = ["Function", "in_blocks"]

# From a block and its parts of all tensors to results per target, or per edge.
Function = Callable[[Block, list[Tensor]], list[Tensor]]


def in_blocks(
    graph: Graph,
    bytes_per_edge: int,
    function: Function,
    tensors: Sequence[Tensor],
    sides: Sequence[str],
    num_rows: int,
    *,
    of_edges: bool = False,
    by_degree: bool = False,
) -> list[Tensor]:
    """Run a function on every block of a graph, and join the results.

    Args:
        graph: CSR by target.
        bytes_per_edge: intermediate results per edge, which fit into the cache for a block.
        function: takes a block and its part of every tensor. It must draw no random numbers,
            have no side effects, and read no other tensor with gradients.
        tensors: inputs of the function.
        sides: of every tensor: ``"u"`` has a row for each source node, ``"v"`` one for each target,
            ``"e"`` one for each edge, and ``"w"`` is read as a whole by all blocks.
        num_rows: of the results.
        of_edges: results have a row for each edge, in the order of the edge list; by default one
            for each target.
        by_degree: as of :func:`~pyg_accel.ops.blocks.blocks_of`.
    """
    most = edges_of_a_block(bytes_per_edge, graph.device)
    blocks = tuple(blocks_of(graph, most, by_degree=by_degree))
    how = (blocks, function, tuple(sides), num_rows, of_edges)
    needs = tuple([torch.is_grad_enabled() and t.requires_grad for t in tensors])
    if not any(needs):
        return _forward(how, tensors)
    plan = OperatorPlan(lambda *args: _forward(how, args), {}, sys.maxsize, _Rule(how, needs),
                        tuple(range(len(tensors))), requested=asked_for())  # fmt: skip
    return list(apply(plan, None, None, *tensors))


_How = tuple[tuple[Block, ...], Function, tuple[str, ...], int, bool]


def _part(block: Block, side: str, tensor: Tensor) -> Tensor:
    """The rows of a tensor for a block."""
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
        results = function(block, parts)
        if not outs:
            outs = [t.new_empty(num_rows, *t.shape[1:]) for t in results]
        where = block.edges if of_edges else block.rows
        for out, t in zip(outs, results, strict=True):
            out.index_copy_(0, where, t)
    return outs


class _Rule(NamedTuple):
    """The gradient of :func:`in_blocks`: every block runs again."""

    how: _How
    needs: tuple[bool, ...]

    def bind(self, graph: Any, tensors: list[Any]) -> None:
        """Return None: kernels of the function are unknown."""

    def operators(self, graph: Any, edges: Any, tensors: list[Any]) -> Gradient:
        """Plan the pass that runs all blocks again."""
        wanted = tuple([Result(i, None) for i, need in enumerate(self.needs) if need])
        return Gradient((), (), [(self.run, True, tuple(range(len(tensors))), wanted)], {})

    def run(self, tensors: list[Any]) -> list[Tensor]:
        """Run every block, and sum up the gradients, half precision in float32."""
        blocks, function, sides, _, of_edges = self.how
        count = len(sides)
        inputs = tensors[:count]
        wanted = [n for n, need in enumerate(self.needs) if need]
        wide = {n: torch.promote_types(inputs[n].dtype, torch.float32) for n in wanted}
        sums = {n: inputs[n].new_zeros(inputs[n].shape, dtype=dtype) for n, dtype in wide.items()}
        grads = {n: grad for n, grad in enumerate(tensors[count:]) if grad is not None}
        # The forward pass ran without autocast, and so does this.
        with torch.autocast(inputs[0].device.type, enabled=False):
            for block in blocks if grads else ():
                parts = [_part(block, side, t) for side, t in zip(sides, inputs, strict=True)]
                where = block.edges if of_edges else block.rows
                seeds = {n: grad.index_select(0, where) for n, grad in grads.items()}
                got = computed_again(partial(function, block), parts, self.needs, seeds)
                for n, grad in zip(wanted, got, strict=True):
                    if grad is None:
                        continue
                    if sides[n] == "w":
                        sums[n] += grad
                    elif sides[n] == "u":  # each once in a block, so the sum has one order
                        sums[n].index_add_(0, block.sources, grad.to(wide[n]))
                    else:  # each once in all blocks
                        sums[n].index_copy_(0, _places(block, sides[n]), grad.to(wide[n]))
        return [sums[n].to(inputs[n].dtype) for n in wanted]
