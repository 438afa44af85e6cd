"""Which backend runs a call: the cheapest of those without a reason against it."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from pyg_accel.backends.base import Backend, Kernel
from pyg_accel.backends.notes import note_choice, record_choices
from pyg_accel.backends.registry import backends, get_backend
from pyg_accel.backends.spec import OpSpec
from pyg_accel.errors import BackendNotSupported
from pyg_accel.settings import settings, variables

__all__ = [
    "Decision",
    "asked_for",
    "choose",
    "decide",
    "fast_backend_reasons",
    "forget_decisions",
    "is_fast",
    "named",
    "note_choice",
    "prefer_backend",
    "record_choices",
    "situation",
    "use_backend",
    "variables_of_choices",
]

_log = logging.getLogger("pyg_accel")
# A backend's name, and whether others may run what that one cannot.
named: ContextVar[tuple[str, bool] | None] = ContextVar("pyg_accel_backend", default=None)
variables_of_choices = variables("backend", "disable", "isa")


@dataclass(frozen=True)
class Decision:
    """The backend for a call, its kernel and cost, and why the others were passed over."""

    spec: OpSpec
    backend: Backend
    kernel: Kernel
    cost: float
    rejected: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        others = "".join(f"\n  not {name}: {'; '.join(why)}" for name, why in self.rejected.items())
        return f"{self.spec} -> {self.backend.name}{others}"


def use_backend(name: str) -> AbstractContextManager[None]:
    """Run every operator inside the block on one backend; it raises where that one cannot.

    In the backward pass, what this backend cannot compute runs on another one. Where it cannot run
    even a plain sum, patched layers are left to PyG, and the report says why.

    Args:
        name: name of a backend, or ``"auto"`` to choose freely again.

    Returns:
        A context manager. Inside, operators that the backend cannot run raise BackendNotSupported.

    Raises:
        ValueError: if there is no such backend.
    """
    if name != "auto":
        get_backend(name)
    return _block(name, others=False)


def prefer_backend(name: str) -> AbstractContextManager[None]:
    """Run the operators inside the block on one backend where it can, else on any other."""
    return _block(name, others=True)


@contextmanager
def _block(name: str, *, others: bool) -> Iterator[None]:
    token = named.set((name, others))
    try:
        yield
    finally:
        named.reset(token)


def asked_for() -> str:
    """Return the backend that :func:`use_backend` or the settings name here, or ``"auto"``."""
    return _asked()[0]


def _asked() -> tuple[str, bool]:
    return named.get() or (settings.backend, False)


def situation() -> tuple[object, ...]:
    """Return what, beside the facts of a call, the choice of its backend depends on."""
    return named.get(), settings.changes, *variables_of_choices()


def fast_backend_reasons(device: str) -> list[str]:
    """Return why no backend but the reference would run messages on a device; empty if one does.

    Any message, that is: what is good at sums alone does not make models faster. A backend that was
    asked for by name counts, whatever it is, if it runs a plain sum.
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


def is_fast(spec: OpSpec) -> bool:
    """Return whether the backend that was asked for, or any but the reference, runs a call.

    False too where that backend would rather run the parts of the operator.
    """
    try:
        decision = decide(spec)
    except BackendNotSupported:
        return False
    name, named = decision.backend.name, asked_for()
    if name == "reference" if named == "auto" else name != named:
        return False
    return not decision.kernel.prefers_unfused(spec)


def choose(spec: OpSpec) -> Decision:
    """Return the backend for a call.

    Raises:
        BackendNotSupported: with every backend's reasons, if none can, or not the one asked for.
    """
    decision = decide(spec)
    note_choice(decision.backend.name)
    return decision


def forget_decisions() -> None:
    """Decide anew: what backends reckon with has changed."""
    settings.changes += 1


def decide(spec: OpSpec) -> Decision:
    """Return what :func:`choose` would, for a call that may not be made."""
    name, others = _asked()
    try:
        return _choose(spec, name, settings.disable, settings.changes)
    except BackendNotSupported:
        if not others:
            raise
        return _choose(spec, "auto", settings.disable, settings.changes)


@lru_cache(maxsize=4096)
def _choose(spec: OpSpec, forced: str, disabled: str, _changes: int) -> Decision:
    disabled_names = {name.strip() for name in disabled.split(",")}
    candidates = backends() if forced == "auto" else {forced: get_backend(forced)}
    rejected: dict[str, tuple[str, ...]] = {}
    best: Decision | None = None
    for name, backend in candidates.items():
        reasons = ["disabled by PYG_ACCEL_DISABLE"] if name in disabled_names else []
        reasons = reasons or backend.unavailable_reasons() or backend.not_supported_reasons(spec)
        if reasons:
            rejected[name] = tuple(reasons)
            continue
        kernel = backend.kernels[spec.op]
        found = Decision(spec, backend, kernel, kernel.cost(spec), rejected)
        faster, slower = (best, found) if best and best.cost <= found.cost else (found, best)
        if slower is not None:
            rejected[slower.backend.name] = (f"estimated to be slower than {faster.backend.name}",)
        best = faster
    if best is None:
        raise BackendNotSupported(spec, rejected)
    _log.debug("%s", best)
    return best
