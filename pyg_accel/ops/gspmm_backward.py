"""The gradient of gspmm: gspmm with other formulas, on the graph and on its transpose."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from pyg_accel.backends.spec import Shapes
from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Unary,
    children,
    gradient,
    has_sum,
    map_children,
    operands_of,
    parse,
    shape_of,
    summed,
    times,
)
from pyg_accel.graph import CSR
from pyg_accel.graph.facts import cache_of, facts_of
from pyg_accel.ops.arrays import Arrays
from pyg_accel.ops.operator import call
from pyg_accel.ops.steps import Step
from pyg_accel.runtime.machine import is_captured

__all__ = [
    "kinds_of_shapes", "mean_share", "operand_gradients", "plan_gradients", "prod_coefficients",
]  # fmt: skip

_ONE = Const(1.0)


def kinds_of_shapes(shapes: Sequence[tuple[int, int]]) -> Shapes:
    """Return (heads, width) up to sizes above 1, which formulas do not tell apart."""
    return tuple((1 if h == 1 else 2, 1 if f == 1 else 2) for h, f in shapes)


def operand_gradients(
    text: str,
    reduces: tuple[str, ...],
    needs: tuple[bool, ...],
    grads: tuple[bool, ...],
    sizes: dict[int, tuple[int, int]],
    share: Formula = _ONE,
) -> dict[int, Formula]:
    """Return the contribution of each edge to the gradients of operands.

    With the n operands of the call, operand n + 2r is the gradient of reduction r and n + 2r + 1
    its winners (max, min) or its second coefficient (prod).

    Args:
        text: the formula.
        reduces: of its messages.
        needs: which operands need gradients.
        grads: which results have gradients.
        sizes: (heads, width) of the operands; sizes of the new operands are added.
        share: factor of the gradients of means.
    """
    formula = parse(text)
    n = len(needs)
    message_size = shape_of(formula, sizes)
    seed: Formula | None = None
    for r, reduce in enumerate(reduces):
        if not grads[r]:
            continue
        g = Operand("e" if reduce == "none" else "v", n + 2 * r)
        second = Operand("v", n + 2 * r + 1)
        sizes[g.index] = sizes[second.index] = message_size
        part: Formula = g
        if reduce == "mean":
            part = times(g, share)
        elif reduce in ("max", "min"):
            part = Binary("sel", g, second)
        elif reduce == "sqsum":
            part = Binary("mul", g, Binary("mul", Const(2.0), formula))
        elif reduce == "prod":  # the product of the others: see prod_coefficients
            zero = Unary("iszero", formula)
            others = Binary("div", g, Unary("nonzero", formula))
            part = Binary("add", Binary("mul", others, Binary("sub", Const(1.0), zero)),
                          Binary("mul", second, zero))  # fmt: skip
        seed = part if seed is None else Binary("add", seed, part)
    indices = {o.index: None for o in operands_of(formula) if needs[o.index]}
    parts = {} if seed is None else {i: gradient(formula, i, seed, sizes) for i in indices}
    return {i: part for i, part in parts.items() if part is not None}


@lru_cache(maxsize=1024)
def plan_gradients(
    text: str,
    reduces: tuple[str, ...],
    needs: tuple[bool, ...],
    grads: tuple[bool, ...],
    shapes: Shapes,
) -> tuple[Step, ...]:
    """The steps of a backward pass over rows.

    Operands are numbered as in :func:`operand_gradients`, with gradients of means divided by the
    degrees. Further operands are results of earlier steps: sums over the width that occur in the
    gradients of both ends of an edge, one number per edge and head.
    """
    formula, n = parse(text), len(shapes)
    sizes = dict(enumerate(shapes))
    sides = {o.index: o.side for o in operands_of(formula)}
    wanted = operand_gradients(text, reduces, needs, grads, sizes)
    for index, contribution in wanted.items():
        if sizes[index][1] == 1 != shape_of(contribution, sizes)[1]:
            wanted[index] = summed(contribution, sizes)
    heads = shape_of(formula, sizes)[0]
    numbers: dict[int, Formula] = {}
    while number := _of_both_ends(wanted, sides, sizes, heads):
        place = n + 2 * len(reduces) + len(numbers)
        sizes[place], sides[place], numbers[place] = (heads, 1), "e", number
        wanted = {i: _replaced(f, number, Operand("e", place)) for i, f in wanted.items()}
    return tuple(Step(index, sides[index], f) for index, f in (numbers | wanted).items())


def _of_both_ends(
    wanted: dict[int, Formula], sides: dict[int, str], sizes: dict[int, tuple[int, int]], heads: int
) -> Formula | None:
    """The largest common sum over the width in the gradients of sources and of targets."""

    def numbers(side: str) -> set[Formula]:
        parts = {part for i, f in wanted.items() if sides[i] == side for part in _parts(f)}
        return {part for part in parts if has_sum(part) and shape_of(part, sizes) == (heads, 1)}

    return max(numbers("u") & numbers("v"), key=lambda part: len(str(part)), default=None)


def _parts(formula: Formula) -> Iterator[Formula]:
    yield formula
    for child in children(formula):
        yield from _parts(child)


def _replaced(formula: Formula, part: Formula, by: Formula) -> Formula:
    if formula == part:
        return by
    return map_children(formula, lambda child: _replaced(child, part, by))


def mean_share(rowptr: Tensor, turned: CSR, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return the factor of the gradient of a mean, 1 / degree of the target of an edge.

    It replaces an N x F quotient. A number per edge is read faster than one per node, but takes
    longer to compute than a batch on a GPU.

    Args:
        rowptr: of the graph.
        turned: its transpose.
        dtype: of the features.

    Returns:
        [E, 1, 1] in the order of the transpose, or [num_rows, 1, 1]; and the formula of the
        gradient.
    """
    by_edge, by_node = "mul(u0,e1)", "mul(u0,u1)"
    if type(turned.col) is not Tensor:  # tensors of a compiler have symbolic sizes
        return _share(rowptr, dtype).index_select(0, turned.col).view(-1, 1, 1), by_edge
    cache, key = cache_of(turned), ("mean", dtype)
    weight: Tensor | None = cache.get(key)
    if weight is not None:
        return weight, by_edge
    capturing = is_captured(turned.col)
    if turned.col.is_cuda and (capturing or not facts_of(turned).stays):
        return _share(rowptr, dtype).view(-1, 1, 1), by_node
    weight = _share(rowptr, dtype).index_select(0, turned.col).view(-1, 1, 1)
    cache[key] = weight
    return weight, by_edge


def _share(rowptr: Tensor, dtype: torch.dtype) -> Tensor:
    wide = dtype if dtype.itemsize >= 4 else torch.float32  # half cannot count a hub's edges
    return rowptr.diff().clamp_(min=1).to(wide).reciprocal_().to(dtype)


def prod_coefficients(arrays: Arrays, text: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the coefficients of the gradient of a product, for rows without zero and with one.

    Args:
        arrays: of the graph.
        text: the formula.
        tensors: operands, followed by the gradient of the product.
    """
    *operands, grad = tensors
    (product,) = call("gspmm", *arrays, operands, f"nonzero({text})", ["prod"], False)
    (zeros,) = call("gspmm", *arrays, operands, f"iszero({text})", ["sum"], False)
    scaled = grad * product
    return [scaled * (zeros == 0), scaled * (zeros == 1)]
