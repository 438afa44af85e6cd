"""The sparse operations that are compared on a CPU: cases, operands, and their float64 truth.

Symbols: N nodes, E stored entries, F features. A message formula reads `u` (source node), `v`
(target node) and `e` (edge), numbered by their place among the operands, as `ops.gspmm` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Reduce = Literal["sum", "mean", "max", "min"]


class Message(NamedTuple):
    """What a formula needs, one letter an operand, and what it computes from [E, F] each."""

    operands: str
    compute: Callable[..., Tensor]


MESSAGES = {
    "add(u0,e1)": Message("ue", torch.add),
    "mul(u0,e1)": Message("ue", torch.mul),
    "relu(add(u0,e1))": Message("ue", lambda u, e: torch.add(u, e).relu()),
    "sub(v0,u1)": Message("vu", torch.sub),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One operation: SpMM (`weighted` or not), SDDMM (dot product) or binary-reduce."""

    op: Literal["spmm", "sddmm", "gspmm"]
    reduce: Reduce | None = None
    weighted: bool = False
    formula: str = ""

    @property
    def label(self) -> str:
        """Such as `spmm weighted sum` or `add(u0,e1) max`."""
        if self.op == "sddmm":
            return "sddmm dot"
        name = self.formula or ("spmm weighted" if self.weighted else "spmm")
        return f"{name} {self.reduce}"


SPMM = tuple(
    Case("spmm", reduce, weighted)
    for weighted in (False, True)
    for reduce in ("sum", "mean", "max", "min")
)
SDDMM = (Case("sddmm"),)
BINARY_REDUCE = (
    Case("gspmm", "sum", formula="add(u0,e1)"),
    Case("gspmm", "sum", formula="mul(u0,e1)"),
    Case("gspmm", "sum", formula="relu(add(u0,e1))"),
    Case("gspmm", "max", formula="sub(v0,u1)"),
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """A graph and float32 operands for every case on it.

    rowptr: [N + 1], col: [E] of targets by sources; weight: [E] and e: [E, F] in the order of col;
    u, v: [N, F]. All random normal, from a fixed seed.
    """

    rowptr: Tensor
    col: Tensor
    num_features: int

    @property
    def num_nodes(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def num_entries(self) -> int:
        return self.col.numel()

    @cached_property
    def row(self) -> Tensor:
        return torch.repeat_interleave(self.rowptr.diff())

    @cached_property
    def weight(self) -> Tensor:
        return _normal(0, self.num_entries)

    @cached_property
    def u(self) -> Tensor:
        return _normal(1, self.num_nodes, self.num_features)

    @cached_property
    def v(self) -> Tensor:
        return _normal(2, self.num_nodes, self.num_features)

    @cached_property
    def e(self) -> Tensor:
        return _normal(3, self.num_entries, self.num_features)

    def operands(self, case: Case) -> list[Tensor]:
        """The operands of a binary-reduce in the order of its formula."""
        return [getattr(self, letter) for letter in MESSAGES[case.formula].operands]

    def messages(
        self, case: Case, columns: slice = slice(None), dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """What travels along every edge, [E, columns]: the plain definition of a case."""
        end = {"u": self.col, "v": self.row}

        def per_edge(letter: str) -> Tensor:
            values = getattr(self, letter)[:, columns].to(dtype)
            return values if letter == "e" else values[end[letter]]

        if case.op == "gspmm":
            message = MESSAGES[case.formula]
            return message.compute(*map(per_edge, message.operands))
        if case.op == "sddmm":
            return per_edge("v").mul_(per_edge("u"))  # both are fresh, and large: spare a third
        if case.weighted:
            return self.weight.to(dtype).unsqueeze(1) * per_edge("u")
        return per_edge("u")


def _normal(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


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
