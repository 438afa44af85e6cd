"""Checks of arguments of users: whole numbers, and conditions on values of tensors."""

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from pyg_accel.runtime.machine import is_captured

__all__ = ["check_arguments", "require", "shown", "whole"]


def whole(name: str, value: object, least: int = 1) -> int:
    """Return a whole number, not a bool.

    Raises:
        ValueError: for anything else, less than ``least`` or of more than 64 bits.
    """
    is_whole = isinstance(value, (int, Integral)) and not isinstance(value, bool)
    if not is_whole or not least <= value < 2**63:  # type: ignore[operator]
        raise ValueError(
            f"expected '{name}' to be a whole number of at least {least} (got {value!r})"
        )
    return value  # type: ignore[return-value]


def shown(value: object) -> str:
    """Return a value for an error message: the shape of a tensor, or its type."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of a model, by name, that should be tensors.

    Raises:
        TypeError: for an array of numpy, or a list of two lists as edge_index.
        ValueError: for features as edge_index.
    """
    for name, value in arguments.items():
        if type(value).__module__.partition(".")[0] == "numpy":
            array = f"numpy.{type(value).__name__} {list(getattr(value, 'shape', ()))}"
            raise TypeError(f"expected '{name}' to be a tensor (got {array}); use torch.from_numpy")
    edges = arguments.get("edge_index")
    if isinstance(edges, (list, tuple)) and all(map(_holds_numbers, edges)):
        raise TypeError(
            f"expected 'edge_index' to be a tensor (got a {shown(edges)}); use torch.tensor"
        )
    if isinstance(edges, Tensor) and edges.layout is torch.strided:
        is_whole = not edges.is_floating_point() and not edges.is_complex()
        if not is_whole or edges.dim() != 2 or edges.size(0) != 2:
            raise ValueError(f"expected 'edge_index' to be whole numbers [2, E] (got {edges.dtype} "
                             f"{list(edges.shape)}; arguments in another order?)")  # fmt: skip


def _holds_numbers(row: object) -> bool:
    return isinstance(row, (list, tuple)) and all(isinstance(n, int) for n in row)


def require(condition: Tensor, message: str) -> None:
    """Require that a condition on values of tensors is true.

    This waits for the device. In compiled code, for fake tensors and during a capture of a CUDA
    graph, the device asserts the condition instead.

    Args:
        condition: bool, with one element.
        message: of the error.

    Raises:
        ValueError: if the condition is false.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(condition):  # under vmap
        condition = torch._C._functorch.get_unwrapped(condition).all()
    if is_captured(condition) or type(condition) is not Tensor:
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
