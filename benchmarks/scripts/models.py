"""Lets a script, unchanged, train what `optimize()` or `graphed()` makes of its model.

Users would write `model = pyg_accel.optimize(model, x, edge_index, train=True)` behind the first
lines of a script. Here the names that the script has for its model are bound to the result, once
the model has been called with gradients: the second call shows what its inputs are.
"""

import sys
from collections.abc import Callable
from io import StringIO
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_geometric.nn import MessagePassing

import pyg_accel

Note = Callable[[], str]  # says what was done with the model


def change(how: str) -> Note:
    """Let the script's names of its model refer to what `how` makes of it."""
    notes: list[str | Note] = ["the script calls methods of its model, or has no name for it"]

    def seek(model: torch.nn.Module, _: Any) -> None:
        """Find the first model of layers that trains and that the script has a name for."""
        layers = any(isinstance(module, MessagePassing) for module in model.modules())
        if layers and torch.is_grad_enabled() and model.training and names_of(model):
            seeking.remove()
            notes[0] = "the model is called once"
            hook = model.register_forward_pre_hook(
                lambda model, args, kwargs: replace(hook, model, args, kwargs), with_kwargs=True
            )

    def replace(hook: Any, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and model.training):
            return
        hook.remove()
        try:
            changed, notes[0] = CHANGES[how](model, args, kwargs)
        except (ValueError, TypeError) as error:  # the documented ones
            notes[0] = str(error)
            return
        vars(sys.modules["__main__"]).update(dict.fromkeys(names_of(model), changed))

    def stop(*_: Any) -> None:
        """Seek in the first step only: layers under hooks are left to PyG."""
        seeking.remove()
        stopping.remove()

    seeking = register_module_forward_pre_hook(seek)
    stopping = register_optimizer_step_post_hook(stop)
    return lambda: notes[0] if isinstance(notes[0], str) else notes[0]()


def names_of(model: torch.nn.Module) -> list[str]:
    """Names of a module in the script that runs."""
    return [name for name, value in vars(sys.modules["__main__"]).items() if value is model]


def optimized(model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[torch.nn.Module, Note]:
    fast = pyg_accel.optimize(model, *args, train=True, **kwargs)

    def note() -> str:
        layers = pyg_accel.plan(fast).layers
        reasons = dict.fromkeys(reason for layer in layers for reason in layer.reasons)
        done = f"{sum(bool(layer.trees) for layer in layers)} of {len(layers)} layers"
        return "; ".join([done, *reasons])

    return fast, note


def graphed(model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[torch.nn.Module, Note]:
    name = type(model).__name__

    def note() -> str:
        rows = [row for row in pyg_accel.report(StringIO()).rows
                if row.layer == name and row.backend in ("CUDA graph", "eager")]  # fmt: skip
        replayed = sum(row.calls for row in rows if row.backend == "CUDA graph")
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        return "; ".join([f"{replayed} of {sum(row.calls for row in rows)} calls", *reasons])

    return pyg_accel.graphed(model), note


CHANGES: dict[str, Callable[..., tuple[torch.nn.Module, Any]]] = {
    "optimized": optimized,
    "graphed": graphed,
}
