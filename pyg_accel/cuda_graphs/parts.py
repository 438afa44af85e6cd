"""Which parts of its rows a model takes by their position: with padding those are other rows.

A model that takes half of its nodes takes another half of padded ones, and edges of padding end
outside of it. A CUDA device answers that with an assertion, after which the process can use it no
more; so parts are compared with those of the unpadded call before anything reads them.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.cache import memory_of
from pyg_accel.cuda_graphs.inputs import Uncapturable
from pyg_accel.record.edge_tensors import name_of

__all__ = ["Part", "PartsTaken", "SameParts"]

Part = tuple[int, int, int]  # dimension, first row, number of rows
_FUNCTIONS = frozenset({
    "__getitem__", "chunk", "narrow", "split", "split_with_sizes", "tensor_split", "unsafe_chunk",
    "unsafe_split",
})  # fmt: skip


class _Parts(TorchFunctionMode):
    """Looks at the parts that a call takes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (name := name_of(func)) in _FUNCTIONS:
            for part, rows in _parts(args, made):
                self.look(name, part, rows)
        return made

    def look(self, name: str, part: Part, rows: int) -> None:
        """Look at a part of so many rows, which a function of that name took."""
        raise NotImplementedError


class PartsTaken(_Parts):
    """Collects them.

    Attributes:
        found: what was taken.
    """

    def __init__(self) -> None:
        """Nothing was taken yet."""
        super().__init__()
        self.found: set[Part] = set()

    def look(self, name: str, part: Part, rows: int) -> None:
        """Take a note of it."""
        self.found.add(part)


class SameParts(_Parts):
    """Refuses parts of padded rows that the unpadded call did not take."""

    def __init__(self, known: Collection[Part], padded: Collection[int]) -> None:
        """Take what the unpadded call took, and how many rows padded tensors have."""
        super().__init__()
        self._known, self._padded = known, padded

    def look(self, name: str, part: Part, rows: int) -> None:
        """Raise Uncapturable for another one."""
        if rows in self._padded and part not in self._known:
            raise Uncapturable(f"it takes a part of its nodes or edges by their position ({name})")


def _parts(args: tuple[Any, ...], made: Any) -> list[tuple[Part, int]]:
    """The parts that views are of the tensor they were made of, and the rows that it has."""
    whole = args[0] if args else None
    if not isinstance(whole, Tensor):
        return []
    found = []
    for out in made if isinstance(made, (tuple, list)) else (made,):
        if not isinstance(out, Tensor) or out.dim() != whole.dim():
            continue
        if memory_of(out) != memory_of(whole):  # by a mask or by ids
            continue
        for dim, (size, rows) in enumerate(zip(out.shape[:2], whole.shape[:2], strict=True)):
            if size != rows:
                stride = max(whole.stride(dim), 1)
                first = (out.storage_offset() - whole.storage_offset()) // stride
                found.append(((dim, first, size), rows))
    return found
