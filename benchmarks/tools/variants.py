"""What is compared: PyG as it is, `patch()`, models in training; and outputs that have to agree."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy

import pyg_accel
from pyg_accel.patching import overrides

Case = tuple[dict[str, Any], Callable[[], tuple[Tensor, dict[str, Any]]]]


@contextmanager
def stock_pyg() -> Iterator[None]:
    """PyG as it is, with nothing of patch() in the way, which goes on knowing its graphs."""
    ours = [(function, function.__code__, overrides._replaced[function].original.__code__)
            for function in overrides._handed_over]  # fmt: skip
    for function, _, stock in ours:
        function.__code__ = stock
    layer = vars(overrides.MessagePassing).get("_call_impl")
    if layer is not None:
        del overrides.MessagePassing._call_impl
    try:
        yield
    finally:
        for function, code, _ in ours:
            function.__code__ = code
        if layer is not None:
            overrides.MessagePassing._call_impl = layer


def patched(on: bool) -> AbstractContextManager[Any]:
    """`patch()` or nothing."""
    return pyg_accel.patched() if on else nullcontext()


def report() -> list[Any]:
    """The rows of the report so far, unprinted."""
    with open(os.devnull, "w") as nowhere:
        return pyg_accel.report(nowhere).rows


def decided() -> dict[str, str]:
    """Formula, backend and reason of the calls so far, as columns of a row."""
    rows = report()
    return {name: by.join(dict.fromkeys(getattr(r, name) for r in rows if getattr(r, name)))
            for name, by in (("formula", "; "), ("backend", "+"), ("reason", "; "))}  # fmt: skip


def epoch_of(
    model: Module, args: tuple[Any, ...], y: Tensor, mask: Tensor | None = None, **adam: Any
) -> Callable[[], Tensor]:
    """A step on a whole graph: forward, backward and Adam; returns the loss.

    Args:
        model: to train.
        args: of its call.
        y: classes [N].
        mask: of the nodes that are trained on, [N] or indices; None for all.
        adam: options of the optimizer.
    """
    optimizer = torch.optim.Adam(model.parameters(), **adam)
    chosen = y if mask is None else y[mask]

    def epoch() -> Tensor:
        optimizer.zero_grad()
        out = model(*args)
        loss = cross_entropy(out if mask is None else out[mask], chosen)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return epoch


def relative_error(ours: Tensor, right: Tensor) -> float:
    """The largest difference as a part of the largest element; infinite for no number."""
    if ours.shape != right.shape:
        return float("inf")
    error = float((ours.double() - right.double()).abs().max() / right.abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")


def must_agree(ours: Iterable[Tensor], right: Iterable[Tensor], allowed: float, what: str) -> float:
    """The largest relative error of several results; ends the run if it is more than allowed."""
    error = max(relative_error(a, b) for a, b in zip(ours, right, strict=True))
    if not error <= allowed:
        raise SystemExit(f"{what}: results differ by {error:.3g} of the largest element")
    return error


def compared(cases: Iterable[Case], what: str, allowed: float) -> Iterator[dict[str, Any]]:
    """A row a case; the output of the first that ran is the truth of the others.

    Args:
        cases: facts of each, and what computes its output and figures.
        what: is compared, for the message.
        allowed: of the largest output.
    """
    truth = None
    for facts, run in cases:
        failure = ""
        try:
            out, figures = run()
        except torch.OutOfMemoryError:
            failure = "out of memory"
        except RuntimeError as error:  # torch's compiler launches what no GPU can, on 100M edges
            if "compiled" not in facts.get("backend", "") or "CUDA driver error" not in str(error):
                raise
            failure = str(error).partition("\n")[0]
        if failure:  # the error is gone; what its frames held must be too, or the next peak has it
            gc.collect()
            torch.cuda.empty_cache()
            yield {**facts, "epoch_ms": float("nan"), "note": failure}
            continue
        truth = out if truth is None else truth
        named = ", ".join(str(fact) for fact in facts.values())
        error = must_agree([out], [truth], allowed, f"{what} ({named})")
        del out
        torch.cuda.empty_cache()
        yield {**facts, **figures, "error": error}
