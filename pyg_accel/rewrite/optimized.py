"""The result of ``optimize()``: a wrapper under which the layers of a model run other programs."""

import functools
import weakref
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch_geometric.nn import MessagePassing

from pyg_accel.patching.api import OverrideHandle, installed
from pyg_accel.rewrite.layer import Reassociation
from pyg_accel.rewrite.select import Options
from pyg_accel.runtime.state import running
from pyg_accel.runtime.wrapper import ModelWrapper

__all__ = ["OptimizedModel", "forward_with", "rewritten_layers"]


class OptimizedModel(ModelWrapper):
    """Calls a model with rewritten programs for its layers.

    It shares attributes, methods, parameters, names and modes with the model, which is unchanged.
    Hooks on calls are separate.

    Args:
        model: any module.
        options: of ``optimize()``.
        static: names of the arguments of the model that are the same tensors in every call.
    """

    _own = frozenset(("forward", "_opt_layers", "_opt_options", "_opt_static"))

    def __init__(
        self, model: torch.nn.Module, options: Options, static: tuple[str, ...] = ()
    ) -> None:
        """Share the attributes of the model."""
        layers = _transformed(model, options)
        super().__init__(model, _opt_layers=layers, _opt_options=options, _opt_static=static,
                         forward=forward_with(model, layers, static))  # fmt: skip
        # torch.fx, and with it to_hetero(), reads the forward of the class.
        if reads := getattr(type(model), "forward", None):
            cls = type("OptimizedModel", (OptimizedModel,), {"forward": reads})
            object.__setattr__(self, "__class__", cls)
        weakref.finalize(self, OverrideHandle({}).remove)

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """Let TorchScript compile the model: it does not run Python, which chooses the orders."""
        return self._original  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Save the arguments and the hooks."""
        return OptimizedModel, *super().__reduce__()[1:]

    def _arguments(self) -> tuple[Any, ...]:
        return self._original, self._opt_options, self._opt_static  # decisions are made again

    def __copy__(self) -> "OptimizedModel":
        """Return another one of the same model."""
        return OptimizedModel(*self._arguments())


def rewritten_layers(fast: OptimizedModel) -> dict[str, Reassociation]:
    """Return the transforms of the layers of an optimised model, by path."""
    layers = fast._opt_layers
    return {path: layers[module] for path, module in fast.named_modules() if module in layers}


def _transformed(model: torch.nn.Module, options: Options) -> dict[torch.nn.Module, Reassociation]:
    """Return the programs of each layer; layers inside of layers are not transformed."""
    layers: dict[torch.nn.Module, Reassociation] = {}
    queue = [model]
    for module in queue:  # grows while it is read
        if isinstance(module, MessagePassing):
            layers.setdefault(module, Reassociation(module, options))
        elif isinstance(module, OptimizedModel):
            layers.update(module._opt_layers)
        else:
            queue += module.children()
    return layers


def forward_with(
    model: torch.nn.Module, layers: Mapping[torch.nn.Module, Reassociation], static: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a ``forward`` with the signature of the model that transforms its layers."""

    def static_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        arguments = signature(model.forward).bind_partial(*args, **kwargs).arguments
        values = [arguments.get(name) for name in static]
        return tuple(t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,)))

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() and "halos" not in installed:
            return model(*args, **kwargs)  # compile the layers as they are
        before = running.transformed, running.static
        running.transformed = layers
        running.static = static_tensors(args, kwargs) if static else ()
        try:
            return model(*args, **kwargs)
        finally:
            running.transformed, running.static = before

    return forward
