"""Kinds of calls: everything that the trace of a call looks at, as a key."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_geometric
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn import MessagePassing

from pyg_accel.backends.dispatch import situation
from pyg_accel.patching.attention import Weights
from pyg_accel.patching.kept import KEEPS, returns_none
from pyg_accel.patching.overrides import is_hooked
from pyg_accel.patching.readable import METHODS, Reads, read_class
from pyg_accel.patching.reasons import has_hooks, is_watched
from pyg_accel.patching.reductions import is_simple, reduces_of
from pyg_accel.patching.sampling import in_force
from pyg_accel.record.edge_tensors import plain_shape

__all__ = ["Key", "kind_of_call", "reads_of", "tensors_of"]

Key = tuple[Any, ...]
_RUN = frozenset({"forward", "reduce"})  # methods of an aggregation
# Modules that a message may call, as they are: linear layers, and functions with constants.
_LINEAR = (torch.nn.Linear, torch_geometric.nn.Linear)
_FUNCTIONS = (
    torch.nn.ReLU, torch.nn.LeakyReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Identity,
    torch.nn.SiLU, torch.nn.GELU, torch.nn.Softplus, torch.nn.ELU,
)  # fmt: skip
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_FORWARDS: dict[type, Any] = {cls: cls.forward for cls in (*_LINEAR, *_FUNCTIONS, *_LISTS)}
_CONSTANTS = (bool, int, str)
_FEW = 14  # bits of a number of edges for which no trace saves memory
_MISSING = object()
_NONE, _NO_SUCH = ("None",), ("no such attribute",)


def kind_of_call(
    original: Callable[..., Any], module: MessagePassing, edge_index: Any, kwargs: dict[str, Any]
) -> Key | None:
    """Return the kind of a call; None for those that are traced each time."""
    cls = type(module)
    reads = reads_of(cls)
    if (
        not reads.all_known
        or type(edge_index) is not Tensor
        or edge_index.dim() != 2
        or edge_index.layout is not torch.strided
    ):
        return None
    aggregation = _aggregation(module.aggr_module)
    if (
        aggregation is None
        or is_hooked(module)
        or not vars(module).keys().isdisjoint(METHODS)
        or torch.nn.modules.module._has_any_global_hook()
    ):
        return None
    device = edge_index.device
    key: list[Any] = [
        original, module.training, aggregation, module.flow, module.node_dim,
        edge_index.dtype, edge_index.size(0), _magnitude(edge_index.size(1)), device,
        torch.is_grad_enabled(), _autocast(device.type), cls.message,
        cls.message.__code__, cls.edge_update, cls.edge_update.__code__, situation(), in_force(),
        returns_none(module), module in KEEPS,
    ]  # fmt: skip
    key += [names.get(name) for names, name in reads.globals]
    for name in reads.attributes:
        value = getattr(module, name, _MISSING)
        fact = _module(value) if type(value) in _FORWARDS else _fact(value)
        if fact is None:
            return None
        key.append((fact, value.shape) if isinstance(value, Tensor) else fact)
    for name, value in kwargs.items():
        fact = (value is None,) if name == "size" else _fact(value)
        if fact is None or (reads.trailing and not _is_wide(value)):
            return None
        key.append((name, fact))
    return tuple(key)


def _aggregation(aggregation: Any) -> Any:
    """Which reductions an aggregation makes; None if that is not known, or may change."""
    if is_simple(aggregation):
        own = has_hooks(aggregation) or not vars(aggregation).keys().isdisjoint(_RUN)
        return None if own else type(aggregation)
    reduces = reduces_of(aggregation)
    return None if reduces is None or is_watched(aggregation) else (type(aggregation), reduces)


def _magnitude(num_edges: int) -> int:
    """The number of edges to a power of two: what fills much memory is traced to other formulas."""
    return num_edges and max(num_edges.bit_length(), _FEW)


def _autocast(device: str) -> torch.dtype | None:
    """What autocast turns tensors into; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _module(module: Any) -> Any:
    """What is known of a module that a message calls; None if it may do something else."""
    cls, own = type(module), vars(module)
    if cls not in _FORWARDS or has_hooks(module) or "forward" in own:
        return None
    if cls.forward is not _FORWARDS[cls]:
        return None
    if cls in _LISTS:
        facts = [(name, _module(child)) for name, child in module._modules.items()]
        return None if any(fact is None for _, fact in facts) else (cls, *facts)
    if cls in _LINEAR:
        facts = [_fact(t) for _, t in tensors_of("", module)]
        facts.append(module.weight.shape)
    else:
        facts = [_fact(own[name]) for name in getattr(cls, "__constants__", ())]
    return None if None in facts else (cls, *facts)


def tensors_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the tensors that a message may read of an attribute of its layer, by their paths."""
    if type(value) in _LINEAR:
        return [(f"{name}.weight", value.weight), (f"{name}.bias", value.bias)]
    if type(value) in _LISTS:
        parts = value._modules.items()
        return [found for key, part in parts for found in tensors_of(f"{name}.{key}", part)]
    return [(name, value)]


def _fact(value: Any) -> Any:
    """What is known of a value beside the numbers in a tensor; None for what has no plan."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        return (value.dtype, value.shape[1:], value.device, value.requires_grad, value.dim() > 0)
    if value is None:
        return _NONE
    if value is _MISSING:
        return _NO_SUCH
    if kind is tuple and len(value) == 2:
        pair = (_fact(value[0]), _fact(value[1]))
        return None if None in pair else pair
    if kind is Weights:
        steps = _steps(value)
        if steps is None:
            return None
        return (*value.source.kind(), value.mask is None, plain_shape(value)[1:], steps)
    if kind is float:
        return (kind, value.hex())  # 0.0 is not -0.0
    return (kind, value) if kind in _CONSTANTS else None


def _steps(weights: Weights) -> tuple[Any, ...] | None:
    """How weights were made of the first ones; None where that takes more than numbers."""
    steps: list[Any] = []
    for function, args, kwargs in weights.made:
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            args = tuple(args[0])  # of view((-1, 1))
        if not all(type(a) in (int, float, bool) for a in (*args, *kwargs.values())):
            return None
        steps += [function, args, tuple(kwargs.items())]
    return tuple(steps)


def _is_wide(value: Any) -> bool:
    """Whether the last dimension of a tensor, or of a pair of them, is none of nodes or edges."""
    if type(value) is tuple:
        return all(map(_is_wide, value))
    return not isinstance(value, Tensor) or value.dim() > 1


def reads_of(cls: type[MessagePassing]) -> Reads:
    """Return what the methods of a class read; found out again when one was replaced.

    So it is when a function that they call was: the one in its place may read anything.
    """
    methods: list[Any] = [getattr(cls, name) for name in METHODS]
    methods += [getattr(method, "__code__", None) for method in methods]
    known = _reads.get(cls)
    if known is not None and known.methods == methods and _unchanged(known):
        return known.reads
    reads = read_class(cls)
    _reads[cls] = _Read(methods, [names.get(name) for names, name in reads.globals], reads)
    return reads


class _Read(NamedTuple):
    """What was read of a class, of which methods, and what their globals were."""

    methods: list[Any]
    globals: list[Any]
    reads: Reads


def _unchanged(known: _Read) -> bool:
    for (names, name), value in zip(known.reads.globals, known.globals, strict=True):
        if names.get(name) is not value:
            return False
    return True


_reads: "weakref.WeakKeyDictionary[type, _Read]" = weakref.WeakKeyDictionary()
