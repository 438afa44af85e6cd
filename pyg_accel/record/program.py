"""Programs: recorded calls of a layer, compiled to flat functions.

A program runs for calls of its kind, as long as its guard holds: arguments with the same structure,
types, dtypes, devices and sizes, in the same modes of torch and settings of this package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_accel.record.guard import Guard, NotComparable
from pyg_accel.record.recorder import Recorder

__all__ = ["LayerProgram", "Refused", "context_key", "leaves_of", "record"]

_PLAIN = (type(None), bool, int, float, str)


class Refused(Exception):
    """A program does not fit a call, whose sizes do not agree."""


@dataclass
class LayerProgram:
    """What a call of a layer computes, from its arguments to its result.

    Attributes:
        graph: the torch functions and operators that it runs, as a :class:`torch.fx.Graph`.
        constants: parameters, buffers and other values that it reads, by their names in the graph.
        guard: what it depends on beside the arguments.
        key: kind of the arguments, :func:`leaves_of`.
        context: modes of torch and settings.
        formulas: for the report.
        backends: for the report.
        run: the function that it is compiled to; takes the tensors among the arguments.
    """

    graph: torch.fx.Graph
    constants: dict[str, Any]
    guard: Guard
    key: tuple[Any, ...]
    context: tuple[Any, ...]
    formulas: str = ""
    backends: str = ""

    def __post_init__(self) -> None:
        """Compile the graph."""
        code = self.graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)
        holder = _Constants()
        vars(holder).update(self.constants)
        self.run: Callable[..., Any] = names["forward"].__get__(holder)

    def __deepcopy__(self, memo: Any) -> None:
        """A copied layer records its own."""


class _Constants:
    """Holds the constants of a program as attributes."""


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]] | None:
    """Return the kind of a call's arguments, and the tensors among them; None if it has none."""
    leaves: list[Tensor] = []
    key: list[Any] = [len(args)]
    for value in args:
        if not _add(value, key, leaves):
            return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add(value, key, leaves):
            return None
    return tuple(key), leaves


def _add(value: Any, key: list[Any], leaves: list[Tensor]) -> bool:
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        if value.layout is not torch.strided:
            return False
        for place, other in enumerate(leaves):
            if other is value:
                key.append(place)
        key += (kind, value.dtype, value.get_device(), value.requires_grad, value.shape)
        leaves.append(value)
        return True
    if kind in _PLAIN:
        key += (kind, value)
        return True
    if kind is tuple or kind is list:
        key += (kind, len(value))
        return all([_add(item, key, leaves) for item in value])
    return False


def context_key() -> tuple[Any, ...]:
    """Return the modes of torch that a recorded call depends on."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled() and _autocast(), torch.get_default_dtype(),
    )  # fmt: skip


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )


def record(
    layer: torch.nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> "tuple[Any, Recorder, Guard] | str":
    """Make a call and record it.

    Args:
        layer: whose call it is.
        function: what runs: called with the layer and the arguments.
        args: of the call.
        kwargs: of the call.

    Returns:
        The result, what was seen and the guard; or why the call cannot be recorded, without having
        made it.
    """
    kind = leaves_of(args, kwargs)
    if kind is None:
        return "arguments that are not tensors, numbers or tuples of them"
    try:
        guard = Guard(layer, [function])
    except NotComparable as error:
        return str(error)
    recorder = Recorder(guard, kind[1])
    with recorder.watching():
        out = function(layer, *args, **kwargs)
    recorder.finish(out)
    if not recorder.reason:
        try:
            guard.settle(recorder.ran)
        except NotComparable as error:
            recorder.stop(str(error))
    return out, recorder, guard
