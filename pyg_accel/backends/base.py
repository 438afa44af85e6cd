"""What a backend is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.sampling import Sampling
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import Formula, Operand, operands_of, parse
from pyg_accel.graph import CSR
from pyg_accel.settings import settings

__all__ = ["Backend", "Tolerance", "atomics_allowed", "shares_rows", "winners_are_columns"]

Tolerance = tuple[float, float]  # relative, absolute


def atomics_allowed() -> bool:
    """Whether a kernel may add floats atomically, so that its sums differ between runs."""
    return bool(settings.atomics) and not torch.are_deterministic_algorithms_enabled()


def winners_are_columns(formula: Formula, reduces: Sequence[str]) -> bool:
    """Whether winners are numbered by their source: a lone maximum (minimum) of source features.

    Its gradient is then a scatter of N x F elements that needs no edges.
    """
    return isinstance(formula, Operand) and formula.side == "u" and len(reduces) == 1


def shares_rows(spec: OpSpec) -> bool:
    """Whether the scores and the values of attention read the same rows of source features."""
    score, value = (
        {o.index for o in operands_of(parse(text)) if o.side == "u"}
        for text in (spec.score, spec.formula)
    )
    return any(spec.shapes[index][1] > 1 for index in score & value)


class Backend(ABC):
    """An implementation of the operators on some device.

    A backend sees arrays, never models. It says why it cannot do something (an empty list of
    reasons means that it can), what a call would cost, and how far its results may be from the
    truth. It overrides the methods of the operators that it has; dispatch passes it over for the
    others.

    Shapes: ``H`` heads, ``F`` features a head; operands are ``[rows, 1 | H, 1 | F]`` and contiguous
    within a row, index operands (winners of a maximum) have the dtype of ``csr.col``.
    """

    name: str

    @abstractmethod
    def unavailable_reasons(self) -> list[str]:
        """Return why the backend cannot be used on this machine at all."""

    def lacks(self, op: str) -> list[str]:
        """Return why an operator cannot be run at all: it is a method that was not overridden."""
        if getattr(type(self), op) is getattr(Backend, op):
            return [f"it has no kernel for '{op}'"]
        return []

    @abstractmethod
    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """Return why this call cannot be run, given that the backend is available."""

    @abstractmethod
    def cost(self, spec: OpSpec) -> float:
        """Return the expected time of the call in seconds; only the order of backends matters."""

    def prefers_parts(self, spec: OpSpec) -> bool:
        """Whether it was measured to be faster by several operators that do the same together."""
        return False

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return how far a result may be from the truth, relative to the sum of magnitudes."""
        return {
            torch.float64: (1e-12, 1e-12),
            torch.float32: (2e-5, 1e-6),
            torch.bfloat16: (2e-2, 1e-2),
            torch.float16: (4e-3, 2e-3),
        }[dtype]

    def info(self) -> dict[str, Any]:
        """Return facts about the build for ``python -m pyg_accel doctor``."""
        return {}

    def gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> list[Tensor]:
        """Compute the message of every edge and reduce it over each row.

        Args:
            csr: the graph.
            formula: the message.
            operands: by operand index.
            reduces: of ``sum mean max min prod sqsum`` ([num_rows, H, F]; empty rows give 0, or 1
                for ``prod``) and ``none`` (messages, [E, H, F] in the order of ``csr.eid``).
            want_arg: also return winners.

        Returns:
            One tensor a reduction; then with ``want_arg``, for each max and min, the winning edge
            of every element as ``csr.eid`` numbers them (-1 in empty rows), or the winning column
            where :func:`winners_are_columns` says so.
        """
        raise NotImplementedError

    def bind_gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> Callable[[CSR, list[Tensor]], list[Tensor]]:
        """Return a function that runs calls of :meth:`gspmm` like this one.

        It is kept, and called for graphs of the same :class:`~pyg_accel.facts.Kind` and operands
        that agree in all but their addresses and numbers of rows. A backend overrides it where
        deciding how to launch a kernel takes longer than to launch it.
        """
        return lambda csr, operands: self.gspmm(csr, formula, operands, reduces, want_arg=want_arg)

    def gspmm_several(
        self, csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
    ) -> list[Tensor]:
        """Run several formulas over the same operands in one pass.

        Args:
            csr: the graph.
            formulas: without ``sel``.
            reduces: of each: ``sum``, or ``none`` for one of a single number an edge and head.
            operands: of all, by operand index.

        Returns:
            [num_rows, H, F | 1] a sum; [E, H, 1] in the order of ``csr.eid`` for ``none``. H is the
            largest number of heads of an operand.
        """
        raise NotImplementedError

    def scatter_arg(self, grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
        """Add ``grad[r, f]`` to row ``arg[r, f]`` of a zero [num_cols, F]; skip negative ones."""
        raise NotImplementedError

    def edge_softmax(self, csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
        """Softmax of [E, H] scores over each row; with ``grad``, its backward (scores = result)."""
        raise NotImplementedError

    def attention(
        self, csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
    ) -> list[Tensor]:
        """Sum up values weighted by the softmax of scores over each row.

        Args:
            csr: the graph.
            score: one number an edge and head.
            value: of every edge; without sums over the width.
            operands: of both, by operand index.

        Returns:
            [num_rows, H, F], empty rows 0; and [num_rows, H], the logarithm of the sum of the
            exponentials of a row's scores (empty rows anything), in float64 for float64 operands
            and in float32 for others.
        """
        raise NotImplementedError

    def attention_backward(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """Go over the transposed graph and add up gradients of its rows' operands.

        Returns:
            [num_rows, H, F | 1] a formula; then what is wanted, [E, H, 1] in the order of
            ``csr.eid``.
        """
        raise NotImplementedError

    def attention_targets(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """Go over the graph itself likewise, with scores made anew: nothing is kept for an edge.

        Returns:
            [num_rows, H, F | 1] a formula.
        """
        raise NotImplementedError

    def sampled_spmm(
        self,
        csr: CSR,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor | None,
        sampling: Sampling,
        seed: Tensor | None,
    ) -> Tensor:
        """Add up at most ``sampling.width`` entries of each row.

        Args:
            csr: the graph.
            x: [num_cols, H, F]; with a scale, of int8 or float8_e4m3fn.
            scale: float32, [num_cols, 1] or [1, H * F], what ``x`` is multiplied by.
            weight: [E, 1 | H], contiguous, by ``csr.eid``.
            sampling: which entries, and by what they are multiplied.
            seed: [1] int64 on the same device, for random samples.

        Returns:
            [num_rows, H, F] of the dtype of ``scale``, or of ``x``.
        """
        raise NotImplementedError

    def maxk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Keep the k < F largest of each row of x [N, F], contiguous.

        NaN is larger than everything, -0.0 equals 0.0, the lowest columns win among equals.

        Returns:
            values [N, k] and indices [N, k] (uint8 if F <= 256, else uint16), columns ascending.
        """
        raise NotImplementedError

    # Of the next three, `values` and `indices` are the CBSR features of the source nodes (see
    # :class:`pyg_accel.cbsr.CBSR`): [num_cols, k], contiguous. `weight` is [E] as ``csr.eid``
    # numbers edges, or None for 1.

    def cbsr_spmm(
        self,
        csr: CSR,
        values: Tensor,
        indices: Tensor,
        width: int,
        weight: Tensor | None,
        reduce: str,
    ) -> Tensor:
        """Aggregate CBSR features into dense rows [num_rows, width]; ``reduce`` sum or mean."""
        raise NotImplementedError

    def sspmm(
        self, csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None
    ) -> Tensor:
        """Compute ``out[j, s] = sum_i weight_ij * x[i, indices[j, s]]``, [num_cols, k].

        The sum is over the edges (i, j) of the graph: row i of ``csr`` has an entry in column j,
        row j of ``transposed`` one in column i. x is [num_rows, F], contiguous.
        """
        raise NotImplementedError

    def cbsr_dot(self, csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
        """Compute ``sum_s values[j, s] * x[i, indices[j, s]]`` of every edge, [E] by ``csr.eid``.

        x is [num_rows, F], contiguous.
        """
        raise NotImplementedError

    # Products of CBSR rows V [N, F], as above, with dense matrices; contiguous, and of one dtype.

    def cbsr_mm(self, values: Tensor, indices: Tensor, width: int, dense: Tensor) -> Tensor:
        """Compute V D for ``dense`` [F, H]: [N, H]."""
        raise NotImplementedError

    def cbsr_sddmm(self, x: Tensor, indices: Tensor, dense: Tensor) -> Tensor:
        """Compute ``out[i, s] = x[i] . dense[indices[i, s]]`` for x [N, H], dense [F, H]."""
        raise NotImplementedError

    def cbsr_mm_t(self, values: Tensor, indices: Tensor, width: int, x: Tensor) -> Tensor:
        """Compute the transpose of V times x [N, H]: [F, H]."""
        raise NotImplementedError

    def segment_matmul(self, x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows ptr[r] to ptr[r + 1] of x [N, K] by weight[r], [K, M]; ptr on the CPU."""
        raise NotImplementedError

    def segment_outer(self, x: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
        """Return ``x[segment].T @ y[segment]`` of every segment, [R, K, M]; ptr is on the CPU."""
        raise NotImplementedError
