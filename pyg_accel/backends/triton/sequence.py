"""Kernels that run one after another on a graph, written down once and launched by one call.

Python launches kernels that are not compiled yet. All others are launched by one call of the CUDA
library (csrc/cuda/sequence.cpp), which allocates and launches in a fraction of the time.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends.triton.launcher import launch
from pyg_accel.native import Entry, cuda_library, cuda_unavailable_reasons, direct

__all__ = ["Kernel", "Sequence", "Slot"]

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


class Kernel:
    """A Triton function whose integers are not specialised on, for arguments of certain dtypes.

    Args:
        function: of Triton.
        warps: of a program.
        constants: compile-time arguments, by name.

    Attributes:
        compiled: for pointers to 16 bytes and numbers of 32 bits, on the device of all calls; None
            until there was such a launch.
    """

    def __init__(self, function: Any, warps: int = 1, **constants: Any) -> None:
        self.function, self.warps, self.constants = function, warps, constants
        self.compiled: Any = None

    def launch(self, grid: tuple[int, ...], arguments: SequenceOf[Any], *, usual: bool) -> None:
        """Launch it from Python; ``usual`` arguments are those that it is compiled for."""
        compiled = launch(self.function, grid, arguments, warps=self.warps, **self.constants)
        if usual and compiled is not None and _is_simple(compiled.metadata):
            self.compiled = compiled


def _is_simple(metadata: Any) -> bool:
    """Whether a launch needs no memory of its own, and blocks are launched one by one."""
    others = "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"
    return metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in others)


class _Call(NamedTuple):
    kernel: Kernel
    grid: tuple[int, ...]
    arguments: SequenceOf[Any]


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
        self._calls: list[_Call] = []
        self._usual = True  # arrays begin at multiples of 16 bytes, and numbers have 32 bits
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

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: SequenceOf[Any]) -> None:
        """Append a launch.

        Args:
            kernel: to launch.
            grid: programs.
            arguments: slots, arrays and numbers by position; None for pointers that this version of
                the kernel does not read.
        """
        self._calls.append(_Call(kernel, grid, arguments))
        for a in arguments:
            if isinstance(a, Tensor):
                self._usual = self._usual and a.data_ptr() % 16 == 0
            elif type(a) is int:
                self._usual = self._usual and -(2**31) <= a < 2**31

    def __call__(self, operands: SequenceOf[Tensor]) -> list[Tensor]:
        """Launch all on operands that agree in all but their addresses; return the results."""
        if self._native is None and self._usual and self._device.type == "cuda":
            self._native = self._written()
        if self._native is not None:
            found = self._native(operands)
            if found:  # operands begin at multiples of 16 bytes
                return found
        usual = self._usual and not any(t.data_ptr() % 16 for t in operands)
        fresh = [torch.empty(s, dtype=dtype, device=self._device) for s, dtype in self._fresh]
        tensors = [*operands, *fresh]
        for kernel, grid, arguments in self._calls:
            given = [tensors[a.at] if type(a) is Slot else a for a in arguments]
            kernel.launch(grid, given, usual=usual)
        return fresh[: self._results]

    def _written(self) -> Callable[[SequenceOf[Tensor]], list[Tensor]] | None:
        """The library's function of operands; None while Python has to launch."""
        if any(call.kernel.compiled is None for call in self._calls):
            return None
        if not self._results or cuda_unavailable_reasons():
            self._usual = False  # it stays so
            return None
        arrays: list[Tensor] = []
        code = [self._device.index, len(self.operands), self._results, len(self._fresh)]
        for shape, dtype in self._fresh:
            code += (_NUMBERS[dtype], len(shape), *shape)
        code.append(len(self._calls))
        for kernel, grid, arguments in self._calls:
            compiled, read = kernel.compiled, [a for a in arguments if a is not None]
            threads, shared = 32 * kernel.warps, compiled.metadata.shared
            code += (compiled.function, *(*grid, 1, 1)[:3], threads, shared, len(read))
            for argument in read:
                if type(argument) is Slot:
                    code += (_TENSOR, argument.at)
                elif isinstance(argument, Tensor):
                    code += (_ARRAY, len(arrays))
                    arrays.append(argument)
                else:
                    code += (_NUMBER, argument)
        library = cuda_library()
        add, remove = direct(library.add_sequence), direct(library.remove_sequence)
        kernels = [call.kernel for call in self._calls]
        entry = Entry(lambda: add(arrays, code), remove, arrays, kernels)
        if not entry.number:  # Triton passes other arguments than these
            self._usual = False
            return None
        native = partial(direct(library.run_sequence), entry.number)
        native.__dict__["owner"] = entry
        return native
