"""The steps of a backward pass: formulas on a graph or its transpose, several in one pass."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec
from pyg_accel.backends.base import Launch
from pyg_accel.backends.dispatch import is_fast
from pyg_accel.backends.spec import Shapes, shapes_of, widest
from pyg_accel.formula import (
    Formula,
    operands_of,
    parse,
    renumbered,
    selects,
    shape_of,
    swap_sides,
)
from pyg_accel.graph import CSR
from pyg_accel.ops.arrays import CSR_ARRAYS, Arrays
from pyg_accel.ops.launch import bind_gspmm, run_gspmm
from pyg_accel.ops.operator import call, define
from pyg_accel.ops.winners import scatter_launch

__all__ = ["SCATTER", "Pass", "Step", "fit", "flat", "passes_of"]

SCATTER = "scatter"  # in place of a formula: scatter gradients to the winners of a maximum


class Step(NamedTuple):
    """The gradient of one operand.

    Attributes:
        operand: its index; or the index of an intermediate number per edge.
        side: of the operand.
        formula: the contribution of each edge.
    """

    operand: int
    side: str
    formula: Formula


def fit(grad: Tensor, shape: tuple[int, int]) -> Tensor:
    """Sum or repeat a gradient [rows, H, F] to the shape of its operand."""
    for dim, size in ((1, shape[0]), (2, shape[1])):
        if grad.size(dim) != size:
            if size == 1:
                grad = grad.sum(dim, keepdim=True)
            else:
                grad = grad.expand(*(size if d == dim else -1 for d in range(3)))
    return grad


def flat(t: Tensor) -> Tensor:
    """Return rows of one dimension, as scatters take them."""
    return t.flatten(1).contiguous()


class Pass(NamedTuple):
    """Steps that run together on one graph.

    Attributes:
        operands: indices of the operands of the gradients.
        source: whether it runs on the transposed graph.
        numbered: whether entries need the numbers of their edges.
        formulas: of each step, over the operands in ``used``; or :data:`SCATTER`.
        reduces: of each step.
        used: indices of the operands that the formulas read.
    """

    operands: tuple[int, ...]
    source: bool
    numbered: bool
    formulas: tuple[str, ...]
    reduces: tuple[str, ...]
    used: tuple[int, ...]

    def sizes(self, tensors: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """Return (heads, width) of each gradient."""
        shapes = shapes_of([tensors[i] for i in self.used])
        if self.formulas == (SCATTER,):
            return [shapes[0]]
        sizes = [shape_of(parse(text), dict(enumerate(shapes))) for text in self.formulas]
        return sizes if len(sizes) == 1 else [(widest(shapes)[0], width) for _, width in sizes]

    def run(self, arrays: Arrays, tensors: list[Tensor]) -> list[Tensor]:
        """Compute the gradients by operators."""
        if self.formulas == (SCATTER,):
            out = call("scatter_arg", *map(flat, tensors), arrays.num_cols)
            return [out.view(arrays.num_cols, *tensors[0].shape[1:])]
        if len(self.formulas) > 1:
            csr = arrays.transposed if self.source else arrays.csr
            texts = list(self.formulas), list(self.reduces)
            outs: list[Tensor] = call("gspmm_several", *csr[:5], tensors, *texts)
            return outs
        arrays = arrays.turned() if self.source else arrays
        if not (self.numbered or torch.is_grad_enabled()):  # gradients may be of edges
            arrays = arrays._replace(eid=None, eid_t=None)
        outs = call("gspmm", *arrays, tensors, self.formulas[0], list(self.reduces), False)
        return outs

    def by_operators(self, arrays: Arrays) -> Callable[[CSR], Launch]:
        """Return a function that launches operators, as :meth:`bind` does for kernels."""
        return lambda _: Launch(partial(self.run, arrays), listed=True)

    def bind(self, csr: CSR, tensors: list[Tensor]) -> tuple[str, Callable[[CSR], Launch]]:
        """Return the backend, and a function that launches its kernel on graphs of one kind.

        Args:
            csr: a graph of that kind.
            tensors: example operands.
        """
        if self.formulas == (SCATTER,):
            name, launch = scatter_launch(tensors[0].flatten(1), csr.num_rows)
            return name, lambda _: launch  # for the same number of rows
        if self.numbered:
            return bind_gspmm(csr, self.formulas, self.reduces, tensors)
        csr = csr._replace(eid=None)
        name, bound = bind_gspmm(csr, self.formulas, self.reduces, tensors)
        return name, lambda csr: bound(csr._replace(eid=None))


def passes_of(steps: Sequence[Step], tensors: Mapping[int, Tensor]) -> list[Pass]:
    """Return the passes of steps.

    Steps that gather along the same graph run together where a backend can: the gradient of the
    weights reads the same rows as the gradient of the features. This has no double backward.
    """
    first = [
        step for step in steps if tensors.keys() >= {o.index for o in operands_of(step.formula)}
    ]
    groups = [] if len(first) < 2 or torch.is_grad_enabled() else _groups(first, tensors)
    groups += [[step] for step in steps if all(step not in group for group in groups)]
    return [_together(*group) for group in groups]


@lru_cache(maxsize=1024)
def _together(*group: Step) -> Pass:
    """Return the pass of steps on one graph, over the union of their operands."""
    source = any(step.side == "u" for step in group)
    formulas = [swap_sides(step.formula) if source else step.formula for step in group]
    formulas, used = renumbered(*formulas)
    reduces = tuple("none" if step.side == "e" else "sum" for step in group)
    numbered = "none" in reduces or any(map(_reads_edges, formulas))
    operands = tuple(step.operand for step in group)
    return Pass(operands, source, numbered, tuple(map(str, formulas)), reduces, used)


def _reads_edges(formula: Formula) -> bool:
    return selects(formula) or any(o.side == "e" for o in operands_of(formula))


def _groups(steps: Sequence[Step], tensors: Mapping[int, Tensor]) -> list[list[Step]]:
    """Groups of two or more steps on the same graph, with the steps of narrow edge operands."""
    extents = [widest(_shapes_in(_together(step), tensors)) for step in steps]
    able = [step for step, extent in zip(steps, extents, strict=True)
            if extent == max(extents) and _gathers(step, tensors)]  # fmt: skip
    by_side = {side: [step for step in able if step.side == side] for side in ("u", "v", "e")}
    leader = "u" if by_side["u"] else "v"
    by_side[leader] = by_side[leader] + by_side.pop("e")
    groups = [group for group in by_side.values() if len(group) > 1 and group[0].side != "e"]
    return [group for group in groups if _runs(_together(*group), tensors)]


def _runs(part: Pass, tensors: Mapping[int, Tensor]) -> bool:
    """Whether a backend runs several formulas in one pass."""
    like, shapes = tensors[part.used[0]], _shapes_in(part, tensors)
    facts = {"formulas": part.formulas, "reduces": part.reduces, "shapes": shapes}
    device, (heads, width) = like.device.type, widest(shapes)
    return is_fast(OpSpec.of_any_size("gspmm_several", device, like.dtype, heads, width, **facts))


def _shapes_in(part: Pass, tensors: Mapping[int, Tensor]) -> Shapes:
    """(heads, width) of the inputs of a pass, as numbers instead of symbols."""
    return tuple((int(h), int(f)) for h, f in shapes_of([tensors[i] for i in part.used]))


def _gathers(step: Step, tensors: Mapping[int, Tensor]) -> bool:
    """Whether a step gathers rows, so that it may run together with others."""
    part = _together(step)
    shapes, formula = _shapes_in(part, tensors), parse(part.formulas[0])
    if selects(formula) or not all(tensors[i].is_floating_point() for i in part.used):
        return False
    if widest(shapes)[1] == 1 or min(min(shape) for shape in shapes) == 0:
        return False
    return step.side != "e" or shape_of(formula, dict(enumerate(shapes)))[1] == 1


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
    lambda *args: run_gspmm(CSR(*args[:5]), args[6], args[7], args[5]),
    _several_fake,
)
