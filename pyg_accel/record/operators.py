"""Properties of the operators of ATen that a function of torch calls while it is recorded."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_accel.graph.memo import tensors_in
from pyg_accel.runtime.cache import memory_of

__all__ = ["Operators", "Unwatched"]

_INDEX = torch.ops.aten.index.Tensor
_OF_TORCH = ("aten", "prim", "prims")


class Unwatched:
    """Turns the profiler of a recording off in a ``with`` block."""

    def __enter__(self) -> None:
        self._profiler = sys.getprofile()
        sys.setprofile(None)

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(self._profiler)


class Operators(TorchDispatchMode):
    """Watches the operators that a function calls; the function may be one.

    Attributes:
        reads_values: sizes of its results may depend on the values of tensors.
        has_effects: it draws random numbers, or updates running statistics.
        written: the storages that it writes to, temporary ones among them.
        foreign: an operator that is not of torch, about which nothing is known.
    """

    supports_higher_order_operators = True

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_values = self.has_effects = False
        self.written: set[int] = set()
        is_operator = isinstance(function, (OpOverload, OpOverloadPacket))
        self.foreign = str(function) if is_operator and not _is_of_torch(function) else ""

    def __enter__(self) -> "Operators":
        with Unwatched():
            return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        with Unwatched():
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Unwatched():  # code behind an operator runs in programs too
            self._note(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not _is_of_torch(func):
            self.foreign = str(func)
            return
        if func is _INDEX:
            self.reads_values |= any(
                isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
            )
        else:
            self.reads_values |= Tag.dynamic_output_shape in func.tags
        self.reads_values |= Tag.data_dependent_output in func.tags
        trains = "batch_norm" in str(func) and any(value is True for value in args)
        self.has_effects |= Tag.nondeterministic_seeded in func.tags or trains
        if func._schema.is_mutable or trains:
            self.written.update(map(memory_of, _written(func, args, kwargs, trains)))


def _is_of_torch(operator: Any) -> bool:
    return str(operator).partition(".")[0] in _OF_TORCH


def _written(func: Any, args: Any, kwargs: dict[str, Any], trains: bool) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to; no schema tells those of batch norms."""
    if trains:
        yield from (value for value in args[3:5] if isinstance(value, Tensor))
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)
