"""The protocol of cost models: primitives in, predicted times out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from pyg_accel.rewrite.cost.features import GraphFeatures

__all__ = ["DENSE", "SPARSE", "CostModel", "Primitive"]

# The primitives that can be measured individually.
DENSE = ("gemm", "gemm_tn", "scale_rows", "elementwise", "maxk")
SPARSE = ("spmm", "spmm_weighted", "sddmm", "scale_edges", "edge_softmax", "cbsr_spmm", "sspmm",
          "sampled_spmm")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Primitive:
    """A kernel call, with its sizes.

    Attributes:
        name: kernel. Dense: ``gemm`` [rows, inner] x [inner, cols], ``gemm_tn`` the same product
            with the first factor stored [inner, rows] (gradients of weights), ``scale_rows`` a
            diagonal times a dense [rows, cols], ``elementwise`` a map of one [rows, cols],
            ``exchange`` receives [rows, cols] from other processes, and sends about as many.
            Sparse, on ``graph``: ``spmm`` and ``spmm_weighted`` with [num_cols, cols] features,
            ``sddmm`` one dot product of ``cols`` features per edge, ``scale_edges`` a diagonal (or
            two) times the matrix, ``edge_softmax``; ``sampled_spmm``, which takes ``inner`` entries
            of each row. On compressed rows with ``inner`` columns each: ``maxk`` (dense) makes
            them, ``cbsr_spmm`` sums them, and ``sspmm`` is its gradient.
        rows: rows of the result.
        inner: inner dimension of a product, or the columns or entries that are read of each row, or
            0.
        cols: columns of the result, all heads together.
        heads: attention heads.
        graph: features of the matrix of edges (its transpose for gradients), if any.
        permuted: whether values of edges are read through a permutation, as on the transpose.
        shared: whether all heads sum the same ``cols / heads`` features.
        fused: whether the kernel also computes the weights, from the same features.
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
        """A description: the device and date of the model, or why the roofline is used."""

    @property
    def learned(self) -> Collection[str]:
        """Names of the measured primitives; a roofline predicts the others."""

    def many(self, primitives: Iterable[Primitive]) -> list[float]:
        """Return the expected time of each call; called once for all calls of a layer."""
