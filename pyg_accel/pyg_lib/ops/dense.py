"""Products of groups of rows, sampled operations, softmax and sorting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.ops.operator import call
from pyg_accel.pyg_lib.ops.points import pointers

__all__ = [
    "grouped_matmul", "index_sort", "sampled_add", "sampled_div", "sampled_mul", "sampled_sub",
    "segment_matmul", "softmax_csr",
]  # fmt: skip


def grouped_matmul(
    inputs: Sequence[Tensor], others: Sequence[Tensor], biases: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Multiply pairs of matrices.

    Args:
        inputs: of shapes [N_i, K_i].
        others: of shapes [K_i, M_i].
        biases: of shapes [M_i].

    Returns:
        Matrices of shapes [N_i, M_i].
    """
    if biases is None:
        return [x @ other for x, other in zip(inputs, others, strict=True)]
    return [torch.addmm(bias, x, other)
            for x, other, bias in zip(inputs, others, biases, strict=True)]  # fmt: skip


def segment_matmul(
    inputs: Tensor, ptr: Tensor, other: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Multiply segments of rows by a matrix each: :func:`pyg_accel.ops.segment_matmul`.

    Args:
        inputs: [N, K].
        ptr: [B + 1] int64, where segments begin; best on the CPU.
        other: [B, K, M].
        bias: [B, M].

    Returns:
        [N, M].
    """
    other = other.to(inputs.dtype)  # autocast leaves weights in float32
    if torch.jit.is_scripting():
        out: Tensor = torch.ops.pyg_accel.segment_matmul(inputs, ptr.cpu().long(), other)
    else:
        out = ops.segment_matmul(inputs, ptr.long(), other)
    if bias is None:
        return out
    lengths = ptr.diff().to(out.device)
    return out + bias.repeat_interleave(lengths, 0, output_size=out.size(0))


def _sampled(t: Tensor, index: Tensor | None) -> Tensor:
    return t if index is None else t.index_select(0, index)


def sampled_add(
    left: Tensor, right: Tensor, left_index: Tensor | None = None, right_index: Tensor | None = None
) -> Tensor:
    """Return ``left[left_index] + right[right_index]``."""
    return _sampled(left, left_index) + _sampled(right, right_index)


def sampled_sub(
    left: Tensor, right: Tensor, left_index: Tensor | None = None, right_index: Tensor | None = None
) -> Tensor:
    """Return ``left[left_index] - right[right_index]``."""
    return _sampled(left, left_index) - _sampled(right, right_index)


def sampled_mul(
    left: Tensor, right: Tensor, left_index: Tensor | None = None, right_index: Tensor | None = None
) -> Tensor:
    """Return ``left[left_index] * right[right_index]``."""
    return _sampled(left, left_index) * _sampled(right, right_index)


def sampled_div(
    left: Tensor, right: Tensor, left_index: Tensor | None = None, right_index: Tensor | None = None
) -> Tensor:
    """Return ``left[left_index] / right[right_index]``."""
    return _sampled(left, left_index) / _sampled(right, right_index)


def softmax_csr(src: Tensor, ptr: Tensor, dim: int = 0) -> Tensor:
    """Normalise exponentials over segments: the kernels of :func:`pyg_accel.ops.edge_softmax`.

    Args:
        src: of any shape, with segments along ``dim``.
        ptr: int64, where segments begin, from 0 to ``src.size(dim)``.
        dim: a dimension.

    Returns:
        The shape of ``src``.

    Raises:
        ValueError: on the CPU, for ``ptr`` that does not ascend to the number of rows.
    """
    out: Tensor = torch.ops.pyg_accel.softmax_csr(src, ptr, dim)  # TorchScript calls operators
    return out


def _softmax_csr(src: Tensor, ptr: Tensor, dim: int = 0) -> Tensor:
    src = src if src.is_floating_point() else src * 1.0  # exponentials of integers are floats
    if src.numel() == 0:
        return src.clone()
    rows = src.movedim(dim, 0)
    ptr, num_rows = pointers("ptr", ptr, rows), rows.size(0)
    col = torch.zeros(num_rows, dtype=ptr.dtype, device=ptr.device)
    out: Tensor = call("edge_softmax", ptr, col, None, 1, rows.reshape(num_rows, -1).contiguous())
    return out.view(rows.shape).movedim(0, dim)


_library = torch.library.Library("pyg_accel", "FRAGMENT")
_library.define("softmax_csr(Tensor src, Tensor ptr, int dim=0) -> Tensor")
_library.impl("softmax_csr", _softmax_csr, "CompositeImplicitAutograd")


def index_sort(inputs: Tensor, max_value: int | None = None) -> tuple[Tensor, Tensor]:
    """Sort integers that are not negative: by torch, whose radix sort is as fast as pyg-lib's.

    Args:
        inputs: [N].
        max_value: not used.

    Returns:
        The sorted integers, and their positions in ``inputs``; ties are in order.

    Raises:
        RuntimeError: if ``inputs`` is not a vector.
    """
    if inputs.dim() != 1:
        raise RuntimeError(f"expected 'inputs' to be a vector (got {list(inputs.shape)})")
    return torch.sort(inputs, stable=True)
