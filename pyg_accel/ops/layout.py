"""Feature shapes: dimensions after the rows become heads x width, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pyg_accel.graph import Graph

__all__ = ["Layout", "broadcast", "find_layout", "per_target"]


@dataclass(frozen=True)
class Layout:
    """The mapping from trailing shapes to ``[rows, 1 | H, 1 | F]``.

    Attributes:
        trailing: shape of a message without its edge dimension.
        split: dimensions of ``trailing`` before this one are heads, the others width.
    """

    trailing: tuple[int, ...]
    split: int

    @property
    def heads(self) -> int:
        """H."""
        return prod(self.trailing[: self.split])

    @property
    def width(self) -> int:
        """F."""
        return prod(self.trailing[self.split :])

    def fold(self, operand: Tensor) -> Tensor:
        """Return an operand [rows, ...] as [rows, 1 | H, 1 | F], contiguous within a row."""
        if operand.dim() == 2 and len(self.trailing) == 1:  # [rows, F]: by far the most frequent
            return contiguous_rows(operand.unsqueeze(1 if self.split == 0 else 2))
        if operand.dim() == 3 and len(self.trailing) == 2 and self.split == 1:
            return contiguous_rows(operand)
        padded = (1,) * (len(self.trailing) - operand.dim() + 1) + tuple(operand.shape[1:])
        operand, groups = operand.reshape(operand.size(0), *padded), []
        for part in (slice(None, self.split), slice(self.split, None)):
            # Broadcast over all dimensions of the group, or over none.
            groups.append((self.trailing if any(n != 1 for n in padded[part]) else padded)[part])
        if (*groups[0], *groups[1]) != padded:
            operand = operand.expand(-1, *groups[0], *groups[1])
        return contiguous_rows(operand.reshape(operand.size(0), *map(prod, groups)))

    def unfold(self, result: Tensor) -> Tensor:
        """Return a result [rows, H, F] in the trailing shape."""
        if len(self.trailing) == 1:
            return result.squeeze(1)
        width = self.trailing[self.split :]
        if result.size(2) != self.width:  # 1, where wide operands are inside of sums
            width = (result.size(2),)
        return result.reshape(result.size(0), *self.trailing[: self.split], *width)

    def unfold_summed(self, result: Tensor) -> Tensor:
        """Return a result [rows, H, 1] of a sum over the width in the shape of the heads."""
        return result.reshape(result.size(0), *self.trailing[: self.split])


def contiguous_rows(operand: Tensor) -> Tensor:
    """Copy an operand [rows, H, F] unless each row is contiguous in itself."""
    _, heads, width = operand.shape
    _, head_stride, width_stride = operand.stride()
    if (width == 1 or width_stride == 1) and (heads == 1 or head_stride == width):
        return operand
    return operand.contiguous()


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return ``torch.broadcast_shapes`` of some shapes, in a tenth of its time.

    Raises:
        RuntimeError: if they do not.
    """
    rank = max(map(len, shapes))
    common = [1] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, rank - len(shape)):
            if size != 1 and size != common[dim]:
                if common[dim] != 1:
                    raise RuntimeError(f"shapes {list(map(tuple, shapes))} do not broadcast")
                common[dim] = size
    return tuple(common)


def find_layout(trailings: tuple[tuple[int, ...], ...], *, keep_last: bool = False) -> Layout:
    """Return the common layout of operands.

    Args:
        trailings: shape of each operand without its row dimension; they broadcast from the right.
        keep_last: the last dimension alone is the width (it will be summed over).

    Raises:
        ValueError: if the shapes do not broadcast.
    """
    try:
        common = tuple(torch.broadcast_shapes(*trailings))
    except RuntimeError:
        raise ValueError(f"features of shapes {list(trailings)} do not broadcast") from None
    if keep_last:
        return Layout(common, max(len(common) - 1, 0))
    # Dimensions that all operands share or broadcast form a group: a weight [H, 1] beside features
    # [H, F] splits after H; two operands [H, F] do not split at all.
    padded = [(1,) * (len(common) - len(t)) + tuple(t) for t in trailings]

    def pattern(d: int) -> tuple[bool, ...]:
        return tuple(shape[d] != common[d] for shape in padded)

    split = len(common)
    dims = [d for d in range(len(common)) if common[d] != 1]
    for d in reversed(dims):
        if pattern(d) != pattern(dims[-1]):
            break
        split = d
    else:
        split = 0
    return Layout(common, split)


def per_target(graph: Graph, t: Tensor) -> Tensor:
    """Repeat a row for every target."""
    return t.expand(graph.num_rows, *t.shape[1:])
