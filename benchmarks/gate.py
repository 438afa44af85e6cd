"""Correctness before speed: every timed output is first held against a float64 result."""

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs

CHUNK = 2**25  # float64 messages that exist at a time, 256 MiB


def truth(case: Case, inputs: Inputs) -> Tensor:
    """The case in float64, from its definition: [N, F], or [E] for SDDMM; empty rows give 0."""
    width = max(1, CHUNK // max(1, inputs.num_entries))
    columns = [slice(at, at + width) for at in range(0, inputs.num_features, width)]
    parts = (inputs.messages(case, chunk, torch.float64) for chunk in columns)
    if case.op == "sddmm":
        return torch.stack([part.sum(1) for part in parts]).sum(0)
    empty = inputs.rowptr.diff().eq(0).unsqueeze(1)
    segments = [torch.segment_reduce(p, case.reduce, offsets=inputs.rowptr, axis=0) for p in parts]
    return torch.cat(segments, dim=1).masked_fill_(empty, 0.0)


def error(output: Tensor, expected: Tensor, case: Case, inputs: Inputs) -> float:
    """The largest error in units of what float32 rounding allows; above 1 the output is wrong.

    A sum of n terms of size s is rounded n times by at most n * s * eps; four times n * s * eps
    was never reached by a right result. A mean is that over n; max and min round only the message.
    """
    if output.shape != expected.shape:
        return float("inf")
    eps, size = torch.finfo(torch.float32).eps, expected.abs().max().clamp(min=1.0)
    if case.op == "sddmm":
        allowed = 4 * eps * (inputs.num_features + 4) * size
    else:
        adds_up = case.reduce == "sum"
        terms = inputs.rowptr.diff().unsqueeze(1) if adds_up else torch.zeros(1, 1)
        largest = inputs.u.abs().max() * 8 if adds_up else size
        allowed = 4 * eps * (terms + 4) * largest
    scaled = (output.double() - expected).abs() / allowed
    return float(torch.nan_to_num(scaled, nan=float("inf")).max()) if scaled.numel() else 0.0
