"""Saves and restores the state of modules and of random number generators.

A message that is not a formula runs again in PyG's path, and code may be traced without using its
results. Changes of such runs to modules and generators are undone.
"""

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from pyg_accel.runtime.cache import version_of

__all__ = [
    "PROGRAMS", "ModuleState", "as_it_was", "evaluating", "modules_in", "refill", "tensors_of",
]  # fmt: skip

PROGRAMS = "_pyg_accel_programs"  # attribute of layers and classes that is not part of their state
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}


def modules_in(*modules: Module | None) -> list[Module]:
    """Return modules and their submodules; faster than ``modules()``, with duplicates."""
    inside = [module for module in modules if module is not None]
    for module in inside:  # grows while it is read
        inside += [child for child in module._modules.values() if child is not None]
    return inside


def tensors_of(module: Module) -> list[Tensor]:
    """Return the tensors in attributes of a module and its submodules, except buffers."""
    modules = modules_in(module)
    buffers = {id(m._buffers) for m in modules}
    return [t for c in _containers(modules) if id(c) not in buffers for t in _items(c)
            if isinstance(t, Tensor)]  # fmt: skip


class ModuleState:
    """A copy of attributes of modules and of containers in them, buffers, and generators.

    Modules with lazily initialised parameters are excluded: their first call must change them.

    Args:
        modules: the modules; submodules are not added.
        device: restore the generators of this device and the CPU. By default all generators are
            restored, with Python's and NumPy's, and tensors in other attributes than buffers.

    Attributes:
        device: that device.
    """

    def __init__(self, modules: Iterable[Module], device: torch.device | None = None) -> None:
        """Copy the state, without waiting for the device."""
        saved = [m for m in modules if not _is_lazy(m)]
        self.device, everything = device, device is None
        self._containers = [(c, _copied(c)) for c in _containers(saved)]
        tensors = [b for m in saved for b in m._buffers.values() if b is not None]
        if everything:
            tensors += [t for c, _ in self._containers for t in _items(c) if type(t) is Tensor]
        self._tensors = [
            (t, version_of(t), t.detach().clone()) for t in {id(t): t for t in tensors}.values()
        ]
        self._random = _random_state(device)

    def changed(self) -> str:
        """Describe the first change; empty if there is none."""
        for container, before in self._containers:
            if isinstance(container, dict):
                names = [n for n in {**before, **container}
                         if container.get(n) is not before.get(n) and n != PROGRAMS]  # fmt: skip
                if names:
                    return f"it changes {', '.join(map(str, names))}"
            elif not _same(container, before):
                return "it changes a list or set"
        if any(version_of(tensor) != version for tensor, version, _ in self._tensors):
            return "it changes a tensor in place that it did not make"
        if any(map(_differ, self._random, _random_state(self.device))):
            return "it draws random numbers, or sets the seed"
        return ""

    def restore(self) -> None:
        """Restore the state; unchanged values are not written, as other threads may read them."""
        for container, before in self._containers:
            refill(container, before)
        cpu, python, words, *gpus = self._random
        # While a CUDA graph is captured, neither the generator nor tensors of a GPU can be read.
        captured = not gpus and self.device is not None and self.device.type == "cuda"
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                # batch_norm writes without a new version. Equal tensors are not written: autograd
                # may have saved them.
                if version_of(tensor) != version or captured or not torch.equal(tensor, copy):
                    tensor.copy_(copy)
        torch.set_rng_state(cpu)
        if self.device is None:
            random.setstate(python)
            numpy.random.set_state(words)
        for number, state in enumerate(gpus):
            torch.cuda.set_rng_state(state, self.device or number)


@contextmanager
def as_it_was(modules: Iterable[Module]) -> Iterator[ModuleState]:
    """Restore modules, random number generators and grad mode after the block."""
    state = ModuleState(modules)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield state
    finally:
        state.restore()


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Set a model to evaluation mode in a ``with`` block, and its modules to their own after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _is_lazy(module: Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and is_lazy(t) for t in tensors)


def _containers(modules: Iterable[Module]) -> list[Any]:
    """Return the attributes of modules, as dictionaries, and the containers in these."""
    seen = {id(attributes): attributes for attributes in map(vars, modules)}
    containers: list[Any] = [*seen.values()]
    for container in containers:  # grows while it is read
        for value in _items(container):
            if type(value) in _CONTAINERS and id(value) not in seen:
                seen[id(value)] = value
                containers.append(value)
    return containers


def _items(container: Any) -> list[Any]:
    return [*(container.values() if isinstance(container, dict) else container)]


def _copied(container: Any) -> Any:
    copied = container.copy()
    if isinstance(copied, dict):
        copied.pop(PROGRAMS, None)
    return copied


def _same(container: Any, before: Any) -> bool:
    if isinstance(container, set):
        return bool(container == before)
    return len(container) == len(before) and all(
        now is then for now, then in zip(container, before, strict=True)
    )


def refill(container: Any, before: Any) -> None:
    """Restore a container from a copy; unchanged items are not written."""
    if isinstance(container, dict):
        for key in container.keys() - before.keys() - {PROGRAMS}:
            del container[key]
        for key, value in before.items():
            if key not in container or container[key] is not value:
                container[key] = value
        if not _same([key for key in container if key in before], [*before]):  # the order of names
            container.clear()
            container.update(before)
    elif isinstance(container, set):
        container.intersection_update(before)
        container.update(before)
    elif not _same(container, before):
        container.clear()
        container.extend(before)


def _random_state(device: torch.device | None) -> tuple[Any, ...]:
    """Return the states of the generators of the CPU, of Python and NumPy, and of GPUs."""
    cpu = torch.get_rng_state()
    if device is None:
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cpu, random.getstate(), numpy.random.get_state(), *gpus
    readable = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return cpu, (), (), *([torch.cuda.get_rng_state(device)] if readable else [])


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return not torch.equal(a, b)
    return any(not numpy.array_equal(x, y) for x, y in zip(a, b, strict=True))
