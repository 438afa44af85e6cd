"""The steps of a backward pass: formulas on a graph or its transpose, several in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.backends.dispatch import is_fast
from pyg_accel.backends.spec import Shapes, shapes_of
from pyg_accel.formula import (
    Formula,
    Operand,
    map_operands,
    parse,
    selects,
    shape_of,
    swap_sides,
)
from pyg_accel.graph import CSR
from pyg_accel.ops.arrays import CSR_ARRAYS, Arrays
from pyg_accel.ops.layout import contiguous_rows
from pyg_accel.ops.operator import call, define

__all__ = ["Step", "fit", "renumber", "run_steps", "widest"]


@dataclass(frozen=True)
class Step:
    """How the gradient of one operand is computed.

    Attributes:
        operand: its index.
        side: where it is read.
        formula: over the operands of the backward pass; of a source operand, as the transposed
            graph sees it.
        used: the operands that the formula uses, in its own numbering.
    """

    operand: int
    side: str
    formula: Formula
    used: tuple[int, ...]


def renumber(used: tuple[int, ...], operand: Operand) -> Formula:
    """Return an operand by its place among those that are used."""
    return Operand(operand.side, used.index(operand.index))


@lru_cache(maxsize=1024)
def widest(shapes: Shapes) -> tuple[int, int]:
    """Return the largest (heads, width) of operands, at least 1."""
    return max(1, *(h for h, _ in shapes)), max(1, *(f for _, f in shapes))


def fit(grad: Tensor, shape: tuple[int, int]) -> Tensor:
    """Sum or repeat a gradient [rows, H, F] to the shape of its operand."""
    for dim, size in ((1, shape[0]), (2, shape[1])):
        if grad.size(dim) != size:
            if size == 1:
                grad = grad.sum(dim, keepdim=True)
            else:
                grad = grad.expand(*(size if d == dim else -1 for d in range(3)))
    return grad


def run_steps(
    steps: Sequence[Step], tensors: Mapping[int, Tensor], arrays: Arrays
) -> dict[int, Tensor]:
    """Compute gradients by operand.

    What gathers along the same graph runs together, where a backend can: the gradient of an edge's
    weight reads the rows that those of the source features read.

    Args:
        steps: one an operand.
        tensors: operands of the backward pass, by the index that ``used`` has.
        arrays: of the graph and of its transpose.

    Raises:
        RuntimeError: if the transposed graph is missing and asked for.
    """
    found: dict[int, Tensor] = {}
    alone = list(steps)
    if len(steps) > 1 and not torch.is_grad_enabled():  # together they have no derivative
        for group in _groups(steps, tensors):
            transposed = any(step.side == "u" for step in group)
            csr = arrays.transposed if transposed else arrays.csr
            formulas, used = _together(tuple(group), transposed)
            given = [contiguous_rows(tensors[i]) for i in used]
            reduces = ["none" if step.side == "e" else "sum" for step in group]
            outs = call("gspmm_several", *csr, given, list(formulas), reduces)
            found |= {step.operand: out for step, out in zip(group, outs, strict=True)}
            alone = [step for step in alone if step not in group]
    for step in alone:
        (found[step.operand],) = call(
            "gspmm",
            *(arrays.turned() if step.side == "u" else arrays),
            [contiguous_rows(tensors[i]) for i in step.used],
            str(step.formula),
            ["none" if step.side == "e" else "sum"],
            False,
        )
    return found


def _groups(steps: Sequence[Step], tensors: Mapping[int, Tensor]) -> list[list[Step]]:
    """Steps of the same graph, those of narrow edge operands among them, two or more."""
    extents = {step.operand: widest(_known_shapes(step.used, tensors)) for step in steps}
    common = max(extents.values(), default=None)
    if common is None:
        return []
    able = [step for step in steps if extents[step.operand] == common and _fits(step, tensors)]
    by_side = {side: [step for step in able if step.side == side] for side in ("u", "v", "e")}
    leader = "u" if by_side["u"] else "v"
    by_side[leader] = by_side[leader] + by_side.pop("e")
    groups = [group for group in by_side.values() if len(group) > 1 and group[0].side != "e"]
    return [group for group in groups if _runs(group, tensors)]


def _runs(group: list[Step], tensors: Mapping[int, Tensor]) -> bool:
    """Whether a backend runs the steps of a group together."""
    formulas, used = _together(tuple(group), any(step.side == "u" for step in group))
    like, shapes = tensors[used[0]], _known_shapes(used, tensors)
    reduces = tuple("none" if step.side == "e" else "sum" for step in group)
    facts = {"formulas": formulas, "reduces": reduces, "shapes": shapes}
    device, (heads, width) = like.device.type, widest(shapes)
    return is_fast(OpSpec.of_any_size("gspmm_several", device, like.dtype, heads, width, **facts))


def _known_shapes(used: tuple[int, ...], tensors: Mapping[int, Tensor]) -> Shapes:
    """(heads, width) of the operands that are used: numbers, where a compiler has symbols."""
    return tuple((int(h), int(f)) for h, f in shapes_of([tensors[i] for i in used]))


def _fits(step: Step, tensors: Mapping[int, Tensor]) -> bool:
    """Whether a step may run together with others: it gathers rows."""
    given = [tensors[i] for i in step.used]
    if any(not t.is_floating_point() for t in given) or selects(step.formula):
        return False
    shapes = _known_shapes(step.used, tensors)
    if widest(shapes)[1] == 1 or min(min(shape) for shape in shapes) == 0:
        return False
    return step.side != "e" or shape_of(step.formula, dict(enumerate(shapes)))[1] == 1


@lru_cache(maxsize=1024)
def _together(group: tuple[Step, ...], transposed: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The formulas of steps over the operands that they use together."""
    used = tuple(dict.fromkeys(i for step in group for i in step.used))
    formulas = []
    for step in group:
        places = {own: used.index(i) for own, i in enumerate(step.used)}
        formula = step.formula
        if transposed and step.side == "e":
            formula = swap_sides(formula)
        formulas.append(str(_placed(formula, places)))
    return tuple(formulas), used


def _placed(formula: Formula, places: dict[int, int]) -> Formula:
    return map_operands(formula, lambda o: Operand(o.side, places[o.index]))


def _several(*args: Any) -> list[Tensor]:
    csr, (operands, formulas, reduces) = CSR(*args[:5]), args[5:]
    shapes = shapes_of(operands)
    heads, width = widest(shapes)
    spec = OpSpec.on("gspmm_several", csr, operands[0], heads, width, formulas=tuple(formulas),
                     reduces=tuple(reduces), shapes=shapes)  # fmt: skip
    run = choose(spec).kernel.run
    outs: list[Tensor] = run(csr, [parse(text) for text in formulas], reduces, operands)
    return outs


def _several_fake(*args: Any) -> list[Tensor]:
    csr, (operands, formulas, reduces) = CSR(*args[:5]), args[5:]
    sizes = dict(enumerate(shapes_of(operands)))
    heads = max(h for h, _ in sizes.values())
    like, rows, edges = operands[0], csr.num_rows, csr.col.size(0)
    return [
        like.new_empty(rows if reduce == "sum" else edges, heads, shape_of(parse(text), sizes)[1])
        for text, reduce in zip(formulas, reduces, strict=True)
    ]


define(
    f"gspmm_several({CSR_ARRAYS}, Tensor[] operands, str[] formulas, str[] reduces) -> Tensor[]",
    _several,
    _several_fake,
)
