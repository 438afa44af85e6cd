"""Products over the entries that are in no tile: by whichever backend is best on CUDA cores."""

import torch
from torch import Tensor

from pyg_accel.backends.dispatch import choose, is_fast, use_backend
from pyg_accel.backends.spec import OpSpec
from pyg_accel.formula import parse
from pyg_accel.graph import CSR

__all__ = ["can_share", "dot", "sum"]


def can_share(dtype: torch.dtype) -> bool:
    """Return whether another backend is fast enough to have a part of the entries."""
    facts = {"formula": "u0", "reduces": ("sum",), "shapes": ((1, 1),)}
    with use_backend("auto"):
        return is_fast(OpSpec.of_any_size("gspmm", "cuda", dtype, 1, 1, **facts))


def sum(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    """Sum x [num_cols, F] over the rows, weighted by [E] in the order of entries: [num_rows, F]."""
    operands = [x.unsqueeze(1)]
    if weight is not None:
        operands.append(weight.view(-1, 1, 1))
    text = "u0" if weight is None else "mul(u0,e1)"
    return _gspmm(csr, text, "sum", operands).squeeze(1)


def dot(csr: CSR, target: Tensor, source: Tensor) -> Tensor:
    """Dots of target [num_rows, F] and source [num_cols, F], [E] in the order of entries."""
    operands = [target.unsqueeze(1), source.unsqueeze(1)]
    return _gspmm(csr, "sum(mul(v0,u1))", "none", operands).flatten()


def _gspmm(csr: CSR, text: str, reduce: str, operands: list[Tensor]) -> Tensor:
    like = operands[0]
    shapes = tuple((t.size(1), t.size(2)) for t in operands)
    spec = OpSpec.on("gspmm", csr, like, 1, like.size(2), formula=text, reduces=(reduce,),
                     shapes=shapes)  # fmt: skip
    with use_backend("auto"):  # of a graph that shares nothing: never the one that asks
        backend = choose(spec).backend
    (out,) = backend.gspmm(csr, parse(text), operands, [reduce], want_arg=False)
    return out
