"""Correctness before speed: every timed output is first held against a float64 result."""

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs

CHUNK = 2**25  # float64 messages that exist at a time, 256 MiB


class Truth(NamedTuple):
    """The right result, and by how much a right float32 result may be off."""

    values: Tensor  # float64 [N, F], or [E] for SDDMM
    allowed: Tensor  # float64 [N, 1], or a scalar


def truth(case: Case, inputs: Inputs) -> Truth:
    """The case in float64, straight from its definition; a target without edges gets 0."""
    width = max(1, CHUNK // max(1, inputs.num_entries))
    degree = inputs.rowptr.diff().unsqueeze(1)
    largest, results = torch.zeros((), dtype=torch.float64), []
    for at in range(0, inputs.num_features, width):
        messages = inputs.messages(case, slice(at, at + width), torch.float64)
        if messages.numel():
            largest = torch.maximum(largest, messages.abs().max())
        if case.op == "sddmm":
            results.append(messages.sum(dim=1))
        else:
            reduced = torch.segment_reduce(messages, case.reduce, offsets=inputs.rowptr, axis=0)
            results.append(reduced.masked_fill_(degree == 0, 0.0))
    if case.op == "sddmm":
        return Truth(torch.stack(results).sum(dim=0), _allowed(largest, inputs.num_features))
    return Truth(
        torch.cat(results, dim=1), _allowed(largest, degree if case.reduce == "sum" else 0)
    )


def error(output: Tensor, right: Truth) -> float:
    """The largest error in units of what is allowed; above 1 the output is wrong."""
    if output.shape != right.values.shape:
        return float("inf")
    if not output.numel():
        return 0.0
    off = (output.double() - right.values).abs() / right.allowed
    return float(torch.nan_to_num(off, nan=float("inf")).max())


def _allowed(largest: Tensor, terms: Tensor | int) -> Tensor:
    """A few roundings of one term, and one more for every term that is added up.

    With signs at random a partial sum of n terms has size sqrt(n), and n roundings of that add up
    to about n * eps; an order of summation that is worse than this would be a defect.
    """
    eps = torch.finfo(torch.float32).eps
    return largest.clamp(min=1e-30) * eps * (16 + 4 * torch.as_tensor(terms, dtype=torch.float64))
