"""The facts of one operator call that a backend decides on: no tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.graph import CSR
from pyg_accel.graph.column_reuse import Shared, per_column
from pyg_accel.graph.facts import rounded as round_up

__all__ = ["OpSpec", "Shapes", "shapes_of", "widest"]

Shapes = tuple[tuple[int, int], ...]  # (heads, width) of operands


def shapes_of(operands: Iterable[Tensor]) -> Shapes:
    """Return (heads, width) of operands [rows, H, F]."""
    return tuple([(t.size(1), t.size(2)) for t in operands])


@lru_cache(maxsize=1024)
def widest(shapes: Shapes) -> tuple[int, int]:
    """Return the largest (heads, width) of operands, at least 1."""
    return max(1, *(h for h, _ in shapes)), max(1, *(f for _, f in shapes))


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator call.

    Attributes:
        op: the operator, of :mod:`pyg_accel.backends.reference`, e.g. ``"gspmm"``.
        device: device type, e.g. ``"cpu"``.
        dtype: dtype of the features.
        num_rows: target nodes, rounded up (``graph.facts.rounded``), like the next two.
        num_cols: source nodes.
        num_edges: edges.
        heads: H of the message [E, H, F].
        width: F of the message.
        formula: text of the message formula (gspmm) or of the values (attention).
        reduces: reductions (gspmm).
        k: features kept per row (MaxK, CBSR), edges kept per row (sampling; 0 for all), or features
            of a row of the left matrix (num_cols segments).
        shapes: (heads, width) of every operand (gspmm, attention).
        sharing: columns that rows share; empty until the graph was used often.
        rounded: float32 products may be rounded, as ``torch.set_float32_matmul_precision`` allows.
        atomics: float atomics are allowed (only set for gradients of sums of CBSR features).
        score: text of the formula of scores (attention).
        formulas: texts of several formulas (gspmm_several, the backward pass of attention).
    """

    op: str
    device: str
    dtype: torch.dtype
    num_rows: int
    num_cols: int
    num_edges: int
    heads: int
    width: int
    formula: str = ""
    reduces: tuple[str, ...] = ()
    k: int = 0
    shapes: Shapes = ()
    sharing: tuple[Shared, ...] = ()
    rounded: bool = False
    atomics: bool = False
    score: str = ""
    formulas: tuple[str, ...] = ()

    @classmethod
    def on(
        cls, op: str, csr: CSR, like: Tensor, heads: int, width: int, *, formula: str = "",
        reduces: tuple[str, ...] = (), k: int = 0, shapes: Shapes = (),
        sharing: tuple[Shared, ...] = (), rounded: bool = False, atomics: bool = False,
        score: str = "", formulas: tuple[str, ...] = (),
    ) -> "OpSpec":  # fmt: skip
        """Return the facts of a call on a graph, for features like these."""
        rowptr, col, _, num_cols = csr[:4]
        # By position, here alone: a look-up by names takes twice as long, and every call makes one.
        rows, cols, edges = (round_up(n) for n in (rowptr.numel() - 1, num_cols, col.numel()))
        return _cached(op, like.device.type, like.dtype, rows, cols, edges, heads,
                      width, formula, reduces, k, shapes, sharing, rounded, atomics, score,
                      formulas)  # fmt: skip

    @classmethod
    def by_rows(
        cls, op: str, like: Tensor, width: int, *, num_cols: int = 0, num_edges: int = 0, k: int = 0
    ) -> "OpSpec":
        """Return the facts of a call without a graph, on the rows of a matrix."""
        device, rows, num_edges = like.device.type, round_up(like.size(0)), round_up(num_edges)
        return _cached(op, device, like.dtype, rows, num_cols, num_edges, 1, width, k=k)

    @classmethod
    def of_any_size(
        cls, op: str, device: str, dtype: torch.dtype, heads: int, width: int, **facts: Any
    ) -> "OpSpec":
        """Return the facts of calls on a graph of any size: one node, one edge."""
        return cls(op, device, dtype, 1, 1, 1, heads, width, **facts)

    def __str__(self) -> str:
        what = f" {'+'.join(self.reduces)} {self.formula}" if self.formula else ""
        what += f" by {self.score}" if self.score else ""
        selected = f", k = {self.k}" if self.k else ""
        shared = f", {per_column(self.sharing)[-1]:.1f} edges a column" if self.sharing else ""
        return (
            f"{self.op}{what} on {self.device} in {self.dtype}: {self.num_rows} x {self.num_cols}, "
            f"{self.num_edges} edges, {self.heads} x {self.width} features{selected}{shared}"
        )


# So many fields take twenty times as long to fill in as to find filled in.
_cached = lru_cache(maxsize=4096)(OpSpec)
