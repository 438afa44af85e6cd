"""The mode that sees the torch functions of one accelerated call."""

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.formula import Computation
from pyg_accel.patching.running import Unrecognised
from pyg_accel.record.edge_tensors import changed_in_place, name_of
from pyg_accel.runtime.cache import memory_of

__all__ = ["Watch"]


class Watch(TorchFunctionMode):
    """Sees the torch functions of one accelerated call.

    Attributes:
        watched: names of the functions that it looks at; the others just run.
        formulas: what has been run.
        layer: whose call it is.
        given: returns the tensors that were there before the call and cannot be put back.
    """

    watched: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.formulas: list[Computation] = []
        self.layer: torch.nn.Module | None = None
        self.forward: CodeType | None = None  # that called, if it returns no attention weights
        self.given: Callable[[], Iterable[Tensor]] = tuple
        self._storages: set[int] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in self.watched:
            return self.see(func, args, kwargs)
        if changed := changed_in_place(name, args, kwargs):
            self.guard(name, changed)
        return func(*args, **kwargs)

    def guard(self, name: str, changed: Iterable[Tensor]) -> None:
        """Raise before a tensor is changed in place that this call did not make.

        PyG's path, should it run after this one, would change it a second time.
        """
        if self._storages is None:
            self._storages = set(map(memory_of, self.given()))
        if not self._storages.isdisjoint(map(memory_of, changed)):
            raise Unrecognised(f"'{name}' changes a tensor in place that the message was given")

    def see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that is watched, or something in its place."""
        raise NotImplementedError

    @staticmethod
    def active() -> "Watch | None":
        """Return the innermost one that is on, if one is."""
        if not torch._C._len_torch_function_stack():
            return None
        modes = reversed(torch.overrides._get_current_function_mode_stack())
        return next((mode for mode in modes if isinstance(mode, Watch)), None)
