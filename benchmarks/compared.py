"""Cases that must agree, one after the other: what is timed has been held against the first."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Case = tuple[dict[str, Any], Callable[[], tuple[Tensor, dict[str, Any]]]]


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
        error = float((out - truth).abs().max() / truth.abs().max())
        if not error <= allowed:
            named = ", ".join(str(fact) for fact in facts.values())
            raise SystemExit(f"{what} ({named}): outputs differ by {error:.3g}")
        del out
        torch.cuda.empty_cache()
        yield {**facts, **figures, "error": error}
