"""Launches passes over the rows of a graph: whole rows, pieces of long ones, and their union."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.edges import Output
from pyg_accel.backends.schedule import schedule_of
from pyg_accel.backends.triton import gather
from pyg_accel.backends.triton.plan import graph_facts, make_plan, seen
from pyg_accel.backends.triton.recipe import SIZES
from pyg_accel.backends.triton.rows_codegen import combine_kernel, row_kernel
from pyg_accel.backends.triton.sequence import Kernel, Sequence, Slot
from pyg_accel.graph import CSR

__all__ = ["RowPass"]


class RowPass:
    """The launches of a pass.

    Args:
        csr: an example of the graphs of calls.
        outputs: the outputs.
        operands: examples of the operands: calls have their dtypes, strides and trailing sizes.
        options: of :func:`make_plan`.
    """

    def __init__(
        self, csr: CSR, outputs: SequenceOf[Output], operands: SequenceOf[Tensor], **options: Any
    ) -> None:
        plan = make_plan(tuple(outputs), tuple(map(seen, operands)), graph_facts(csr), **options)
        self._plan, self.recipe = plan, plan.recipe
        read = [operands[i] for i in plan.used]
        self._read = [(t.dtype, t.size(1), t.stride(0)) for t in read]
        gathered = plan.gathered or [False] * len(read)
        self._gathers = [gather.gather_of(t.size(1)) if first else None
                         for t, first in zip(read, gathered, strict=True)]  # fmt: skip
        recipe = plan.recipe
        types = {True: getattr(torch, recipe.position), False: getattr(torch, recipe.accumulate)}
        self._partial = []
        for state in recipe.states:
            heads, width = SIZES[state.shape]
            columns = (plan.heads if heads > 1 else 1) * (
                plan.width * recipe.unit if width > 1 else 1
            )
            self._partial.append((columns, types[state.kind.endswith("_at")]))
        self._rows: dict[tuple[bool, bool], Kernel] = {}

    def append_to(
        self,
        sequence: Sequence,
        csr: CSR,
        operands: SequenceOf[Slot],
        outs: SequenceOf[Slot],
        behind: SequenceOf[Slot] = (),
        part: int = 0,
    ) -> None:
        """Append them.

        Args:
            sequence: to append to.
            csr: the graph.
            operands: of the formulas.
            outs: where the outputs go.
            behind: where the numbers of softmax go, or the winners.
            part: of the width, in sums that take several passes.
        """
        plan, recipe = self._plan, self.recipe
        tile, piece_tile = recipe.tile, plan.pieces
        schedule = schedule_of(csr, tile.split, tile.piece, ordered=tile.rows > 1)
        order, pieces = schedule.order, schedule.pieces
        arrays = csr.rowptr, csr.col, csr.eid if recipe.numbered else None
        read = self._operands(sequence, csr, operands)
        of_rows = [out for out, o in zip(outs, recipe.outputs, strict=True) if o.side != "e"]
        of_edges = [out for out, o in zip(outs, recipe.outputs, strict=True) if o.side == "e"]
        stored, sizes = [*of_rows, *behind], (plan.heads, plan.width)
        last = (*sizes, part, tile.split)
        rows = csr.num_rows
        sequence.launch(
            self._over_rows(ordered=order is not None, cut=pieces is not None),
            (-(-rows // tile.rows), plan.programs),
            (*arrays, order, None, None, *read, *stored, *of_edges, rows, *last),
        )
        if pieces is None:
            return
        count = pieces.row.numel()
        states = [sequence.scratch((count, columns), dtype) for columns, dtype in self._partial]
        cut = (pieces.row, pieces.begin, pieces.end)
        sequence.launch(self._over_pieces, (-(-count // piece_tile.rows), plan.programs),
                        (*arrays, *cut, *read, *states, *of_edges, count, *last))  # fmt: skip
        if states:
            grid = (pieces.rows.numel(), plan.programs)
            arguments = (*arrays, pieces.rows, pieces.first, *states, *stored, *sizes)
            sequence.launch(self._combination, grid, arguments)

    def _operands(self, sequence: Sequence, csr: CSR, operands: SequenceOf[Slot]) -> list[Any]:
        """The operands that kernels read, each with its stride."""
        read: list[Any] = []
        for i, kernel, unit, (dtype, heads, stride) in zip(
            self._plan.used, self._gathers, self.recipe.aligned, self._read, strict=True
        ):
            slot = operands[i]
            if kernel is not None:
                assert csr.eid is not None, "entries are numbered where something is gathered"
                slot = sequence.scratch((csr.eid.numel(), heads, 1), dtype)
                gather.append_to(sequence, kernel, operands[i], stride, csr.eid, slot, heads)
                stride = heads
            read += (slot, stride // max(unit, 1))
        return read

    def _over_rows(self, *, ordered: bool, cut: bool) -> Kernel:
        kernel = self._rows.get((ordered, cut))
        if kernel is None:
            recipe = replace(self.recipe, tasks="order" if ordered else "rows", hubs=cut)
            kernel = self._rows[ordered, cut] = Kernel(row_kernel(recipe), recipe.tile.warps)
        return kernel

    @cached_property
    def _combination(self) -> Kernel:
        return Kernel(combine_kernel(self._plan.whole))

    @cached_property
    def _over_pieces(self) -> Kernel:
        recipe = replace(self.recipe, tasks="pieces", tile=self._plan.pieces)
        return Kernel(row_kernel(recipe), recipe.tile.warps)
