"""Kernels that run one after another on a graph, written down once and launched by one call.

The first call launches them from Python, which compiles them. Later calls are one call of the CUDA
library (csrc/cuda/sequence.cpp), which allocates and launches in a tenth of the time.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.triton.launcher import Call, compiled_for, launch
from pyg_accel.native import Entry, cuda_library, cuda_unavailable_reasons, direct

__all__ = ["Sequence", "Slot"]

# Numbers of dtypes in C++ (c10::ScalarType).
_NUMBERS = {
    torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7,
    torch.bfloat16: 15,
}  # fmt: skip
_NUMBER, _ARRAY, _TENSOR = range(3)  # where arguments come from


class Slot(NamedTuple):
    """Stands for a tensor that each call brings or makes.

    Attributes:
        at: its place among the operands and, behind these, the new tensors.
    """

    at: int


class Sequence:
    """Launches on operands [rows, ...], arrays of a graph, and new tensors.

    Args:
        operands: how many.
        device: of all tensors.

    Attributes:
        operands: their slots.
    """

    def __init__(self, operands: int, device: torch.device) -> None:
        self.operands = [Slot(at) for at in range(operands)]
        self._device = device
        self._fresh: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._results = 0
        self._launches: list[Call] = []
        self._called = False
        self._native: Callable[[SequenceOf[Tensor]], list[Tensor]] | None = None

    def result(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Return the slot of a new tensor that calls return; all results come first."""
        slot = self.scratch(shape, dtype)
        self._results = len(self._fresh)
        return slot

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Return the slot of a new tensor that only kernels see."""
        self._fresh.append((shape, dtype))
        return Slot(len(self.operands) + len(self._fresh) - 1)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: SequenceOf[Any],
        *,
        warps: int = 1,
        **constants: Any,
    ) -> None:
        """Append a launch; arguments are as in :func:`.launcher.launch`, or slots.

        The kernel's integers must not be specialised on.
        """
        self._launches.append(Call(kernel, grid, arguments, warps, constants))

    def __call__(self, operands: SequenceOf[Tensor]) -> list[Tensor]:
        """Launch all on operands that agree in all but their addresses; return the results."""
        if self._native is not None:
            found = self._native(operands)
            if found:
                return found
        fresh = [torch.empty(s, dtype=dtype, device=self._device) for s, dtype in self._fresh]
        tensors = [*operands, *fresh]
        for call in self._launches:
            arguments = [tensors[a.at] if type(a) is Slot else a for a in call.arguments]
            launch(call.kernel, call.grid, arguments, warps=call.warps, **call.constants)
        # In the second call, because operators that a compiler calls run each sequence once.
        if self._called and self._results and self._device.type == "cuda":
            self._native = self._native or self._written(tensors)
        self._called = True
        return fresh[: self._results]

    def _written(
        self, tensors: list[Tensor]
    ) -> Callable[[SequenceOf[Tensor]], list[Tensor]] | None:
        """The library's function of operands; None if Python has to launch."""
        if cuda_unavailable_reasons() or any(t.data_ptr() % 16 for t in tensors):
            return None
        device, count = tensors[0].get_device(), len(self.operands)
        arrays: list[Tensor] = []
        code: list[int] = [device, count, self._results, len(self._fresh)]
        for shape, dtype in self._fresh:
            code += [_NUMBERS[dtype], len(shape), *shape]
        code.append(len(self._launches))
        kernels = []
        for call in self._launches:
            arguments = [tensors[a.at] if type(a) is Slot else a for a in call.arguments]
            kernel = compiled_for(call._replace(arguments=arguments))
            if kernel is None:
                return None
            kernels.append(kernel)
            read = [a for a in call.arguments if a is not None]
            threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
            code += [kernel.function, *(*call.grid, 1, 1)[:3], threads, shared, len(read)]
            for argument in read:
                if type(argument) is Slot:
                    code += [_TENSOR, argument.at]
                elif isinstance(argument, Tensor):
                    code += [_ARRAY, len(arrays)]
                    arrays.append(argument)
                else:
                    code += [_NUMBER, 4 if -(2**31) <= argument < 2**31 else 8, argument]
        library = cuda_library()
        add, remove = direct(library.add_sequence), direct(library.remove_sequence)
        entry = Entry(lambda: add(arrays, code), remove, arrays, kernels)
        if not entry.number:
            return None
        native = partial(direct(library.run_sequence), entry.number)
        native.__dict__["owner"] = entry
        return native
