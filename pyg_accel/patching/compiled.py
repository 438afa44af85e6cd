"""``patch()`` under ``torch.compile``: a call is a function that runs while the graph is made.

Dynamo cannot trace lazy tensors. So it gets an accelerated call as an opaque function, which runs
on tensors without data when the compiler makes its graph. Lazy tensors work as in eager mode, and
the operators of their formulas make up the graph.

Dynamo guards what it reads, and does not read an opaque function: a changed ``eps`` would go
unnoticed. So Dynamo reads PyG's own path first. If that path has other effects, its result is
returned. Otherwise the compiler drops it as unused: see :mod:`.dynamo_guards`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import nonstrict_trace
from torch._dynamo.comptime import comptime
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    guard_or_false,
    statically_known_true,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch_geometric import EdgeIndex

from pyg_accel import costs
from pyg_accel.costs import Work, fewest_edges
from pyg_accel.graph import Graph
from pyg_accel.ops.csr import CompiledGraph
from pyg_accel.patching import sampling
from pyg_accel.patching.dynamo_guards import Look, Reading, accept, after, before, find, picked_from
from pyg_accel.patching.reasons import Unrecognised
from pyg_accel.patching.trace import Trace
from pyg_accel.runtime.report import record

__all__ = ["CompiledTrace", "call", "size_reasons"]

_DEPENDS_ON_DATA = (
    GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException,
)  # fmt: skip
_WORK, _ROW_BYTES = Work(), 256  # of a sum of 64 features
_NONE = "pyg_accel: None"  # Dynamo passes strings, but not None


class CompiledTrace(Trace):
    """A trace on tensors without data."""

    runs_networks = False

    def graph(self, num_rows: int, num_cols: int) -> Graph:
        """Return the graph as the result of an operator."""
        return CompiledGraph(self.edge_index, num_rows, num_cols, self.target)


def call(
    original: Callable[..., Any],
    self: Any,
    edge_index: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Make a call of ``propagate`` or ``edge_updater`` in code that Dynamo can trace."""
    plain = isinstance(edge_index, Tensor) and not isinstance(edge_index, EdgeIndex)
    plain = plain and edge_index.layout == torch.strided
    if torch.compiler._is_exporting_flag:  # Dynamo of torch 2.11 takes is_exporting() for True
        note(type(self).__name__, "an export is to run without pyg_accel")
        return original(self, edge_index, *args, **kwargs)
    if not plain or args or not _passable(kwargs):
        note(type(self).__name__, "arguments that are not plain tensors")
        return original(self, edge_index, *args, **kwargs)
    # Dynamo guards the sample that it reads: another one compiles another graph.
    sample = sampling.state.key
    fewest = _fewest(edge_index.device.type)
    if not sample and guard_or_false(edge_index.size(1) < fewest):  # before other guards
        note(type(self).__name__, f"small: fewer than {fewest} edges")
        return original(self, edge_index, *args, **kwargs)
    # By name, shared tensors repeatedly: they replace the state of the layer.
    state = dict(self.named_parameters(remove_duplicate=False))
    state |= dict(self.named_buffers(remove_duplicate=False))
    key = self._pyg_accel_read() + ""  # a constant without a source for Dynamo
    comptime(before)
    stock = original(self, edge_index, **kwargs)
    comptime(after)
    if isinstance(stock, Tensor) and _goes_on(key):
        name = original.__name__
        ours = _run(key, name, edge_index, _replaced(kwargs, None, _NONE), state, sample)
        comptime(accept)
        if _goes_on(key):
            stock = ours
    _note(key)
    return stock


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fewest(device: str) -> int:
    """Least edges of a compiled call, whose graph may be new and whose message is unknown."""
    gradient = torch.is_grad_enabled()
    return fewest_edges(device, _WORK, _ROW_BYTES, new=True, gradient=gradient, compiled=True)


def size_reasons(edge_index: Tensor) -> list[str]:
    """Return why a compiled call is too small.

    The number of edges may be a symbol. If it is no property of an input, the edges were picked
    from a graph: see :func:`.dynamo_guards.picked_from`.
    """
    edges: int | torch.SymInt = edge_index.size(1)
    fewest = 0 if sampling.in_force() is not None else _fewest(edge_index.device.type)
    if isinstance(edges, torch.SymInt):
        edges = picked_from(edges)
        if free_unbacked_symbols(edges):
            few = not statically_known_true(edges >= fewest)
            return ["a number of edges that depends on data"] if few else []
    return costs.size_reasons(edges, fewest)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note(layer: str, reason: str) -> None:
    """Count a compilation of a call by PyG's own path."""
    record(layer, "", "PyG", f"torch.compile: {reason}", 0.0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _goes_on(key: str) -> bool:
    return not find(key).reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note(key: str) -> None:
    reading = find(key)
    layer = type(reading.module()).__name__
    if reading.reason is None:
        note(layer, "a result that is no tensor")
    elif reading.reason or not reading.formulas:
        note(layer, reading.reason or "no reduction that could be fused")
    else:
        record(layer, reading.formulas, "torch.compile", "", 0.0)


@nonstrict_trace
def _run(
    key: str,
    name: str,
    edge_index: Tensor,
    kwargs: dict[str, Any],
    state: dict[str, Tensor],
    sample: str,
) -> Tensor:
    reading = find(key)
    if reading.reason:  # Dynamo has set it since: the result is unused
        return edge_index.new_empty(0)
    if reading.reason is not None:
        return _computed(reading, name, edge_index, kwargs, state)
    # Dynamo runs this first, on tensors without data, unless PyG's path breaks the graph.
    if not isinstance(edge_index, FakeTensor):
        reading.reason = "a graph break"
        return edge_index.new_empty(0)
    state = {name: tensor.clone() for name, tensor in state.items()}
    versions = [tensor._version for tensor in state.values()]
    symbols = edge_index.fake_mode.shape_env
    assert symbols is not None
    try:
        with Look() as look, symbols.ignore_fresh_unbacked_symbols():
            out = _computed(reading, name, edge_index, kwargs, state)
    except Unrecognised as reason:
        reading.reason = str(reason)
    except _DEPENDS_ON_DATA:
        reading.reason = "what is done depends on data"
    else:
        reading.reason, reading.draws = "", look.draws
        if look.foreign:
            reading.reason = "tensors that are neither arguments nor state of the layer"
        if versions != [tensor._version for tensor in state.values()]:
            reading.reason = "a message that changes its layer"
        if not reading.reason:
            return out
    return edge_index.new_empty(0)


def _computed(
    reading: Reading, name: str, edge_index: Tensor, kwargs: Any, state: dict[str, Tensor]
) -> Tensor:
    # A module with two names counts by its first: each name would restore its tensors.
    names = {
        f"{part}.{name}".removeprefix(".")
        for part, module in reading.module().named_modules()
        for name in (*module._parameters, *module._buffers)
    }
    state = {name: tensor for name, tensor in state.items() if name in names}
    with reading.attributes() as module, _reparametrize_module(module, state):
        decided = reading.reason is not None
        out, reading.formulas = reading.run(
            module, name, edge_index, _replaced(kwargs, _NONE, None), decided=decided
        )
    return out


def _passable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_passable(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(_passable(v) for v in value)
    return value is None or isinstance(value, (Tensor, int, float, bool, str))


def _replaced(value: Any, old: Any, new: Any) -> Any:
    """Arguments with one value in place of another; lists become tuples."""
    if isinstance(value, dict):
        return {k: _replaced(v, old, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple([_replaced(v, old, new) for v in value])
    return new if type(value) is type(old) and value == old else value
