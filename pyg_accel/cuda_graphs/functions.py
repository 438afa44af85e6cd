"""Replaces torch functions while a call is compared or recorded: one mode with tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.record.edge_tensors import name_of

__all__ = ["CONSTANTS", "NOT_RANDOM", "Functions", "Handler", "constant_maxima"]

Handler = Callable[..., Any]


class Functions(TorchFunctionMode):
    """Passes calls of torch functions to handlers.

    Args:
        table: handlers by function, or by the name that a function and a method share. A handler
            is called with the function and its arguments, while this mode is off.
    """

    def __init__(self, table: Mapping[Any, Handler]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._table.get(func) or self._table.get(name_of(func))
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))


def _unchanged(func: Handler, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


# No dropout: padded and unpadded calls would draw different random numbers.
NOT_RANDOM: dict[Any, Handler] = dict.fromkeys((
    F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout,
), _unchanged)  # fmt: skip


def _constant(func: Handler, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and type(args[0]) in (bool, int, float):
        return torch.full((), *args, **kwargs)
    return func(*args, **kwargs)


# Scalar tensors are filled on the device: a copy would wait for the device.
CONSTANTS: dict[Any, Handler] = {torch.tensor: _constant}


def constant_maxima(
    tensors: Sequence[Tensor], maxima: Sequence[tuple[Tensor, int]]
) -> dict[Any, Handler]:
    """Return a handler of ``max()`` for tensors whose largest id is the same in every replay.

    PyG reads it to get the number of nodes or graphs, which would wait for the device.

    Args:
        tensors: tensors that are the same in every replay.
        maxima: other tensors, and their largest ids.
    """
    largest = [(t, int(t.max())) for t in tensors if t.numel() and not t.is_floating_point()
               and not t.is_complex() and t.dtype != torch.bool]  # fmt: skip
    largest += maxima

    def answer(func: Handler, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            for tensor, most in largest:
                if args[0] is tensor:
                    return torch.tensor(most, dtype=tensor.dtype)
        return func(*args, **kwargs)

    return {"max": answer} if largest else {}
