"""State that a call may change beside its result: saved, and restored for a second attempt.

A message that turns out not to be a formula runs again, in PyG's own path. Random numbers, buffers
(a BatchNorm in the message) and attributes of the layer are put back before. Other tensors that the
layer was given or holds cannot be, cheaply: a trace refuses to change them
(:meth:`~pyg_accel.patching.watch.Watch.guard`).
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.cache import version_of
from pyg_accel.patching.overrides import HOOK_DICTS
from pyg_accel.patching.reasons import modules_in

__all__ = ["RandomState", "random_state", "restore", "tensors_of"]

_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
# Attributes of modules that a call does not fill, or with which it is not accelerated.
_INTRINSIC = frozenset(vars(torch.nn.Module())).union(HOOK_DICTS) - {"_parameters", "_buffers"}


class _Attributes(NamedTuple):
    """Of a module: what they were, and what was in those that are containers."""

    module: torch.nn.Module
    values: dict[str, Any]
    contents: tuple[tuple[Any, Any], ...]


class RandomState(NamedTuple):
    """Of the generators of the CPU and of a GPU, and of a module.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        cuda: as ``torch.cuda.get_rng_state`` returns it; None where no GPU takes part.
        device: the GPU.
        buffers: of the module, with a copy and the version of each.
        attributes: of the module and those in it.
    """

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device
    buffers: tuple[tuple[Tensor, Tensor, int], ...] = ()
    attributes: tuple[_Attributes, ...] = ()


def random_state(device: torch.device, module: torch.nn.Module | None = None) -> RandomState:
    """Return the state that calls on a device start from, without waiting for the device.

    Args:
        device: of the generators.
        module: its state counts too.
    """
    modules = {id(m): m for m in modules_in(module)}.values()
    buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}.values()
    # The state cannot be read while a CUDA graph is captured; unknown messages were found before.
    asks = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return RandomState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if asks else None,
        device,
        tuple((b, b.detach().clone(), version_of(b)) for b in buffers),
        tuple(map(_attributes, modules)),
    )


def restore(state: RandomState) -> None:
    """Let the next call draw and find what one at the time of ``state`` would have."""
    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda, state.device)
    for module, values, contents in state.attributes:
        for container, before in contents:
            _refill(container, before)
        _refill(vars(module), values)
    capturing = state.cuda is None and state.device.type == "cuda"
    for buffer, copy, version in state.buffers:
        # batch_norm's writing is not counted; what is equal stays, autograd may have saved it.
        if version_of(buffer) != version or capturing or not torch.equal(buffer, copy):
            with torch.no_grad():
                buffer.copy_(copy)


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Return the tensors that a module and those in it hold, but for their buffers."""
    found: list[Tensor] = []
    for m in modules_in(module):
        found += [p for p in m._parameters.values() if p is not None]
        for name, value in vars(m).items():
            if isinstance(value, Tensor):
                found.append(value)
            elif name not in _INTRINSIC and name != "_buffers" and type(value) in _CONTAINERS:
                found += [item for item in _items(value) if isinstance(item, Tensor)]
    return found


def _attributes(module: torch.nn.Module) -> _Attributes:
    values = vars(module).copy()
    own = [values[name] for name in values.keys() - _INTRINSIC]
    return _Attributes(module, values, tuple(_contents(own)))


def _contents(values: Iterable[Any], depth: int = 3) -> Iterator[tuple[Any, Any]]:
    """Yield the containers among values, and in these, each with a copy."""
    for value in values:
        if type(value) in _CONTAINERS and depth > 0:
            yield value, value.copy()
            yield from _contents(_items(value), depth - 1)


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _refill(container: Any, before: Any) -> None:
    """Put the items back; what is the same stays in place, for others may be reading."""
    if isinstance(container, dict):
        for key in container.keys() - before.keys():
            del container[key]
        for key, value in before.items():
            if key not in container or container[key] is not value:
                container[key] = value
    elif isinstance(container, set):
        container.intersection_update(before)
        container.update(before)
    elif len(container) != len(before) or any(
        now is not then for now, then in zip(container, before, strict=True)
    ):
        container.clear()
        container.extend(before)
