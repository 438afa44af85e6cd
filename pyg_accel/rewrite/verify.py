"""Holds a rewritten model against the original, on the examples that it was made with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_accel.call_report import uncounted
from pyg_accel.layers.reading import as_it_was

__all__ = ["Outcome", "differences", "evaluated"]

# Of the largest element: another order of additions moves results by far less, code that was
# misunderstood by far more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
SMALL = 1e-3  # of the largest gradient: one that is no larger may be made of rounding errors


@dataclass(frozen=True)
class Outcome:
    """What a call led to.

    Attributes:
        result: of the call.
        gradients: of parameters by name, and of arguments by position; None where none flows.
            Empty if not requested.
    """

    result: Any
    gradients: dict[str, Tensor | None]


def evaluated(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    learning: bool = False,
    gradients: bool = False,
) -> Outcome:
    """Call a model in evaluation mode, and leave it as it was.

    That is its modes, buffers and other attributes, what layers with ``cached=True`` keep of a
    first call, random numbers, and the report.

    Args:
        model: to call.
        args: of the call.
        kwargs: of the call.
        learning: with gradients switched on.
        gradients: compute them too.
    """
    inside = list(model.modules())
    was = [(module, module.training) for module in inside]
    with as_it_was(inside), uncounted():
        try:
            model.eval()
            torch.manual_seed(0)
            with torch.set_grad_enabled(learning):
                result = model(*args, **kwargs)
            return Outcome(result, _gradients(model, args, kwargs, result) if gradients else {})
        finally:
            for module, own in was:
                module.training = own


def _gradients(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> dict[str, Tensor | None]:
    """Gradients of a sum of all results, each element weighted otherwise."""
    given = {**dict(model.named_parameters()), **dict(_tensors((args, kwargs), "argument"))}
    wanted = {name: t for name, t in given.items() if t.requires_grad}
    outs = [t for _, t in _tensors(result, "") if t.requires_grad]
    if not wanted or not outs:
        return dict.fromkeys(wanted)
    seeds = [torch.linspace(0.5, 1.5, t.numel(), device=t.device).to(t.dtype).view(t.shape)
             for t in outs]  # fmt: skip
    with torch.enable_grad():
        found = torch.autograd.grad(outs, list(wanted.values()), seeds, allow_unused=True)
    return {name: None if g is None else g.detach().to_dense() if g.is_sparse else g.detach()
            for name, g in zip(wanted, found, strict=True)}  # fmt: skip


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout == torch.strided:
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{i}]")


def differences(expected: Outcome, found: Outcome) -> str:
    """Return how two calls differ, or nothing."""
    return _differ(expected.result, found.result, "the result") or _first(
        _gradient_differs(name, expected.gradients, found.gradients) for name in expected.gradients
    )


def _gradient_differs(
    name: str, expected: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]
) -> str:
    a, b = expected[name], found.get(name)
    if a is None or b is None:
        have = "no gradient" if b is None else "a gradient"
        return "" if a is b else f"{name} has {have}"
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    return _differ(a, b, f"the gradient of {name}", least=SMALL * largest)


def _differ(expected: Any, found: Any, name: str, *, least: float = 0.0) -> str:
    if isinstance(expected, Tensor):
        return _tensors_differ(expected, found, name, least)
    if isinstance(expected, Mapping):
        keys = [k for k in expected if not isinstance(found, Mapping) or k not in found]
        return f"{name} lacks {keys}" if keys else _first(
            _differ(expected[k], found[k], f"{name}[{k!r}]") for k in expected
        )  # fmt: skip
    if isinstance(expected, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(expected):
            return f"{name} has another length"
        return _first(
            _differ(a, b, f"{name}[{i}]")
            for i, (a, b) in enumerate(zip(expected, found, strict=True))
        )
    if type(expected) is not type(found):
        return f"{name} is a {type(found).__name__} and not a {type(expected).__name__}"
    if isinstance(expected, (str, bool, int, float)):
        return "" if expected == found or expected != expected else f"{name} differs"
    return _differ(vars(expected), vars(found), name) if is_dataclass(expected) else ""


def _tensors_differ(expected: Tensor, found: Any, name: str, least: float) -> str:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return f"{name} has another shape"
    if found.dtype != expected.dtype:
        return f"{name} is of {found.dtype} and not {expected.dtype}"
    if found.requires_grad != expected.requires_grad:
        return f"{name} {'needs' if found.requires_grad else 'lacks'} a gradient"
    if not expected.is_floating_point() or expected.layout != torch.strided:
        if expected.layout != torch.strided:
            expected, found = expected.to_dense(), found.to_dense()
        same = torch.allclose if expected.is_floating_point() else torch.equal
        return "" if same(expected, found) else f"{name} differs"
    if not expected.numel():
        return ""
    a, b = expected.detach().double(), found.detach().double()
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return f"{name} is not finite elsewhere"
    error = float((a - b)[finite].abs().max()) if bool(finite.any()) else 0.0
    most = TOLERANCE.get(expected.dtype, 1e-2) * max(float(a[finite].abs().max()), least, 1e-30)
    return f"{name} differs by {error:.2g}" if error > most else ""


def _first(texts: Any) -> str:
    return next((text for text in texts if text), "")
