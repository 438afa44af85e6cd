"""Chooses the backend for a call: the cheapest one without a reason against it."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from pyg_accel.backends.base import Backend, Kernel
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.registry import backends, get_backend
from pyg_accel.backends.spec import OpSpec
from pyg_accel.errors import BackendNotSupported
from pyg_accel.settings import settings, variables

__all__ = [
    "Decision", "asked_for", "choose", "decide", "dispatch_key", "fast_backend_reasons",
    "forget_decisions", "is_fast", "named", "prefer_backend", "use_backend",
    "variables_of_choices",
]  # fmt: skip

_log = logging.getLogger("pyg_accel")
# The name of a backend, and whether others may run calls that it cannot. A context variable, as a
# user may await something in the block, and other tasks must not see it.
named: ContextVar[tuple[str, bool] | None] = ContextVar("pyg_accel_backend", default=None)
variables_of_choices = variables("backend", "disable", "isa")


@dataclass(frozen=True)
class Decision:
    """The backend for a call, its kernel and cost, and the reasons against the others."""

    spec: OpSpec
    backend: Backend
    kernel: Kernel
    cost: float
    rejected: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {'; '.join(why)}" for name, why in self.rejected.items())
        return f"{self.spec} -> {self.backend.name}{others}"


def use_backend(name: str) -> AbstractContextManager[None]:
    """Run every operator in the block on one backend, and raise if it cannot.

    In the backward pass, another backend runs unsupported operators. If it cannot run a plain sum,
    patched layers take PyG's own path, and the report says why.

    Args:
        name: name of a backend, or ``"auto"`` to choose freely again.

    Returns:
        A context manager. In it, operators that the backend cannot run raise BackendNotSupported.

    Raises:
        ValueError: if there is no such backend.
    """
    if name != "auto":
        get_backend(name)
    return _block(name, others=False)


def prefer_backend(name: str) -> AbstractContextManager[None]:
    """Run the operators in the block on one backend if it can, otherwise on any other."""
    return _block(name, others=True)


@contextmanager
def _block(name: str, *, others: bool) -> Iterator[None]:
    token = named.set((name, others))
    try:
        yield
    finally:
        named.reset(token)


def asked_for() -> str:
    """Return the backend that :func:`use_backend` or the settings name, or ``"auto"``."""
    return _asked()[0]


def _asked() -> tuple[str, bool]:
    return named.get() or (settings.backend, False)


def dispatch_key() -> tuple[object, ...]:
    """Return the state besides the call that determines the choice of a backend."""
    return named.get(), settings.changes, *variables_of_choices()


def fast_backend_reasons(device: str) -> list[str]:
    """Return why only the reference backend could run messages on a device; empty if others can.

    A backend has to run any message, as one for sums only does not make models faster. A backend
    that was named only has to run a plain sum.
    """
    named = asked_for() != "auto"
    formula, shapes = ("u0", ((1, 1),)) if named else ("relu(add(u0,v1))", ((1, 1), (1, 1)))
    facts = {"formula": formula, "reduces": ("sum",), "shapes": shapes}
    try:
        decision = choose(OpSpec.of_any_size("gspmm", device, torch.float32, 1, 1, **facts))
    except BackendNotSupported as error:
        return [f"{name}: {'; '.join(why)}" for name, why in error.reasons.items()]
    if decision.backend.name != "reference" or named:
        return []
    return [f"{name}: {'; '.join(why)}" for name, why in decision.rejected.items()]


def is_fast(spec: OpSpec, *, recorded: bool = False) -> bool:
    """Return whether the named backend, or any except the reference, runs a call.

    Also False if the backend runs the parts of the operator faster, unless a gradient is recorded:
    the gradient of the parts takes longer.
    """
    try:
        decision = decide(spec)
    except BackendNotSupported:
        return False
    name, named = decision.backend.name, asked_for()
    if name == "reference" if named == "auto" else name != named:
        return False
    return recorded or not decision.kernel.prefers_unfused(spec)


def choose(spec: OpSpec) -> Decision:
    """Return the backend for a call.

    Raises:
        BackendNotSupported: with the reasons of every backend, or of the named one.
    """
    decision = decide(spec)
    note_choice(decision.backend.name)
    return decision


def forget_decisions() -> None:
    """Drop all cached choices, after a change of something that backends depend on."""
    settings.outdate()


def decide(spec: OpSpec) -> Decision:
    """Return the result of :func:`choose` without noting it for the report."""
    name, others = _asked()
    try:
        return _choose(spec, name, settings.disable, settings.changes)
    except BackendNotSupported:
        if not others:
            raise
        return _choose(spec, "auto", settings.disable, settings.changes)


@lru_cache(maxsize=4096)
def _choose(spec: OpSpec, forced: str, disabled: str, _changes: int) -> Decision:
    disabled_names = {name.strip() for name in disabled.split(",")} - {""}
    candidates = backends()
    for variable, names in (("BACKEND", {forced} - {"auto"}), ("DISABLE", disabled_names)):
        if unknown := names - candidates.keys():
            raise ValueError(f"PYG_ACCEL_{variable}: no backend named '{', '.join(unknown)}'; "
                             f"there are {', '.join(candidates)}")  # fmt: skip
    if forced != "auto":
        candidates = {forced: candidates[forced]}
    rejected: dict[str, tuple[str, ...]] = {}
    best: Decision | None = None
    for name, backend in candidates.items():
        reasons = ["disabled by PYG_ACCEL_DISABLE"] if name in disabled_names else []
        reasons = reasons or backend.unavailable_reasons() or backend.not_supported_reasons(spec)
        if reasons:
            rejected[name] = tuple(reasons)
            continue
        new = Decision(spec, backend, backend.kernels[spec.op], backend.cost(spec), rejected)
        faster, slower = (best, new) if best and best.cost <= new.cost else (new, best)
        if slower is not None:
            rejected[slower.backend.name] = (f"estimated to be slower than {faster.backend.name}",)
        best = faster
    if best is None:
        raise BackendNotSupported(spec, rejected)
    _log.debug("%s", best)
    return best
