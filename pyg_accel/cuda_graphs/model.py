"""``graphed()``: a model whose calls are replayed from CUDA graphs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from pyg_accel.cuda_graphs.call import Subject, names_of, naming
from pyg_accel.cuda_graphs.engine import Engine, HasCaptures
from pyg_accel.runtime.wrapper import ModelWrapper

__all__ = ["Graphed", "graphed"]


def graphed(
    model: torch.nn.Module, *, dynamic: bool | None = None, max_captures: int = 8,
    roles: Mapping[str, str] | None = None,
) -> "Graphed":  # fmt: skip
    """Replay the calls of a model, forward and backward, from CUDA graphs.

    The first calls of a kind run eagerly; then a call is captured, compared with eager calls, and
    replayed. Calls are of one kind if shapes, dtypes, ``train()`` or ``eval()``, grad mode,
    autocast and the parameter objects of the model are the same. If sizes change from batch to
    batch, nodes, edges and graphs are padded to a few sizes, and padding is kept out of
    normalisation, pooling and results. Captures are made while they pay for themselves: after the
    first 30 calls, any pattern of sizes takes at most 1.05 times as long as eager calls. Other
    calls, such as all calls without a CUDA device, run eagerly, and :func:`pyg_accel.report` says
    why. Eager calls may be faster with backward passes in the calling
    thread: ``torch.autograd.set_multithreading_enabled(False)``.

    Args:
        model: any module; it is not changed, and its parameters are shared.
        dynamic: True pads from the start, False never does; None pads once sizes have changed.
        max_captures: number of stored captures; the least recently used is dropped.
        roles: roles of arguments by name, if names and sizes do not determine them: ``"nodes"``,
            ``"edges"`` or ``"graphs"`` (a row for each), ``"edge_index"``, ``"batch"``, ``"ptr"``
            or ``"fixed"``.

    Returns:
        A module that is called like ``model``, with its attributes and ``state_dict()``.

    Raises:
        ValueError: if ``model`` is not a module, or for unknown roles.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
    if isinstance(model, Graphed):
        model = model._original
    return Graphed(model, dynamic=dynamic, max_captures=max_captures, roles=dict(roles or {}))


class Graphed(HasCaptures, ModelWrapper):
    """A model, and the captures of its calls; made by :func:`graphed`."""

    _own = frozenset(("_options", "_engine"))

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        """Wrap a model."""
        subject = Subject(model, (model,), type(model).__name__)
        engine = Engine(subject, names_of(model.forward), differentiable=True, **options)
        super().__init__(model, _options=options, _engine=engine)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._original(*args, **kwargs)
        with naming(self._original.forward, args, kwargs):
            return self._engine(args, kwargs)

    def __reduce__(self) -> Any:
        return partial(graphed, **self._options), (self._original,)
