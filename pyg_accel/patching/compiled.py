"""``patch()`` under ``torch.compile``: a call as a function that runs when the graph is made.

Dynamo reads Python, and cannot read a trace of lazy tensors. So an accelerated call is handed to it
whole, and runs when the compiler makes its graph, on tensors without data: the lazy machinery does
there what it does elsewhere, and the operators that it calls are what the graph consists of.

Dynamo guards what it has read, and of such a function it reads nothing: a changed ``eps`` would go
unnoticed. So PyG's own path is read as well. Its result is not used, so the graph drops it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import nonstrict_trace
from torch.nn.utils.stateless import _reparametrize_module
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from pyg_accel.calls import record
from pyg_accel.graph import Graph
from pyg_accel.ops.csr import CompiledGraph
from pyg_accel.patching import sampling
from pyg_accel.patching.trace import Trace

__all__ = ["CompiledTrace", "call", "note", "remember"]

# How an accelerated call is made once there is no Dynamo any more; set by accelerate.
Run = Callable[[MessagePassing, str, Tensor, dict[str, Any]], Tensor]
_known: "dict[int, tuple[weakref.ref[MessagePassing], Run]]" = {}
_NONE = "pyg_accel: None"  # Dynamo hands strings on, and None not


class CompiledTrace(Trace):
    """A trace on tensors without data."""

    def graph(self, num_rows: int, num_cols: int) -> Graph:
        """Return the graph as an operator's result."""
        return CompiledGraph(self.edge_index, num_rows, num_cols, self.target)


def remember(module: MessagePassing, run: Run) -> None:
    """Let :func:`call` find a layer by its id, while Dynamo reads."""
    key = id(module)
    _known[key] = (weakref.ref(module, lambda _: _known.pop(key, None)), run)


def call(
    original: Callable[..., Any],
    self: Any,
    edge_index: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call of ``propagate`` or ``edge_updater`` in a way that Dynamo can read."""
    stock = original(self, edge_index, *args, **kwargs)
    plain = isinstance(edge_index, Tensor) and not isinstance(edge_index, EdgeIndex)
    plain = plain and edge_index.layout == torch.strided
    if torch.compiler._is_exporting_flag:  # Dynamo of torch 2.11 takes is_exporting() for True
        note(type(self).__name__, "an export is to run without pyg_accel")
        return stock
    if not plain or args or not isinstance(stock, Tensor) or not _passable(kwargs):
        note(type(self).__name__, "arguments or results that are not plain tensors")
        return stock
    self._pyg_accel_remember()
    # By name, and those that share a tensor too: they are put in place of the layer's own.
    state = dict(self.named_parameters(remove_duplicate=False))
    state |= dict(self.named_buffers(remove_duplicate=False))
    # Dynamo guards what it has read: another sample than before is another graph.
    sample = sampling.state.key
    return _run(id(self), original.__name__, edge_index, _without_none(kwargs), state, sample)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note(layer: str, reason: str, formulas: str = "") -> None:
    """Count a compilation of a call, while Dynamo reads."""
    if formulas:
        record(layer, formulas, "torch.compile", "", 0.0)
    else:
        record(layer, "", "PyG", f"torch.compile: {reason}", 0.0)


@nonstrict_trace
def _run(
    key: int,
    name: str,
    edge_index: Tensor,
    kwargs: dict[str, Any],
    state: dict[str, Tensor],
    sample: str,
) -> Tensor:
    owner, run = _known[key]
    module = owner()
    assert module is not None, "a layer that is being called is alive"
    own = vars(module)
    before = dict(own)
    try:
        with _reparametrize_module(module, state):
            return run(module, name, edge_index, _with_none(kwargs))
    finally:  # what the layer put aside has no data
        for attribute in [a for a in own if own[a] is not before.get(a)]:
            if attribute in before:
                own[attribute] = before[attribute]
            else:
                del own[attribute]


def _passable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_passable(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_passable(v) for v in value)
    return value is None or isinstance(value, (Tensor, int, float, bool, str))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple([_without_none(v) for v in value])
    return _NONE if value is None else value


def _with_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_none(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple([_with_none(v) for v in value])
    return None if isinstance(value, str) and value == _NONE else value
