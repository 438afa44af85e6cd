"""The calls of a model as a torch.fx graph with layers as leaves: it is looked at and never run."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch_geometric import utils
from torch_geometric.nn import MessagePassing, pool

from pyg_accel.module_state import as_it_was

__all__ = ["Reader", "Unreadable", "kinds_of", "read"]

# What code may raise on symbols. A mistake of the model's own comes up when it is run.
_FAILURES = (
    fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError,
    AssertionError, NameError,
)  # fmt: skip


class Unreadable(Exception):
    """A model whose code torch.fx cannot follow; the text says why."""


def kinds_of(value: Any) -> Any:
    """Return an argument with constants as they are, and ``fx.PH`` for the rest."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(kinds_of, value))
    return {k: kinds_of(v) for k, v in value.items()} if type(value) is dict else fx.PH


class Reader(fx.Tracer):
    """Records calls of layers, and of modules without layers."""

    def __init__(self) -> None:
        functions = [f for module in (utils, pool) for f in vars(module).values()
                     if isinstance(f, FunctionType)]  # fmt: skip
        super().__init__(autowrap_functions=tuple(functions))  # they branch on their arguments

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Layers, and modules without layers."""
        return isinstance(m, MessagePassing) or not any(
            isinstance(inner, MessagePassing) for inner in m.modules()
        )


def read(
    model: torch.nn.Module,
    example: Mapping[str, Any],
    reader: Callable[[], Reader] = Reader,
) -> fx.Graph:
    """Return the calls of a model; its code runs on symbols, and the model is as before afterwards.

    Args:
        model: any module.
        example: :func:`kinds_of` the arguments of a call, by name.
        reader: makes the tracer.

    Raises:
        Unreadable: if its code needs more than symbols.
    """
    constants = {n: v for n, v in example.items() if not isinstance(v, type(fx.PH))}
    with as_it_was(model.modules()):
        try:
            return reader().trace(model, constants)
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise Unreadable(reason) from error
