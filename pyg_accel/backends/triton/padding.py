"""Rows of features that are no multiple of 16 bytes: copied to rows that are.

A thread loads 16 bytes at a time where all rows begin at a multiple of that, and one element where
they do not. Of whole inferences on an H200 a sum over the reddit-like graph (115 million edges,
float32) took about 4 ms at 40 columns and 15 ms at 41, while a copy of the features moves 80 MB.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_accel.formula import Formula, operands_of

__all__ = ["padded", "pays", "rows_to_pad"]

UNIT = 16  # bytes of a load
NARROW = 32  # bytes of a row that the memory hands out at once, whatever is asked of them
LEAST = 2**25  # numbers that edges gather: fewer are summed before the copies are launched
ENTRIES_A_ROW = 4  # for each row that is copied


def padded(t: Tensor, size: int | None = None) -> Tensor:
    """Return features [N, H, F] with zeros behind each head, so that it fills its last load.

    Args:
        t: features [N, H, F].
        size: bytes of the smallest of the numbers that it meets, which all need the same width; by
            default of its own.
    """
    missing = -t.size(2) % (UNIT // (size or t.element_size()))
    return torch.nn.functional.pad(t, (0, missing))


def pays(t: Tensor, entries: int, num_rows: int) -> bool:
    """Whether sums of gathered rows gain more than the copies take.

    Args:
        t: features [N, H, F].
        entries: rows that are gathered.
        num_rows: of the sums.
    """
    size, (_, heads, width) = t.element_size(), t.shape
    distance = t.stride(0) if t.size(0) > 1 else 0  # between rows; that of a single one is anything
    return (
        bool(width * size % UNIT or distance * size % UNIT)
        and width * size > NARROW
        and entries * heads * width >= LEAST
        and entries >= ENTRIES_A_ROW * (t.size(0) + num_rows)
    )


def rows_to_pad(
    formula: Formula, operands: Sequence[Tensor], reduces: Sequence[str], entries: int,
    num_rows: int,
) -> list[int]:  # fmt: skip
    """Return the operands to pad in a reduction over the targets; none where it does not pay.

    Features of edges are not copied: each of their rows is read once.
    """
    sides: dict[int, set[str]] = {}
    for operand in operands_of(formula):
        sides.setdefault(operand.index, set()).add(operand.side)
    width = max((operands[i].size(2) for i in sides), default=0)
    wide = [i for i in sides if operands[i].size(2) == width]
    if "none" in reduces or any("e" in sides[i] for i in wide):
        return []
    gathered = [operands[i] for i in wide if "u" in sides[i]]
    return wide if any(pays(t, entries, num_rows) for t in gathered) else []
