"""The CPU backend: the copy-reduce and binary-reduce of the DGL paper on x86, in C++.

Pull model over CSR rows (paper, section 3.1), rows split among threads by entries and hubs split
too, features in registers, blocks of columns and of sources sized from the last-level cache.
Nothing depends on the number of threads: results are bit-equal for any of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends.attention import AttentionGradient
from pyg_accel.backends.base import Backend, shares_rows, winners_are_columns
from pyg_accel.backends.cpu import attention
from pyg_accel.backends.cpu.program import (
    COMBINE,
    REDUCES,
    SIDES,
    compile_formula,
    program_reasons,
    sums_inside,
)
from pyg_accel.backends.sampling import RESCALES, STRATEGIES, Sampling, primes
from pyg_accel.backends.spec import OpSpec
from pyg_accel.cbsr import CBSR, scattered
from pyg_accel.formula import Binary, Formula, Operand, Sum, Unary, dot_ends, operands_of, parse
from pyg_accel.graph import CSR
from pyg_accel.native import build_info, cpu_library, cpu_unavailable_reasons

__all__ = ["CpuBackend"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# A product of two dense matrices takes as long a column as that of compressed rows takes an entry,
# divided by this; gradients included, measured for F = 256 on AVX-512.
_ZEROS_A_PRODUCT = 3
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


class CpuBackend(Backend):
    """C++ kernels with AVX-512, AVX2 and portable versions."""

    name = "cpu"

    def unavailable_reasons(self) -> list[str]:
        """It needs the native library."""
        return cpu_unavailable_reasons()

    def not_supported_reasons(self, spec: OpSpec) -> list[str]:
        """It does everything in floating point on a CPU, up to the size of its register machine."""
        reasons = []
        if spec.device != "cpu":
            reasons.append(f"tensors are on '{spec.device}'")
        if spec.dtype not in (_DTYPES + _EIGHT_BITS if spec.op == "sampled_spmm" else _DTYPES):
            reasons.append(f"features are {spec.dtype}")
        if spec.op == "cbsr_mm" and spec.k * _ZEROS_A_PRODUCT > spec.num_cols:
            reasons.append(f"dense rows of {spec.num_cols} columns are multiplied faster")
        if _in_stages(spec):
            reasons += attention.reasons(spec)
        elif spec.formula:
            reasons += program_reasons(parse(spec.formula), spec.reduces)
        return reasons

    def cost(self, spec: OpSpec) -> float:
        """Bytes gathered at about 20 GB/s, and what a call costs."""
        return 1e-5 + 2e-10 * spec.num_edges * spec.heads * spec.width * spec.dtype.itemsize / 4

    def prefers_parts(self, spec: OpSpec) -> bool:
        """What has a kernel of its own is faster there, unless one pass saves a gather.

        So attention runs by its parts, unless scores and values read the same rows (GATv2).
        """
        if spec.op == "gspmm_several":
            return all(_is_product(parse(text)) for text in spec.formulas)
        if spec.op == "attention":
            return not shares_rows(spec)
        return False

    def info(self) -> dict[str, Any]:
        """Return the instruction sets, the cache size and the build's facts."""
        facts = dict(item.split("=", 1) for item in cpu_library().info().split(";"))
        build = {k: v for k, v in build_info().items() if not k.startswith("cuda")}
        return {**facts, **build}

    def gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm`."""
        library = cpu_library()
        like = next(t for t in operands if t.is_floating_point())
        heads = max(t.size(1) for t in operands)
        width = max((t.size(2) for t in operands), default=1)
        if any(t.size(1) == 0 for t in operands) or any(t.size(2) == 0 for t in operands):
            heads, width = (0 if any(t.size(i) == 0 for t in operands) else n
                            for i, n in ((1, heads), (2, width)))  # fmt: skip
        arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols)
        arg_is_col = winners_are_columns(formula, reduces)

        if sums_inside(formula):
            return attention.run_several(csr, [formula] * len(reduces), reduces, operands)
        simple = len(reduces) == 1 and reduces[0] in ("sum", "mean", "max", "min")
        if simple and (spmm := _as_spmm(formula, operands, (heads, width))) is not None:
            code = REDUCES.index(reduces[0])
            result: list[Tensor] = library.spmm(
                *arrays, csr.sorted, *spmm, code, want_arg, arg_is_col
            )
            return result
        if reduces == ["none"] and (pair := _as_dot(formula, operands, (heads, width))):
            return [library.dot(*arrays, *pair).unsqueeze(-1)]

        shapes = tuple((t.size(1), t.size(2)) for t in operands)
        program = compile_formula(formula, shapes, width)
        sides = {o.index: SIDES.index(o.side) for o in operands_of(formula)}
        results: list[Tensor] = library.gspmm(
            *arrays,
            operands,
            [sides[i] for i in range(len(operands))],
            list(program.code),
            program.result,
            program.sum_result,
            like,
            heads,
            width,
            1 if program.sum_result else width,
            [REDUCES.index(reduce) for reduce in reduces],
            want_arg,
            arg_is_col,
        )
        return results

    def bind_gspmm(
        self,
        csr: CSR,
        formula: Formula,
        operands: list[Tensor],
        reduces: list[str],
        *,
        want_arg: bool,
    ) -> Callable[[CSR, list[Tensor]], list[Tensor]]:
        """See :meth:`Backend.bind_gspmm`: sums of features that have no weights are found once."""
        plain = isinstance(formula, Operand) and formula.side == "u" and len(operands) == 1
        own = type(self).gspmm is not CpuBackend.gspmm  # of a backend derived from this one
        if own or not plain or reduces not in (["sum"], ["mean"], ["max"], ["min"]):
            return super().bind_gspmm(csr, formula, operands, reduces, want_arg=want_arg)
        spmm = cpu_library().spmm
        rest = (None, 0, False, REDUCES.index(reduces[0]), want_arg,
                winners_are_columns(formula, reduces))  # fmt: skip

        def run(csr: CSR, operands: list[Tensor]) -> list[Tensor]:
            arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols, csr.sorted)
            result: list[Tensor] = spmm(*arrays, operands[0], *rest)
            return result

        return run

    def gspmm_several(
        self, csr: CSR, formulas: list[Formula], reduces: list[str], operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.gspmm_several`."""
        return attention.run_several(csr, formulas, reduces, operands)

    def scatter_arg(self, grad: Tensor, arg: Tensor, num_cols: int) -> Tensor:
        """See :meth:`Backend.scatter_arg`; 16-bit gradients are added up in fp32."""
        narrow = grad.dtype in (torch.bfloat16, torch.float16)
        wide = grad.float() if narrow else grad
        out: Tensor = cpu_library().scatter_arg(wide.contiguous(), arg.contiguous(), num_cols)
        return out.to(grad.dtype)

    def edge_softmax(self, csr: CSR, scores: Tensor, grad: Tensor | None) -> Tensor:
        """See :meth:`Backend.edge_softmax`."""
        grad = None if grad is None else grad.contiguous()
        out: Tensor = cpu_library().softmax(csr.rowptr, csr.eid, scores.contiguous(), grad)
        return out

    def attention(
        self, csr: CSR, score: Formula, value: Formula, operands: list[Tensor]
    ) -> list[Tensor]:
        """See :meth:`Backend.attention`."""
        return attention.run(csr, score, value, operands)

    def attention_backward(self, csr: CSR, call: AttentionGradient) -> list[Tensor]:
        """See :meth:`Backend.attention_backward`."""
        return attention.run_backward(csr, call)

    def maxk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See :meth:`Backend.maxk`."""
        values, indices = cpu_library().maxk(x, k)
        return values, indices

    def cbsr_spmm(
        self,
        csr: CSR,
        values: Tensor,
        indices: Tensor,
        width: int,
        weight: Tensor | None,
        reduce: str,
    ) -> Tensor:
        """See :meth:`Backend.cbsr_spmm`; 16-bit features are added up in fp32, as below."""
        if _dense_pays(width, values.size(1)):
            x = scattered(CBSR(values, indices, width))
            return self._weighted_sum(csr, x, weight, reduce)
        arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols)
        out: Tensor = cpu_library().cbsr_spmm(
            *arrays, _wide(values), indices, width, _wide(weight), reduce == "mean"
        )
        return out.to(values.dtype)

    def sspmm(
        self, csr: CSR, transposed: CSR, x: Tensor, indices: Tensor, weight: Tensor | None
    ) -> Tensor:
        """See :meth:`Backend.sspmm`: rows of x are pushed to their neighbours' stored columns."""
        if _dense_pays(x.size(1), indices.size(1)):
            return self._weighted_sum(transposed, x, weight, "sum").gather(1, indices.long())
        arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols, csr.sorted, transposed.rowptr)
        out: Tensor = cpu_library().cbsr_sspmm(*arrays, _wide(x), indices, _wide(weight))
        return out.to(x.dtype)

    def cbsr_dot(self, csr: CSR, values: Tensor, indices: Tensor, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_dot`."""
        arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols)
        out: Tensor = cpu_library().cbsr_dot(*arrays, _wide(values), indices, _wide(x))
        return out.to(x.dtype)

    def cbsr_mm(self, values: Tensor, indices: Tensor, width: int, dense: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_mm`."""
        out: Tensor = cpu_library().cbsr_mm(_wide(values), indices, width, _wide(dense))
        return out.to(values.dtype)

    def cbsr_sddmm(self, x: Tensor, indices: Tensor, dense: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_sddmm`."""
        out: Tensor = cpu_library().cbsr_sddmm(_wide(x), indices, _wide(dense))
        return out.to(x.dtype)

    def cbsr_mm_t(self, values: Tensor, indices: Tensor, width: int, x: Tensor) -> Tensor:
        """See :meth:`Backend.cbsr_mm_t`."""
        out: Tensor = cpu_library().cbsr_mm_t(_wide(values), indices, width, _wide(x))
        return out.to(values.dtype)

    def _weighted_sum(self, csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
        operands = [x.unsqueeze(1)]
        if weight is not None:
            operands.append(weight.view(-1, 1, 1))
        formula = parse("u0" if weight is None else "mul(u0,e1)")
        return self.gspmm(csr, formula, operands, [reduce], want_arg=False)[0].squeeze(1)

    def sampled_spmm(
        self,
        csr: CSR,
        x: Tensor,
        scale: Tensor | None,
        weight: Tensor | None,
        sampling: Sampling,
        seed: Tensor | None,
    ) -> Tensor:
        """See :meth:`Backend.sampled_spmm`."""
        steps = primes(x.device) if sampling.strategy == "random" else None
        how = (STRATEGIES.index(sampling.strategy), RESCALES.index(sampling.rescale), seed, steps)
        arrays = (csr.rowptr, csr.col, csr.eid, csr.num_cols)
        scale = None if scale is None else scale.contiguous()
        out: Tensor = cpu_library().sampled(*arrays, x, scale, weight, sampling.width, *how)
        return out


def _is_product(formula: Formula) -> bool:
    """Whether a formula is a product of two operands, or the dot product."""
    inner = formula.arg if isinstance(formula, Sum) else formula
    match inner:
        case Binary(op="mul", left=Operand(), right=Operand()):
            return True
    return False


def _in_stages(spec: OpSpec) -> bool:
    """Whether a call is one for csrc/cpu/stages.h; the shapes of its operands are known then."""
    if spec.op == "gspmm":
        return bool(spec.shapes) and sums_inside(parse(spec.formula))
    return spec.op == "gspmm_several" or spec.op.startswith("attention")


def _dense_pays(width: int, k: int) -> bool:
    """Whether whole vectors of a dense row take less time than k single numbers of it."""
    return width >= 64 and 8 * k > width


def _wide(features: Any) -> Any:
    """16-bit features in fp32; None stays None."""
    if features is None or features.dtype in (torch.float32, torch.float64):
        return features
    return features.float()


def _as_spmm(
    formula: Formula, operands: list[Tensor], full: tuple[int, int]
) -> tuple[Tensor, Tensor | None, int, bool] | None:
    """What the SpMM kernels need: features, weights, how they meet, and whether a relu follows.

    They do ``u``, ``u * e`` with one weight an edge (and head), and with edge features as wide as
    those of ``u`` also ``u + e``, ``u - e``, ``e - u``, ``u * e`` and the relu of each.
    """
    if isinstance(formula, Operand) and formula.side == "u":
        return operands[formula.index], None, 0, False
    relu = isinstance(formula, Unary) and formula.op == "relu"
    match formula.arg if isinstance(formula, Unary) and relu else formula:
        case Binary(op=("mul" | "add" | "sub") as op, left=Operand() as a, right=Operand() as b):
            u, e = (a, b) if a.side == "u" else (b, a)
            if (u.side, e.side) != ("u", "e"):
                return None
            x, weight = operands[u.index], operands[e.index]
            if tuple(x.shape[1:]) != full:
                return None
            if tuple(weight.shape[1:]) == full:
                meet = COMBINE.index("reverse_sub" if op == "sub" and a is e else op)
                return x, weight.contiguous(), meet, relu
            if op == "mul" and not relu and weight.size(2) == 1:
                return x, weight.contiguous(), 0, False
    return None


def _as_dot(
    formula: Formula, operands: list[Tensor], full: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """The target and source features of a dot product ``sum(u * v)``."""
    ends = dot_ends(formula)
    if ends is None or any(tuple(operands[i].shape[1:]) != full for i in ends):
        return None
    return operands[ends[0]], operands[ends[1]]
