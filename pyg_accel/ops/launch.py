"""Running gspmm on the backend that was chosen for calls of one kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.dispatch import decide, note_choice, situation
from pyg_accel.facts import Kind
from pyg_accel.formula import parse
from pyg_accel.graph import CSR
from pyg_accel.ops.steps import shapes_of, widest
from pyg_accel.sharing import kind_of

__all__ = ["run_gspmm"]

_MOST = 4096
# By everything that the choice depends on: a backend's name, and what runs calls of this kind.
_bound: dict[tuple[Any, ...], tuple[str, Callable[[CSR, list[Tensor]], list[Tensor]]]] = {}


def run_gspmm(
    csr: CSR, text: str, reduces: tuple[str, ...], operands: list[Tensor], *, want_arg: bool
) -> list[Tensor]:
    """Run :meth:`pyg_accel.backends.Backend.gspmm` on the cheapest backend.

    Args:
        csr: the graph.
        text: formula of the message.
        reduces: of the messages.
        operands: [rows, H | 1, F | 1], contiguous within a row.
        want_arg: also return winners.
    """
    kind = kind_of(csr)
    rounded = csr.col.is_cuda and torch.get_float32_matmul_precision() != "highest"
    key = (
        text, reduces, kind, csr.eid is None, want_arg, rounded, situation(),
        *[(t.dtype, t.stride(0), t.size(1), t.size(2)) for t in operands],
    )  # fmt: skip
    bound = _bound.get(key)
    if bound is None:
        bound = _bind(csr, kind, text, reduces, operands, want_arg, rounded)
        if len(_bound) >= _MOST:
            _bound.clear()
        _bound[key] = bound
    name, run = bound
    note_choice(name)
    return run(csr, operands)


def _bind(
    csr: CSR,
    kind: Kind,
    text: str,
    reduces: tuple[str, ...],
    operands: list[Tensor],
    want_arg: bool,
    rounded: bool,
) -> tuple[str, Callable[[CSR, list[Tensor]], list[Tensor]]]:
    like, shapes = next(t for t in operands if t.is_floating_point()), shapes_of(operands)
    heads, width = widest(shapes)
    spec = OpSpec.on("gspmm", csr, like, heads, width, formula=text, reduces=reduces,
                     shapes=shapes, sharing=kind.sharing, rounded=rounded)  # fmt: skip
    backend = decide(spec).backend
    run = backend.bind_gspmm(csr, parse(text), operands, list(reduces), want_arg=want_arg)
    return backend.name, run
