"""What a capture takes for granted of its modules, and how a trial leaves no trace in them."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from pyg_accel.patching.rng_state import random_state, restore

__all__ = ["Checkpoint", "ModuleState", "modules_of"]

_SCALARS = (bool, int, float, complex, str, type(None))
_REQUIRES_GRAD = attrgetter("requires_grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def modules_of(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return modules and those inside them, each once."""
    return list(dict.fromkeys(m for root in roots for m in root.modules()))


class ModuleState:
    """Attributes, parameters and buffers of modules as they are, by identity.

    Replacing any of them, also by ``train()``, ``to()`` or ``load_state_dict(assign=True)``, makes
    another state; values in parameters and buffers may change. What is in a list or a dictionary
    that a module keeps is not looked at.
    """

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        """Look at the modules."""
        self.modules = modules_of(roots)
        dicts = [vars(module) for module in self.modules]
        inner = [d[name] for d in dicts for name in ("_parameters", "_buffers", "_modules")]
        self._dicts = [*dicts, *inner]
        self._values = [value for d in self._dicts for value in d.values()]
        self._hooks = [d[name] for d in dicts for name in _HOOKS]
        self.parameters = list(dict.fromkeys(p for m in self.modules for p in m._parameters.values()
                                             if p is not None))  # fmt: skip
        self.buffers = list(dict.fromkeys(b for m in self.modules for b in m._buffers.values()
                                          if b is not None))  # fmt: skip
        self._tensors = self._look()

    def _look(self) -> list[Any]:
        tensors = [*self.parameters, *self.buffers]
        return [*map(Tensor.data_ptr, tensors), *map(_REQUIRES_GRAD, tensors)]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        now = chain.from_iterable(map(dict.values, self._dicts))
        return (
            sum(map(len, self._dicts)) == len(self._values)
            and all(map(is_, now, self._values))
            and self._look() == self._tensors
        )

    def changed(self) -> list[str]:
        """Return the names of what is no longer as it was."""
        names = [name for d in self._dicts for name in d]
        now = chain.from_iterable(map(dict.values, self._dicts))
        if len(names) != len(self._values):
            return ["which attributes there are"]
        found = zip(names, now, self._values, strict=True)
        changed = dict.fromkeys(name for name, value, then in found if value is not then)
        if not changed and self._look() != self._tensors:
            return ["the memory of its parameters"]
        return list(changed)

    def key(self) -> Hashable:
        """Return by what this state is found again; it holds while this object lives."""
        values = [value if type(value) in _SCALARS else id(value) for value in self._values]
        return tuple(map(len, self._dicts)), tuple(values), tuple(self._tensors)

    def reasons(self) -> list[str]:
        """Return why calls of these modules cannot be captured."""
        if any(self._hooks) or _has_any_global_hook():
            return ["a hook on one of its modules"]
        if any(p._backward_hooks for p in self.parameters):
            return ["a hook on one of its parameters"]
        return []


class Checkpoint:
    """Random numbers, attributes and tensors as they are, to go back to after a trial."""

    def __init__(
        self, modules: Sequence[torch.nn.Module], tensors: Iterable[Tensor], device: torch.device
    ) -> None:
        """Copy everything."""
        self._random = random_state(device)
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._grads = [(p, p.grad) for m in modules for p in m._parameters.values()
                       if p is not None]  # fmt: skip
        dicts = [d for m in modules for d in (vars(m), m._parameters, m._buffers, m._modules)]
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = [(d, dict(d)) for d in dicts]

    def restore(self) -> None:
        """Put everything back."""
        for now, then in self._dicts:
            if list(now) != list(then) or not all(map(is_, now.values(), then.values())):
                now.clear()
                now.update(then)
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        with torch.no_grad():
            for tensor, copy in self._tensors:  # batch_norm changes its buffers without a version
                tensor.copy_(copy)
        restore(self._random)
