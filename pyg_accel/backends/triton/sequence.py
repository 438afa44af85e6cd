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
from pyg_accel.runtime.native import Entry, cuda_library, cuda_unavailable_reasons, direct

__all__ = ["Blocks", "Kernel", "Sequence", "Size", "Slot"]

# Numbers of dtypes in C++ (c10::ScalarType).
_NUMBERS = {
    torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7,
    torch.bfloat16: 15, torch.uint32: 28, torch.uint64: 29,
}  # fmt: skip
_NUMBER, _ARRAY, _TENSOR, _SIZE = range(4)  # where arguments come from


class Slot(NamedTuple):
    """A placeholder for a tensor of each call.

    Attributes:
        at: its place among the operands and, behind these, the new tensors.
    """

    at: int


class Size(NamedTuple):
    """A placeholder for a number of each call.

    Attributes:
        at: its place among the sizes of a call.
    """

    at: int


class Blocks(NamedTuple):
    """Programs of a grid, as many as a size of the call needs: ``ceil(size * times / per)``."""

    at: int
    times: int
    per: int


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
        """Launch it from Python; it was compiled for the ``usual`` arguments."""
        compiled = launch(self.function, grid, arguments, warps=self.warps, **self.constants)
        if usual and compiled is not None and _is_simple(compiled.metadata):
            self.compiled = compiled


def _is_simple(metadata: Any) -> bool:
    """Whether a launch needs no scratch memory, and blocks are launched one by one."""
    others = "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"
    return metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in others)


_Grid = tuple[int | Blocks, ...]


class _Call(NamedTuple):
    kernel: Kernel
    grid: _Grid
    arguments: SequenceOf[Any]


class Sequence:
    """Launches on operands [rows, ...], arrays of a graph, and new tensors.

    A sequence belongs to one graph, or takes sizes that differ between graphs in each call.

    Args:
        operands: how many.
        device: of all tensors.

    Attributes:
        operands: their slots.
    """

    def __init__(self, operands: int, device: torch.device) -> None:
        self.operands = [Slot(at) for at in range(operands)]
        self._device = device
        self._fresh: list[tuple[tuple[int | Size, ...], torch.dtype, bool]] = []
        self._results = 0
        self._calls: list[_Call] = []
        self._usual = True  # arrays begin at multiples of 16 bytes, and numbers have 32 bits
        self._native: Callable[..., list[Tensor]] | None = None

    def result(
        self, shape: tuple[int | Size, ...], dtype: torch.dtype, *, zero: bool = False
    ) -> Slot:
        """Return the slot of a new tensor that calls return; all results come first."""
        slot = self.scratch(shape, dtype, zero=zero)
        self._results = len(self._fresh)
        return slot

    def scratch(
        self, shape: tuple[int | Size, ...], dtype: torch.dtype, *, zero: bool = False
    ) -> Slot:
        """Return the slot of a new tensor that only kernels see; with ``zero``, full of zeros."""
        self._fresh.append((shape, dtype, zero))
        return Slot(len(self.operands) + len(self._fresh) - 1)

    def launch(self, kernel: Kernel, grid: _Grid, arguments: SequenceOf[Any]) -> None:
        """Append a launch.

        Args:
            kernel: to launch.
            grid: programs.
            arguments: slots, arrays, numbers and sizes by position; None for pointers that this
                version of the kernel does not read.
        """
        self._calls.append(_Call(kernel, grid, arguments))
        for a in arguments:
            if isinstance(a, Tensor):
                self._usual = self._usual and a.data_ptr() % 16 == 0
            elif type(a) is int:
                self._usual = self._usual and -(2**31) <= a < 2**31

    def __call__(self, operands: SequenceOf[Tensor], sizes: SequenceOf[int] = ()) -> list[Tensor]:
        """Launch all on operands that agree in all but their addresses; return the results."""
        if self._native is None and self._usual and self._device.type == "cuda":
            self._native = self._written()
        if self._native is not None:
            results = self._native(operands, sizes)
            if results:  # operands begin at multiples of 16 bytes, and sizes have 32 bits
                return results
        usual = self._usual and not any(t.data_ptr() % 16 for t in operands)
        usual = usual and not any(size >= 2**31 for size in sizes)
        fresh = []
        for shape, dtype, zero in self._fresh:
            own = [sizes[n.at] if isinstance(n, Size) else n for n in shape]
            make = torch.zeros if zero else torch.empty
            fresh.append(make(own, dtype=dtype, device=self._device))
        tensors = [*operands, *fresh]
        for kernel, grid, arguments in self._calls:
            arguments = [
                tensors[a.at] if type(a) is Slot else sizes[a.at] if type(a) is Size else a
                for a in arguments
            ]
            programs = tuple([n if isinstance(n, int) else -(-sizes[n.at] * n.times // n.per)
                              for n in grid])  # fmt: skip
            if 0 not in programs:
                kernel.launch(programs, arguments, usual=usual)
        return fresh[: self._results]

    def _written(self) -> Callable[..., list[Tensor]] | None:
        """The library's function of operands and sizes; None while Python has to launch."""
        if any(call.kernel.compiled is None for call in self._calls):
            return None
        if not self._results or cuda_unavailable_reasons():
            self._usual = False  # it stays so
            return None
        arrays: list[Tensor] = []
        code = [self._device.index, len(self.operands), self._results, len(self._fresh)]
        for shape, dtype, zero in self._fresh:
            code += (_NUMBERS[dtype], zero, len(shape))
            for n in shape:
                code += (True, n.at) if isinstance(n, Size) else (False, n)
        code.append(len(self._calls))
        for kernel, grid, arguments in self._calls:
            compiled, read = kernel.compiled, [a for a in arguments if a is not None]
            threads, shared = 32 * kernel.warps, compiled.metadata.shared
            code.append(compiled.function)
            for programs in (*grid, 1, 1)[:3]:
                code += programs if isinstance(programs, Blocks) else (-1, programs, 1)
            code += (threads, shared, len(read))
            for argument in read:
                if type(argument) is Slot:
                    code += (_TENSOR, argument.at)
                elif type(argument) is Size:
                    code += (_SIZE, argument.at)
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
