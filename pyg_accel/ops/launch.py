"""The choice of the kernel of gspmm, and its launch on a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import decide, dispatch_key
from pyg_accel.backends.notes import note_choice
from pyg_accel.backends.spec import shapes_of, widest
from pyg_accel.formula import parse
from pyg_accel.graph import CSR
from pyg_accel.graph.column_reuse import kind_of
from pyg_accel.runtime.cache import Bounded

__all__ = ["bind_gspmm", "kernel_key", "run_gspmm"]

_bound: Bounded[tuple[Any, ...], tuple[str, Callable[[CSR], Launch]]] = Bounded(4096)


def kernel_key(csr: CSR) -> tuple[Any, ...]:
    """Return the key of kernels, apart from the kinds of graph and operands."""
    rounded = csr.col.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return csr.eid is None, rounded, *dispatch_key()


def bind_gspmm(
    csr: CSR,
    texts: Sequence[str],
    reduces: Sequence[str],
    operands: Sequence[Tensor],
    *,
    want_arg: bool = False,
) -> tuple[str, Callable[[CSR], Launch]]:
    """Return the cheapest backend, and a function that launches it on graphs of one kind.

    Args:
        csr: a graph of that kind.
        texts: the formula of the message, or several of one reduction each.
        reduces: of the messages.
        operands: [rows, H | 1, F | 1], contiguous within a row; later ones have the same strides.
        want_arg: also return winners.
    """
    kind, other = kind_of(csr), kernel_key(csr)
    facts = [(t.dtype, t.size(1), t.size(2), t.stride(0)) for t in operands]
    key = (*texts, *reduces, want_arg, kind, *other, *facts)
    entry = _bound.get(key)
    if entry is None:
        shapes, formulas, each = shapes_of(operands), [*map(parse, texts)], list(reduces)
        like, formula = next(t for t in operands if t.is_floating_point()), formulas[0]
        one, several = (texts[0], ()) if len(texts) == 1 else ("", tuple(texts))
        spec = OpSpec.on("gspmm_several" if several else "gspmm", csr, like, *widest(shapes),
                         formula=one, formulas=several, reduces=tuple(reduces), shapes=shapes,
                         sharing=kind.sharing, rounded=other[1])  # fmt: skip
        decision = decide(spec)
        if several:
            bound = decision.kernel.bound(csr, (formulas, each), [*operands])
        else:
            bound = decision.kernel.bound(csr, (formula,), [*operands], each, want_arg=want_arg)
        entry = _bound[key] = decision.backend.name, bound
    return entry


def run_gspmm(
    csr: CSR,
    texts: Sequence[str],
    reduces: Sequence[str],
    operands: list[Tensor],
    *,
    want_arg: bool = False,
) -> list[Tensor]:
    """Compute the results of :func:`bind_gspmm`."""
    name, bound = bind_gspmm(csr, texts, reduces, operands, want_arg=want_arg)
    note_choice(name)
    return bound(csr)(operands)
