"""The facts of one operator call that a backend decides on: no tensors."""

from dataclasses import dataclass

import torch

from pyg_accel.sharing import Shared, per_column

__all__ = ["OpSpec"]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator call.

    Attributes:
        op: the method of :class:`~pyg_accel.backends.Backend` that runs it, e.g. ``"gspmm"``.
        device: device type, e.g. ``"cpu"``.
        dtype: dtype of the features.
        index_dtype: int32 or int64.
        num_rows: target nodes.
        num_cols: source nodes.
        num_edges: edges.
        heads: H of the message [E, H, F].
        width: F of the message.
        formula: text of the message formula (gspmm) or of the values (attention).
        reduces: reductions asked for (gspmm).
        k: features kept a row (MaxK, CBSR), edges kept a row (sampling; 0 where all are), or
            features of a row of the left matrix (segments, of which there are num_cols).
        shapes: (heads, width) of every operand (gspmm, attention).
        sharing: what the rows of a graph share; nothing until it was used often enough for that to
            be worth knowing.
        rounded: float32 products may be rounded, as ``torch.set_float32_matmul_precision`` allows.
        atomics: float atomics are allowed (asked for gradients of sums of CBSR features alone).
        score: text of the formula of scores (attention).
        formulas: texts of several formulas (gspmm_several, the backward pass of attention).
    """

    op: str
    device: str
    dtype: torch.dtype
    index_dtype: torch.dtype
    num_rows: int
    num_cols: int
    num_edges: int
    heads: int
    width: int
    formula: str = ""
    reduces: tuple[str, ...] = ()
    k: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    sharing: tuple[Shared, ...] = ()
    rounded: bool = False
    atomics: bool = False
    score: str = ""
    formulas: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f" {'+'.join(self.reduces)} {self.formula}" if self.formula else ""
        what += f" by {self.score}" if self.score else ""
        kept = f", k = {self.k}" if self.k else ""
        shared = f", {per_column(self.sharing)[-1]:.1f} edges a column" if self.sharing else ""
        return (
            f"{self.op}{what} on {self.device} in {self.dtype}: {self.num_rows} x {self.num_cols}, "
            f"{self.num_edges} edges, {self.heads} x {self.width} features{kept}{shared}"
        )
