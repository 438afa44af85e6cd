"""Properties of the operators of ATen that a function of torch calls while it is recorded."""

import sys
from typing import Any

import torch
from torch import Tag, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operators"]

_INDEX = torch.ops.aten.index.Tensor


class Operators(TorchDispatchMode):
    """Watches the operators that a function calls.

    Attributes:
        reads_values: sizes of its results may depend on the values of tensors.
        has_effects: it draws random numbers, or updates running statistics.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_values = self.has_effects = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = getattr(func, "tags", ())
        if func is _INDEX:
            self.reads_values |= any(
                isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
            )
        else:
            self.reads_values |= Tag.dynamic_output_shape in tags
        self.reads_values |= Tag.data_dependent_output in tags
        trains = "batch_norm" in str(func) and any(value is True for value in args)
        self.has_effects |= Tag.nondeterministic_seeded in tags or trains
        profiler = sys.getprofile()
        sys.setprofile(None)  # code behind an operator runs in programs too
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(profiler)
