"""Sizes that batches are padded to: few of them, and little of them padding."""

from collections.abc import Iterable, Mapping

__all__ = ["SLACK", "bucket_for", "capacity", "fits", "rows_of"]

SLACK = 1.5  # a bucket larger than this is not worth its padding
_HEADROOM, _STEPS = 1.0625, 16


def capacity(size: int) -> int:
    """Return the size of a bucket for so many rows.

    Sizes grow geometrically, sixteen to a factor of two; small ones are multiples of eight.
    """
    wanted = int(size * _HEADROOM) + 1
    step = max((1 << (wanted - 1).bit_length() - 1) // _STEPS, 8)
    return -(-wanted // step) * step


def rows_of(axis: str, capacity: int) -> int:
    """Return how many rows tensors of an axis have: padding is a graph of its own, the last."""
    return capacity + (axis == "graphs")


def bucket_for(sizes: Mapping[str, int], taken: Iterable[int]) -> dict[str, int]:
    """Return a bucket whose numbers of rows differ from one another and from those of parameters.

    Args:
        sizes: the largest number of rows of each axis. That of graphs rarely changes.
        taken: sizes that mean something else.
    """
    used, found = set(taken), {}
    for axis, size in sizes.items():
        most, step = (size, 1) if axis == "graphs" else (capacity(size), 8)
        while rows_of(axis, most) in used:
            most += step
        found[axis] = most
        used.add(rows_of(axis, most))
    return found


def fits(sizes: Mapping[str, int], bucket: Mapping[str, int], slack: float | None = None) -> bool:
    """Whether a batch goes into a bucket, and leaves no more of it empty than ``slack`` allows.

    One node is padding always: edges of padding need an end.
    """
    return all(
        size + (axis == "nodes") <= bucket[axis]
        and (slack is None or axis == "graphs" or bucket[axis] <= max(slack * size, 64))
        for axis, size in sizes.items()
    )
