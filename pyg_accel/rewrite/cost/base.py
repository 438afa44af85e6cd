"""The protocol of cost models: primitives in, predicted times out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from pyg_accel.rewrite.cost.features import GraphFeatures

__all__ = ["DENSE", "SPARSE", "CostModel", "Primitive"]

# The primitives that can be measured alone.
DENSE = ("gemm", "gemm_tn", "scale_rows", "elementwise", "maxk")
SPARSE = ("spmm", "spmm_weighted", "sddmm", "scale_edges", "edge_softmax", "cbsr_spmm", "sspmm",
          "sampled_spmm")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Primitive:
    """One kernel call, with its sizes.

    Attributes:
        name: what runs. Dense: ``gemm`` [rows, inner] x [inner, cols], ``gemm_tn`` the same product
            with the first factor stored [inner, rows] (gradients of weights), ``scale_rows`` a
            diagonal times a dense [rows, cols], ``elementwise`` a map of one [rows, cols],
            ``exchange`` receives [rows, cols] of other processes, and sends about as many.
            Sparse, on ``graph``: ``spmm`` and ``spmm_weighted`` with [num_cols, cols] features,
            ``sddmm`` one dot product of ``cols`` features per edge, ``scale_edges`` a diagonal (or
            two) times the matrix, ``edge_softmax``; ``sampled_spmm``, which takes ``inner`` entries
            of a row. Of features of which ``inner`` columns are kept: ``maxk`` (dense) selects,
            ``cbsr_spmm`` sums them up, ``sspmm`` is its gradient, and ``cbsr_mm`` multiplies them
            with a weight, as do both of its gradients.
        rows: rows of the result.
        inner: inner dimension of a product, or how much of a row is read, else 0.
        cols: columns of the result; heads times features where there are heads.
        heads: attention heads.
        graph: features of the graph whose rows are walked (the transpose for gradients), if any.
        permuted: edge operands are read through a permutation, as on the transpose.
        shared: all heads weigh the same ``cols / heads`` features.
        fused: the kernel that computes the weights reads these features for them anyway.
    """

    name: str
    rows: int
    inner: int
    cols: int
    heads: int = 1
    graph: GraphFeatures | None = None
    permuted: bool = False
    shared: bool = False
    fused: bool = False


class CostModel(Protocol):
    """Predicts times; the cost of a tree is the sum over its primitives (paper, section 3.5)."""

    @property
    def source(self) -> str:
        """What decides, for people: the model's device and date, or why the roofline is used."""

    @property
    def learned(self) -> Collection[str]:
        """Names of the primitives whose times were measured; others have a roofline's."""

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call; all calls of a layer are asked for at once."""
