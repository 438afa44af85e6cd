"""Whether a call is accelerated: the switch of ``patch()``, and reasons against a call."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_dispatch_mode,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _TorchDispatchModeKey,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch_geometric import EdgeIndex, Index
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import fast_backend_reasons
from pyg_accel.graph.matrices import is_sparse_matrix
from pyg_accel.graph.memo import tensors_in
from pyg_accel.record.edge_tensors import EdgeTensor
from pyg_accel.runtime.hooks import has_hooks, hook_reasons
from pyg_accel.runtime.module_state import modules_in
from pyg_accel.runtime.state import running

__all__ = [
    "RECORDED", "WATCHED", "Unrecognised", "call_reasons", "data_reasons", "device_of", "is_active",
    "is_watched", "layer_reasons", "lazy_reason", "row_bytes", "subclass_reasons", "switch",
    "switches", "takes_part", "torch_records", "transform_reasons",
]  # fmt: skip


class Unrecognised(Exception):
    """A message that no formula expresses.

    Attributes:
        permanent: whether the layer will always raise it, so that a retry is useless.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.permanent = permanent
        if running.traces and running.traces[-1].failure is None:
            running.traces[-1].failure = self


class Switches:
    """Counts the begins and ends of calls of patch()."""

    changes = 0


# Calls of patch() in force, without a model and with one; numbers, as Dynamo can guard these.
_everywhere, _models = 0, 0
switches = Switches()
marked: "weakref.WeakKeyDictionary[torch.nn.Module, int]" = weakref.WeakKeyDictionary()
RECORDED = "torch records the calls that are made"
WATCHED = "a hook on the aggregation, or a method of its own"
_FAKE = _TorchDispatchModeKey.FAKE
# Known classes of tensors, those of compilers included; others may do anything.
_TENSORS = {Tensor, torch.nn.Parameter, EdgeIndex, Index, FakeTensor, FunctionalTensor}
# Methods that may be replaced on an instance.
_METHODS = frozenset({
    "forward", "propagate", "message", "aggregate", "update", "message_and_aggregate", "reduce",
    "combine", "edge_update", "edge_updater",
})  # fmt: skip


def switch(modules: Sequence[torch.nn.Module] | None, by: int) -> None:
    """Count a patch() of some instances, or of all layers, that begins (1) or ends (-1)."""
    global _everywhere, _models
    switches.changes += 1
    if modules is None:
        _everywhere += by
        return
    _models += by
    for module in modules:
        count = marked.get(module, 0) + by
        if count > 0:
            marked[module] = count
        else:
            marked.pop(module, None)


def is_active(module: torch.nn.Module | None = None) -> bool:
    """Return whether all calls are accelerated, or calls of this instance."""
    if _everywhere > 0 or running.unconditional:
        return True
    # Dynamo can read numbers, but in torch 2.11 no weak dictionaries.
    return _models > 0 and module is not None and module in marked


def torch_records() -> bool:
    """Whether a compiler or tracer of torch reads the current calls."""
    return torch.compiler.is_compiling() or _is_tracing()


def takes_part(module: MessagePassing) -> bool:
    """Return whether calls of a layer are accelerated, outside of compilers and tracers."""
    return is_active(module) and not torch_records()


def call_reasons(module: MessagePassing, edge_index: Any) -> list[str]:
    """Return the reasons against a call, apart from its message and its size."""
    reasons = layer_reasons(module, edge_index) or transform_reasons()
    return reasons or fast_backend_reasons(device_of(edge_index).type)  # the most expensive check


def layer_reasons(module: MessagePassing, edge_index: Any) -> list[str]:
    """Return the reasons against a layer or its graph."""
    reasons = hook_reasons(module)
    if reason := lazy_reason(module):
        reasons.append(reason)
    if is_watched(module.aggr_module):
        reasons.append(WATCHED)
    elif any(m._backward_hooks or m._backward_pre_hooks for m in modules_in(*module.children())):
        # It expects gradients of messages.
        reasons.append("a backward hook inside of the layer")
    if not is_sparse_matrix(edge_index) and (
        not isinstance(edge_index, Tensor)
        or edge_index.dim() != 2
        or edge_index.size(0) != 2
        or edge_index.dtype not in (torch.int32, torch.int64)
    ):
        reasons.append("a malformed edge_index")
    return reasons


def lazy_reason(module: MessagePassing) -> str:
    """Return the reason against a layer with uninitialised parameters; empty without one."""
    parameters = (p for m in modules_in(module) for p in m._parameters.values() if p is not None)
    return "parameters whose shape this call will tell" if any(map(is_lazy, parameters)) else ""


def is_watched(*modules: torch.nn.Module | None) -> bool:
    """Whether calls of modules or of parts of them are observed.

    By a hook on one of them, by a global hook, or by a method that is set on an instance.
    """
    return bool(_has_any_global_hook()) or any(
        has_hooks(module) or not vars(module).keys().isdisjoint(_METHODS)
        for module in modules_in(*modules)
    )


def transform_reasons(*, modes: bool = True) -> list[str]:
    """Return the active transforms (and modes) that operators of this package do not support."""
    reasons = []
    if torch._C._functorch.peek_interpreter_stack() is not None:
        reasons.append("inside a torch.func transform")
    if torch.autograd.forward_ad._current_level >= 0:
        reasons.append("forward-mode differentiation")
    if modes and (_len_torch_function_stack() or _len_torch_dispatch_stack()):
        stacks = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        others = (type(mode).__name__ for mode in stacks if not _allowed(mode))
        reasons += [f"inside a mode of torch: {name}" for name in others]
    return reasons


def _allowed(mode: Any) -> bool:
    """Whether a mode is unaffected by acceleration, or belongs to this package."""
    return isinstance(mode, (DeviceContext, FakeTensorMode)) or any(
        cls.__module__.startswith("pyg_accel.") for cls in type(mode).__mro__
    )


def subclass_reasons(arguments: Any) -> list[str]:
    """Return the reasons against subclasses of tensors among arguments."""
    others = {type(t) for t in tensors_in(arguments)} - _TENSORS
    return [f"a tensor of the class {cls.__name__}" for cls in others
            if not issubclass(cls, EdgeTensor)]  # fmt: skip


def data_reasons(edge_index: Any) -> list[str]:
    """Return the reason against tensors without data, outside of a compiler."""
    fake = isinstance(edge_index, FakeTensor) or _get_dispatch_mode(_FAKE) is not None
    return ["tensors without data"] if fake else []


def row_bytes(arguments: Mapping[str, Any], node_dim: int = 0) -> int:
    """Return the largest bytes of features of a node or an edge among arguments.

    Args:
        arguments: of the call.
        node_dim: dimension of the nodes; edges may be the first dimension instead.
    """
    values = [v for value in arguments.values()
             for v in (value if isinstance(value, tuple) else (value,))]  # fmt: skip
    tensors = [v for v in values if isinstance(v, Tensor)]
    with torch._C.DisableTorchFunction():  # not recorded
        return max((v.nbytes // max(_rows(v, node_dim), 1) for v in tensors), default=0)


def _rows(t: Tensor, node_dim: int) -> int:
    if t.dim() < 3:
        return t.size(0) if t.dim() else 1
    return max(t.size(0), t.size(node_dim) if -t.dim() <= node_dim < t.dim() else 0)


def device_of(edge_index: Any) -> torch.device:
    """Return the device of a graph of any class."""
    device: Any = getattr(edge_index, "device", "cpu")  # a method of SparseTensor
    return torch.device(device() if callable(device) else device)
