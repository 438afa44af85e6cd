"""The Triton backend: GPU kernels generated from message formulas.

A formula becomes one kernel that gathers, computes and reduces (:mod:`.emitter`); rows are divided
among programs by their lengths and columns by the L2 cache (:mod:`.launch`, and
:mod:`pyg_accel.backends.schedule`). On a graph that has no CSR form, kernels go over the edge list
(:mod:`.edges_codegen`) and add floats atomically, as gradients of CBSR features do, where that is
allowed; other results are the same in every run. Under Triton's interpreter the
same kernels run on CPU tensors, slowly: for tests, and only when asked for by name.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from pyg_accel.backends.base import Backend, Kernel, by_launch, placement_reasons, table
from pyg_accel.backends.dtypes import DTYPES
from pyg_accel.backends.spec import OpSpec
from pyg_accel.costs import segment_seconds
from pyg_accel.formula import has_sum, operands_of, parse

__all__ = ["MAX_WIDTH", "TRITON"]

MAX_WIDTH = 512  # of a head where a program holds it whole
_WIDE_ROW = 1024  # bytes


def _unavailable_reasons() -> list[str]:
    """It needs Triton, and a GPU or Triton's interpreter."""
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install triton (Linux)"]
    if not torch.cuda.is_available() and not _interpreted():
        return ["there is no CUDA device (TRITON_INTERPRET=1 interprets kernels on the CPU)"]
    return []


def _interpreted() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _reasons(spec: OpSpec) -> list[str]:
    """It runs every formula in floating point on a GPU."""
    runs_on = "cpu" if _interpreted() else "cuda"
    reasons = []
    if spec.device != runs_on:
        reasons.append(f"tensors are on '{spec.device}', kernels run on '{runs_on}'")
    dtypes = (*DTYPES, torch.int8) if spec.op == "sampled_spmm" else DTYPES
    return reasons + placement_reasons(spec, spec.device, dtypes)


def _whole_head_reasons(spec: OpSpec) -> list[str]:
    reasons = _reasons(spec)
    if spec.width > MAX_WIDTH:
        reasons.append(f"a head of {spec.width} features (at most {MAX_WIDTH})")
    # The features of a head are the columns of a tile, which operands and results share.
    widths = {width for _, width in spec.shapes} - {1}
    if spec.op == "attention":
        widths.add(spec.width)
    if len(widths) > 1:
        reasons.append(f"operands of {' and '.join(map(str, sorted(widths)))} features")
    return reasons


def _edge_reasons(spec: OpSpec) -> list[str]:
    """Sums over the width need the whole width in a block."""
    if any(has_sum(parse(text)) for text in spec.formulas):
        return _whole_head_reasons(spec)
    return _reasons(spec)


def _segment_reasons(spec: OpSpec) -> list[str]:
    return _reasons(spec) + ["tl.dot takes no float64"] * (spec.dtype == torch.float64)


def _shares_rows(spec: OpSpec) -> bool:
    """Whether the scores and the values of attention read the same rows of source features."""
    score, value = (
        {o.index for o in operands_of(parse(text)) if o.side == "u"}
        for text in (spec.score, spec.formula)
    )
    return any(spec.shapes[index][1] > 1 for index in score & value)


def _has_wide_dots(spec: OpSpec) -> bool:
    """Attention is one kernel, but for dot products of rows too wide to be gathered twice.

    One pass reads no fewer bytes than its parts where scores and values read different rows, and
    slices of narrow columns, which the L2 keeps, are not for whole heads. See
    ``benchmarks/kernels/attention.py`` and docs/explanation/triton_kernels.md.
    """
    if _shares_rows(spec) or not has_sum(parse(spec.score)):
        return False
    return spec.heads * spec.width * spec.dtype.itemsize >= _WIDE_ROW


def _info() -> dict[str, Any]:
    """The version of Triton and the devices."""
    import triton

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "triton": triton.__version__,
        "runs on": "CPU tensors, interpreted" if _interpreted() else ", ".join(devices),
    }


def _late(name: str) -> Callable[..., Any]:
    """A function of a module that imports Triton: at its first call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from pyg_accel.backends.triton import operators

        return getattr(operators, name)(*args, **kwargs)

    return run


_OPERATORS = (
    "scatter_arg", "edge_softmax", "maxk", "cbsr_spmm", "sspmm", "cbsr_dot", "sampled_spmm",
)  # fmt: skip
TRITON = Backend(
    "triton",
    table({op: _late(op) for op in _OPERATORS}, None, _reasons)
    | {
        op: Kernel(_late(op), lambda spec: segment_seconds(spec, "triton"), _segment_reasons)
        for op in ("segment_matmul", "segment_outer")
    }
    | {
        op: Kernel(by_launch(bind), None, _whole_head_reasons, bind, prefers_unfused)
        for op, bind, prefers_unfused in (
            ("gspmm_several", _late("bind_gspmm_several"), lambda spec: False),
            ("attention", _late("bind_attention"), _has_wide_dots),
        )
    }
    | {
        "attention_backward": Kernel(
            _late("attention_backward"), None, _whole_head_reasons, _late("bind_attention_backward")
        ),
        "edge_passes": Kernel(_late("edge_passes"), None, _edge_reasons, _late("bind_edge_passes")),
        "gspmm": Kernel(_late("gspmm"), None, _reasons, _late("bind_gspmm")),
    },
    _unavailable_reasons,
    info=_info,
)
