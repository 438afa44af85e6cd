"""Removal of self-loops by a mask, in a padded call.

Layers of PyG remove them with ``edge_index[:, edge_index[0] != edge_index[1]]``. The host waits for
the number of remaining edges, and in a CUDA graph it cannot change. In a padded call all edges
remain, and edges that the mask removes are set to join nodes of padding, like edges of padding:
messages, degrees, softmax and means of real nodes do not see them.

In other tensors that such a mask indexes, removed rows become copies of the first remaining row.
One or two rows are added, so that the number of rows identifies the tensor: functions in the table
of :mod:`.masking` skip this padding too, and other functions see some padding in every trial.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_accel.cuda_graphs.functions import Handler
from pyg_accel.cuda_graphs.padding import Padding, padding_like
from pyg_accel.record.edge_tensors import name_of
from pyg_accel.runtime.cache import memory_of

__all__ = ["SelfLoops"]

_COMPARISONS = {"ne": 1, "not_equal": 1, "__ne__": 1, "eq": 2, "__eq__": 2}  # and rows to add
_INVERSIONS = ("__invert__", "bitwise_not", "logical_not")
_COPIES = ("clone", "contiguous", "flip", "to", "long", "int")
_JOINS = ("cat", "concat", "concatenate")


class SelfLoops:
    """Preserves the number of edges where a comparison of their ends selects some."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
        # Tensors of node ids by their memory, and masks by id() with the number of rows to add. The
        # references keep both from being reused by other tensors.
        self._ids = {memory_of(edges): edges for edges in padding.edges}
        self._masks: dict[int, tuple[Tensor, int]] = {}

    def table(self) -> dict[str, Handler]:
        """Return the handlers of all functions except ``__getitem__``."""
        return {
            **dict.fromkeys(_COMPARISONS, self._compared),
            **dict.fromkeys(_INVERSIONS, self._inverted),
            **dict.fromkeys((*_COPIES, *_JOINS, "stack"), self._copied),
            "__setitem__": self._assigned,
        }

    def _compared(self, func: Handler, *args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if len(args) == 2 and self._are_ends(*args):
            self._masks[id(out)] = out, _COMPARISONS[name_of(func)]
        return out

    def _inverted(self, func: Handler, mask: Tensor, **kwargs: Any) -> Any:
        out = func(mask, **kwargs)
        if id(mask) in self._masks:
            self._masks[id(out)] = out, 3 - self._masks[id(mask)][1]
        return out

    def _copied(self, func: Handler, *args: Any, **kwargs: Any) -> Any:
        """Note the result of a function that copies node ids."""
        out, name = func(*args, **kwargs), name_of(func)
        if type(out) is not Tensor or out.is_floating_point() or out.dtype == torch.bool:
            return out
        ids = all(map(self._are_ids, args[0])) if name == "stack" else self._are_ids(args[0])
        if name in _JOINS:
            # add_self_loops() appends [2, N] to an edge_index.
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            pairs = all(t.dim() == 2 and t.size(0) == 2 for t in args[0])
            ids = dim in (1, -1) and pairs and self._are_ids(args[0][0])
        if ids:
            self._note(out)
        return out

    def _note(self, ids: Tensor) -> None:
        self._ids[memory_of(ids)] = ids
        if ids.dim() == 2 and ids.size(0) == 2:
            self._padding.note(ids)

    def _are_ids(self, value: Any) -> bool:
        return type(value) is Tensor and memory_of(value) in self._ids

    def _are_ends(self, one: Any, other: Any) -> bool:
        """Whether two tensors are the two rows of an edge_index."""
        if not (self._are_ids(one) and self._are_ids(other) and memory_of(one) == memory_of(other)):
            return False
        different = bool(one.storage_offset() != other.storage_offset())
        return different and one.dim() == 1 and one.shape == other.shape

    def _mask_in(self, value: Any, index: Any) -> tuple[Tensor | None, int, int]:
        """Return the mask that indexes a tensor, the rows to add, and the dimension."""
        columns = type(index) is tuple and len(index) == 2 and type(index[0]) is slice
        dim = int(columns and index[0] == slice(None))
        mask, more = self._masks.get(id(index[1] if dim else index), (None, 0))
        if mask is None or type(value) is not Tensor or value.shape[dim : dim + 1] != mask.shape:
            return None, 0, 0
        return mask, self._padding.spare(len(mask), more), dim

    def selected(self, func: Handler, value: Tensor, index: Any) -> Any:
        """Return all rows, with padding for rows that the mask does not select."""
        mask, more, dim = self._mask_in(value, index)
        if mask is None:
            return func(value, index)
        shape = [-1 if d == dim else 1 for d in range(value.dim())]
        selected = F.pad(mask, (0, more)).view(shape)
        if self._are_ids(value):
            padding = self._padding.ends(len(mask) + more).to(value.dtype).view(shape)
        else:
            padding = value.detach().index_select(dim, mask.to(torch.int8).argmax().view(1))
            if value.is_floating_point():
                # If nothing is selected, there is no row to copy.
                padding = padding_like(padding, dim).masked_fill(~mask.any(), 1)
                padding = padding * self._padding.poison.to(value.dtype)
        rows = list(value.shape)
        rows[dim] = more
        out = torch.where(selected, torch.cat([value, value.new_zeros(rows)], dim), padding)
        if self._are_ids(value):
            self._note(out)
        return out

    def _assigned(self, func: Handler, target: Tensor, index: Any, value: Any) -> None:
        """Write rows back that the same mask has selected."""
        mask, more, dim = self._mask_in(target, index)
        rows = None if mask is None else (len(mask) + more, *target.shape[1:])
        if mask is None or dim or type(value) is not Tensor or value.shape != rows:
            func(target, index, value)
            return
        selected = mask.view(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(selected, value[: len(mask)], target))
