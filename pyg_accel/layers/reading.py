"""Reads the code of models with torch.fx, and refuses what a graph would leave out.

A graph has the calls that are made of tensors. What else code does has no place in it: contexts
that it enters (``torch.no_grad()``, ``torch.autocast``, a hand-written one), attributes that it
assigns, and random numbers that it draws without a tensor, which become constants.
"""

import dis
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from pyg_accel.cache import saved_tensors_are_hooked, version_of

__all__ = ["CONSTANT", "FAILURES", "LeftOut", "Reader", "State", "as_it_was"]

CONSTANT = "_tensor_constant"  # torch.fx keeps tensors that code makes under such names
_CONTAINERS = (dict, list, set, OrderedDict, deque)
_OF_READING = ("torch.fx.", "torch.overrides", "pyg_accel.")  # modules that see calls on their way


class LeftOut(Exception):
    """Code does what a graph of its calls would not do; the text says what."""


# What reading code on symbols may raise. A mistake of the model's own comes up when it is run.
FAILURES = (
    fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, IndexError, KeyError,
    AssertionError, NameError, LeftOut,
)  # fmt: skip


class Reader(fx.Tracer):
    """Records calls, as long as nothing is in force that a graph would leave out."""

    proxy_buffer_attributes = True  # else what is computed from buffers would be a constant

    def __init__(self, **options: Any) -> None:
        """Remember what is in force."""
        super().__init__(**options)
        self._in_force = _in_force()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call.

        Raises:
            LeftOut: if it is made inside a context.
        """
        if _in_force() != self._in_force:
            raise LeftOut("it switches gradients, autocast or another mode of torch on or off")
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(_OF_READING) and _has_with(frame.f_code):
                where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise LeftOut(f"it enters a context ({where}), and a graph would not")
            frame = frame.f_back
        return super().create_node(*args, **kwargs)


@lru_cache(maxsize=1024)
def _has_with(code: CodeType) -> bool:
    return any(i.opname == "WITH_EXCEPT_START" for i in dis.get_instructions(code))


def _in_force() -> tuple[Any, ...]:
    """What torch does to calls behind their backs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        saved_tensors_are_hooked(),  # a checkpoint, whose contexts are in no frame of its caller
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )


class State:
    """What modules hold at a moment, and the random numbers that come next.

    Modules whose sizes are not known yet are left out: their first call is to change them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Remember attributes, what lists and dictionaries hold, and copies of tensors."""
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        for module in modules:
            held = (*module._parameters.values(), *module._buffers.values())
            if not any(t is not None and is_lazy(t) for t in held):
                self._remember(vars(module))
        self._random = _random_state()

    def _remember(self, container: Any) -> None:
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        self._containers.append((container, container.copy()))
        for value in list(container.values() if isinstance(container, dict) else container):
            if type(value) in _CONTAINERS:
                self._remember(value)
            elif type(value) is Tensor and not value.is_inference() and id(value) not in self._seen:
                self._seen.add(id(value))
                self._tensors.append((value, version_of(value), value.detach().clone()))

    def changed(self) -> str:
        """Return what is otherwise by now, or nothing."""
        for container, before in self._containers:
            if not _same(container, before):
                names = _names_of_changes(container, before)
                return f"it changes {names}" if names else "it changes a list or set"
        if any(version_of(tensor) != version for tensor, version, _ in self._tensors):
            return "it changes a tensor in place that it did not make"
        if any(map(_differ, self._random, _random_state())):
            return "it draws random numbers, or sets the seed"
        return ""

    def restore(self) -> None:
        """Let everything be as it was."""
        for container, before in self._containers:
            if _same(container, before, exactly=True):
                continue
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                # BatchNorm changes its statistics without counting it.
                if version_of(tensor) != version or not torch.equal(tensor, copy):
                    tensor.copy_(copy)
        cpu, python, words, *gpus = self._random
        torch.set_rng_state(cpu)
        random.setstate(python)
        numpy.random.set_state(words)
        for i, state in enumerate(gpus):
            torch.cuda.set_rng_state(state, i)


@contextmanager
def as_it_was(modules: Iterable[torch.nn.Module]) -> Iterator[State]:
    """Inside of this, code may run; afterwards modules and random numbers are as before."""
    state = State(modules)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield state
    finally:
        state.restore()


def _same(container: Any, before: Any, *, exactly: bool = False) -> bool:
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, dict):
        names, known = ([n for n in d if exactly or not str(n).startswith(CONSTANT)]
                        for d in (container, before))  # fmt: skip
        return names == known and all(container[n] is before[n] for n in known)
    return len(container) == len(before) and all(map(_is, container, before))


def _is(a: Any, b: Any) -> bool:
    return a is b


def _names_of_changes(container: Any, before: Any) -> str:
    if not isinstance(container, dict):
        return ""
    names = [n for n in {**before, **container} if container.get(n) is not before.get(n)]
    return ", ".join(str(n) for n in names if not str(n).startswith(CONSTANT))


def _random_state() -> tuple[Any, ...]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(), *gpus


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return not torch.equal(a, b)
    return any(not numpy.array_equal(x, y) for x, y in zip(a, b, strict=True))
