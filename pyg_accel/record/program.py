"""Programs: recorded calls of a layer, compiled to flat functions.

A program runs for calls of its kind, as long as its guard holds: arguments with the same structure,
types, dtypes, devices and sizes, in the same modes of torch and settings of this package.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from pyg_accel.cache import TensorCache
from pyg_accel.record.guard import Guard, NotComparable
from pyg_accel.record.recorder import Recorder
from pyg_accel.record.signature import Signature
from pyg_accel.record.split import split
from pyg_accel.settings import settings

__all__ = ["LayerProgram", "context_key", "record"]


@dataclass(eq=False)
class LayerProgram:
    """What a call of a layer computes, from its arguments to its result.

    Attributes:
        graph: the torch functions and operators that it runs, as a :class:`torch.fx.Graph`.
        constants: parameters, buffers and other values that it reads, by their names in the graph.
        guard: what it depends on beside the arguments.
        signature: the arguments that it takes.
        context: modes of torch, :func:`context_key`.
        formulas: for the report.
        backends: for the report.
        shapes: of the results of what ran, :attr:`Recorder.shapes`.
        kinds: of its propagate calls, for the limits of size.
        width: most features of a node or an edge.
        admit: returns the tensors among the arguments of a call that it fits, else None.
        unseen: calls in a row whose graphs were new.
    """

    graph: torch.fx.Graph
    constants: dict[str, Any]
    guard: Guard
    signature: Signature
    context: tuple[Any, ...]
    formulas: str = ""
    backends: str = ""
    shapes: tuple[Any, ...] = ()
    kinds: tuple[str, ...] = ()
    width: int = 0
    unseen: int = 0

    def __post_init__(self) -> None:
        """Compile the arguments and the graph."""
        self.admit = self.signature.compiled()
        self._compile()

    def with_graph(self, graph: torch.fx.Graph, formulas: str) -> "LayerProgram":
        """Return a program for the same calls that computes their results in another way."""
        other = copy(self)
        other.graph, other.formulas, other.unseen = graph, formulas, 0
        other._compile()
        return other

    def _compile(self) -> None:
        constants = _Constants(self.constants)
        self._parts = split(self.graph)
        if self._parts is None:
            self._rest = _compiled(self.graph, constants)
            return
        self._derive = _compiled(self._parts.derive, constants)
        self._rest = _compiled(self._parts.rest, constants)
        held = (self.constants[name] for name in self._parts.constants)
        self._held = tuple(value for value in held if isinstance(value, Tensor))
        places = self._parts.owners
        self._owners = itemgetter(*places, places[0]) if places else _nothing
        self._derived: TensorCache[Any] = TensorCache(lambda: settings.graph_cache, trusting=False)

    def run(self, *leaves: Tensor) -> Any:
        """Make a call with the tensors among its arguments."""
        if self._parts is None:
            return self._rest(*leaves)
        owners = self._owners(leaves) + self._held
        sizes: tuple[int, ...] = ()
        if self._parts.sizes:
            sizes = tuple([leaves[place].size(dim) for place, dim in self._parts.sizes])
        derived = self._derived.find(owners, sizes)
        if derived is not None:
            self.unseen = 0
        else:
            self.unseen += 1
            derived = self._derive(*leaves)
            self._derived.put(owners, sizes, derived)
        return self._rest(*leaves, derived)


def _nothing(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ()


def _compiled(graph: torch.fx.Graph, constants: "_Constants") -> Callable[..., Any]:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)
    bound: Callable[..., Any] = names["forward"].__get__(constants)
    return bound


class _Constants:
    """Holds the constants of a program as attributes."""

    def __init__(self, constants: dict[str, Any]) -> None:
        vars(self).update(constants)


def context_key() -> tuple[Any, ...]:
    """Return the modes of torch that a recorded call depends on."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch._C._is_any_autocast_enabled() and _autocast(), torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(), torch._C._functorch.peek_interpreter_stack() is None,
        torch.autograd.forward_ad._current_level, torch._C._is_tracing(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    )  # fmt: skip


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )


def record(
    layer: torch.nn.Module,
    entries: tuple[str, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    signature: Signature,
    before: tuple[Any, ...] | None = None,
) -> tuple[Any, Recorder, Guard]:
    """Make a call and record it.

    Args:
        layer: whose call it is.
        entries: names of the methods that it begins with.
        function: what runs: called with the layer and the arguments.
        args: of the call.
        kwargs: of the call.
        signature: of the arguments.
        before: shapes of a call that had other sizes.

    Returns:
        The result, what was seen and the guard.

    Raises:
        NotComparable: if the call cannot be recorded; then it was not made.
    """
    guard = Guard(layer, [getattr(type(layer), name) for name in entries])
    recorder = Recorder(guard, signature.leaves(args, kwargs), signature.shapes, before)
    with recorder.watching():
        out = function(layer, *args, **kwargs)
    recorder.finish(out)
    if not recorder.reason:
        try:
            guard.settle(recorder.ran)
        except NotComparable as error:
            recorder.stop(str(error))
    return out, recorder, guard
