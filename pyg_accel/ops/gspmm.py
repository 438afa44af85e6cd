"""Message formula plus reduction: the operator that every aggregation comes down to.

``pyg_accel::gspmm`` takes plain tensors, so that torch.compile, autograd and other transforms see
an ordinary operator; :func:`gspmm` is its friendly face. Its gradient is itself with another
formula: for a source operand on the transposed graph, for a target operand on the same graph, for
an edge operand without a reduction. So it can be differentiated any number of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pyg_accel.backends import OpSpec, choose
from pyg_accel.formula import (
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    Unary,
    gradient,
    map_operands,
    operands_of,
    parse,
    shape_of,
    swap_sides,
)
from pyg_accel.graph import CSR, Graph
from pyg_accel.ops.layout import find_layout

__all__ = ["REDUCES", "gspmm"]

REDUCES = ("sum", "mean", "max", "min", "prod", "sqsum", "none")

_library = torch.library.Library("pyg_accel", "FRAGMENT")
_library.define(
    "gspmm(Tensor rowptr, Tensor col, Tensor? eid, Tensor? rowptr_t, Tensor? col_t, Tensor? eid_t, "
    "SymInt num_cols, bool sorted, Tensor[] operands, str formula, str[] reduces, bool want_arg) "
    "-> Tensor[]"
)
_library.define("scatter_arg(Tensor grad, Tensor arg, SymInt num_rows) -> Tensor")
_library.define("gather_arg(Tensor x, Tensor arg) -> Tensor")


def gspmm(
    graph: Graph,
    formula: Formula | str,
    operands: Sequence[Tensor],
    *,
    reduce: str | Sequence[str] = "sum",
    edge_order: bool = False,
) -> Any:
    """Compute the message of every edge and reduce the messages of every target node.

    Binary-reduce of the DGL paper on x86 (section 2.1), for any elementwise formula. No E x F
    tensor is made unless ``reduce="none"`` asks for it.

    Args:
        graph: the graph.
        formula: the message, e.g. ``"relu(add(u0,e1))"``: operand 0 at the source node, operand 1
            at the edge. See :mod:`pyg_accel.formula`.
        operands: by operand index: [num_cols, ...] for ``u``, [num_rows, ...] for ``v``, [E, ...]
            for ``e``. What trails the rows broadcasts, aligned on the right.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"``, ``"sqsum"`` (sum of
            squares), or ``"none"`` for the messages themselves; or several of them, computed in
            one pass.
        edge_order: edge operands, and messages for ``"none"``, are in the order of the edge list
            that the graph was built from; by default in that of the CSR.

    Returns:
        [num_rows, ...] ([E, ...] for ``"none"``), or a list of them for a list of reductions.
        Targets without edges get 0 (1 for ``"prod"``). Of several equal maxima the first entry of
        the row, that of the lowest source id, receives the gradient.

    Raises:
        ValueError: for operands that do not fit the graph or one another, or unknown reductions.
        BackendNotSupported: if no backend can run it.
    """
    formula = parse(formula) if isinstance(formula, str) else formula
    reduces = [reduce] if isinstance(reduce, str) else list(reduce)
    operands = list(operands)
    _check(graph, formula, operands, reduces)
    features = [t for t in operands if t.is_floating_point()]
    dtype = features[0].dtype
    for t in features[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    operands = [t.to(dtype) if t.is_floating_point() else t for t in operands]

    summed = isinstance(formula, Sum)
    layout = find_layout(tuple(tuple(t.shape[1:]) for t in operands), keep_last=summed)
    folded = [layout.fold(t) for t in operands]
    outs = launch(graph, formula, folded, reduces, edge_order=edge_order)
    results = [layout.unfold_summed(t) if summed else layout.unfold(t) for t in outs]
    return results[0] if isinstance(reduce, str) else results


def launch(
    graph: Graph,
    formula: Formula,
    operands: list[Tensor],
    reduces: list[str],
    *,
    edge_order: bool,
) -> list[Tensor]:
    """Call the operator with folded operands, and the transpose if it will be needed."""
    needs = [torch.is_grad_enabled() and t.requires_grad for t in operands]
    csr = graph.csr(edge_order=edge_order)
    transposed: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[o.index] for o in operands_of(formula) if o.side == "u"):
        transposed = graph.transposed(edge_order=edge_order)[:3]
    want_arg = any(needs) and bool({"max", "min"} & set(reduces))
    # Where nobody listens (no gradient, no compiler, no mode, no subclass), the operator is called
    # without torch's dispatcher: on small graphs that would take longer than the kernel.
    direct = not any(needs) and _nobody_listens(operands)
    run: Callable[..., list[Tensor]] = _gspmm if direct else torch.ops.pyg_accel.gspmm
    outs = run(
        *csr[:3], *transposed, csr.num_cols, csr.sorted, operands, str(formula), reduces, want_arg
    )
    return outs[: len(reduces)]


def _nobody_listens(operands: list[Tensor]) -> bool:
    return (
        not torch.compiler.is_compiling()
        and all(type(t) is Tensor or type(t) is torch.nn.Parameter for t in operands)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch._C._autograd._profiler_enabled()
    )


def _check(graph: Graph, formula: Formula, operands: list[Tensor], reduces: list[str]) -> None:
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
    found = {o.index for o in operands_of(formula)}
    if found != set(range(len(operands))):
        raise ValueError(f"expected {formula} to use operands 0 to {len(operands) - 1}")
    for o in operands_of(formula):
        t = operands[o.index]
        if not isinstance(t, Tensor):
            raise ValueError(f"expected operand {o} to be a tensor (got {type(t).__name__})")
        if t.dim() == 0 or t.size(0) != rows[o.side]:
            raise ValueError(
                f"expected operand {o} to have {rows[o.side]} rows (got shape {list(t.shape)})"
            )
        if t.device != graph.device:
            raise ValueError(f"expected operand {o} on {graph.device} (got {t.device})")
    if not any(t.is_floating_point() for t in operands):
        raise ValueError("expected floating-point features")
    if not reduces or not set(reduces) <= set(REDUCES):
        raise ValueError(f"expected reductions of {', '.join(REDUCES)} (got {reduces})")


def _shapes(operands: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((t.size(1), t.size(2)) for t in operands)


def _gspmm(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    rowptr_t: Tensor | None,
    col_t: Tensor | None,
    eid_t: Tensor | None,
    num_cols: int,
    sorted: bool,
    operands: list[Tensor],
    formula: str,
    reduces: list[str],
    want_arg: bool,
) -> list[Tensor]:
    csr = CSR(rowptr, col, eid, num_cols, sorted)
    message = parse(formula)
    heads, width = 1, 1
    for h, f in _shapes(operands):
        heads, width = max(heads, h), max(width, f)
    dtype = next(t.dtype for t in operands if t.is_floating_point())
    spec = OpSpec("gspmm", rowptr.device.type, dtype, rowptr.dtype, csr.num_rows, num_cols,
                  col.numel(), heads, width, formula, tuple(reduces))  # fmt: skip
    backend = choose(spec).backend
    return backend.gspmm(csr, message, operands, reduces, want_arg=want_arg)


def _gspmm_fake(
    rowptr: Tensor,
    col: Tensor,
    eid: Tensor | None,
    rowptr_t: Tensor | None,
    col_t: Tensor | None,
    eid_t: Tensor | None,
    num_cols: int,
    sorted: bool,
    operands: list[Tensor],
    formula: str,
    reduces: list[str],
    want_arg: bool,
) -> list[Tensor]:
    heads, width = shape_of(parse(formula), dict(enumerate(_shapes(operands))))
    like = next(t for t in operands if t.is_floating_point())
    rows, edges = rowptr.size(0) - 1, col.size(0)
    outs = [like.new_empty(edges if reduce == "none" else rows, heads, width) for reduce in reduces]
    if want_arg:
        outs += [rowptr.new_empty(rows, heads, width) for r in reduces if r in ("max", "min")]
    return outs


@dataclass(frozen=True)
class _Step:
    """How the gradient of one operand is computed.

    Attributes:
        operand: its index.
        side: where it is read.
        formula: over the operands of the call and, after them, a gradient and winners a reduction.
        used: the operands that the formula uses, in its own numbering.
    """

    operand: int
    side: str
    formula: Formula
    used: tuple[int, ...]


@lru_cache(maxsize=1024)
def _plan(
    text: str,
    reduces: tuple[str, ...],
    needs: tuple[bool, ...],
    grads: tuple[bool, ...],
    shapes: tuple[tuple[int, int], ...],
) -> tuple[_Step, ...]:
    """The steps of a backward pass.

    With the n operands of the call, operand n + 2r is the gradient of reduction r (scaled for a
    mean) and n + 2r + 1 its winners (max, min) or its second coefficient (prod).
    """
    formula = parse(text)
    n = len(shapes)
    sizes = dict(enumerate(shapes))
    message_size = shape_of(formula, sizes)
    seed: Formula | None = None
    for r, reduce in enumerate(reduces):
        if not grads[r]:
            continue
        g = Operand("e" if reduce == "none" else "v", n + 2 * r)
        second = Operand("v", n + 2 * r + 1)
        sizes[g.index] = sizes[second.index] = message_size
        part: Formula = g
        if reduce in ("max", "min"):
            part = Binary("sel", g, second)
        elif reduce == "sqsum":
            part = Binary("mul", g, Binary("mul", Const(2.0), formula))
        elif reduce == "prod":  # the product of the others: see _prod_coefficients
            zero = Unary("iszero", formula)
            others = Binary("div", g, Unary("nonzero", formula))
            part = Binary("add", Binary("mul", others, Binary("sub", Const(1.0), zero)),
                          Binary("mul", second, zero))  # fmt: skip
        seed = part if seed is None else Binary("add", seed, part)
    steps = []
    for index, side in {o.index: o.side for o in operands_of(formula)}.items():
        wanted = gradient(formula, index, seed) if needs[index] and seed is not None else None
        if wanted is None:
            continue
        if sizes[index][1] == 1 and shape_of(wanted, sizes)[1] != 1:
            wanted = Sum(wanted)
        used = tuple(dict.fromkeys(o.index for o in operands_of(wanted)))
        wanted = map_operands(wanted, partial(_renumber, used))
        steps.append(_Step(index, side, swap_sides(wanted) if side == "u" else wanted, used))
    return tuple(steps)


def _renumber(used: tuple[int, ...], operand: Operand) -> Formula:
    return Operand(operand.side, used.index(operand.index))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rowptr, col, eid, rowptr_t, col_t, eid_t, num_cols, sorted_, operands, text, reduces, _ = inputs
    args = iter(output[len(reduces) :])
    winners = [next(args, None) if r in ("max", "min") else None for r in reduces]
    ctx.mark_non_differentiable(*output[len(reduces) :])
    ctx.needs = tuple(t.requires_grad for t in operands)
    ctx.shapes = _shapes(operands)
    ctx.facts = (num_cols, sorted_, text, tuple(reduces))
    # Only what the backward formulas use is kept: a plain sum keeps no features at all.
    everything = _plan(text, tuple(reduces), ctx.needs, (True,) * len(reduces), ctx.shapes)
    used = {i for step in everything for i in step.used}
    keep = [t if i in used or "prod" in reduces else None for i, t in enumerate(operands)]
    ctx.num_operands = len(operands)
    ctx.save_for_backward(rowptr, col, eid, rowptr_t, col_t, eid_t, *keep, *winners)


def _backward(ctx: Any, grad_outputs: list[Tensor | None]) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    arrays, n = saved[:6], ctx.num_operands
    operands, winners = saved[6 : 6 + n], saved[6 + n :]
    num_cols, sorted_, text, reduces = ctx.facts
    rowptr = arrays[0]
    forward = (*arrays, num_cols, sorted_)
    backward = (*arrays[3:], *arrays[:3], rowptr.size(0) - 1, True)

    once = not torch.is_grad_enabled()  # nobody will differentiate this backward pass
    if once and reduces == ("mean",) and text == "u0" and arrays[3] is not None:
        return (None,) * 8 + ([_mean_backward(grad_outputs[0], arrays)], None, None, None)
    tensors = dict(enumerate(operands))
    given = tuple(g is not None for g in grad_outputs[: len(reduces)])
    for r, reduce in enumerate(reduces):
        g = grad_outputs[r]
        if g is None:
            continue
        if reduce == "mean":
            degree = (rowptr[1:] - rowptr[:-1]).clamp(min=1).view(-1, 1, 1)
            g = g / degree.to(g.dtype)
        elif reduce == "prod":
            g, tensors[n + 2 * r + 1] = _prod_coefficients(g, forward, operands, text)
        elif reduce in ("max", "min"):
            tensors[n + 2 * r + 1] = winners[r]
        tensors[n + 2 * r] = g

    grads: list[Tensor | None] = [None] * n
    plan = _plan(text, reduces, ctx.needs, given, ctx.shapes)
    for step in plan:
        if step.side == "u" and reduces in (("max",), ("min",)) and text[:1] == "u":
            # A plain maximum of source features: its winners are source ids.
            grad, arg = tensors[n], tensors[n + 1]
            flat = torch.ops.pyg_accel.scatter_arg(
                grad.flatten(1).contiguous(), arg.flatten(1).contiguous(), num_cols
            )
            grads[step.operand] = flat.view(num_cols, *grad.shape[1:])
            continue
        if step.side == "u" and arrays[3] is None:
            raise RuntimeError("the gradient of a source operand needs the transposed graph")
        (out,) = torch.ops.pyg_accel.gspmm(
            *(backward if step.side == "u" else forward),
            [_rows_contiguous(tensors[i]) for i in step.used],
            str(step.formula),
            ["none" if step.side == "e" else "sum"],
            False,
        )
        grads[step.operand] = _fit(out, ctx.shapes[step.operand])
    return (None,) * 8 + (grads, None, None, None)


def _mean_backward(grad: Tensor | None, arrays: list[Any]) -> Tensor | None:
    """The gradient of a plain mean: each edge weighs 1 / degree, so no N x F quotient is made."""
    if grad is None:
        return None
    rowptr, _, _, rowptr_t, col_t, _ = arrays
    share = 1.0 / (rowptr[1:] - rowptr[:-1]).clamp(min=1).to(grad.dtype)
    weight = share.index_select(0, col_t).view(-1, 1, 1)
    operands = [_rows_contiguous(grad), weight]
    transposed = (rowptr_t, col_t, None, None, None, None, rowptr.size(0) - 1, True)
    (out,) = torch.ops.pyg_accel.gspmm(*transposed, operands, "mul(u0,e1)", ["sum"], False)
    result: Tensor = out
    return result


def _rows_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(2) == 1 or t.is_contiguous() else t.contiguous()


def _fit(grad: Tensor, shape: tuple[int, int]) -> Tensor:
    """Sum or repeat a gradient [rows, H, F] to the shape of its operand."""
    for dim, size in ((1, shape[0]), (2, shape[1])):
        if grad.size(dim) != size:
            if size == 1:
                grad = grad.sum(dim, keepdim=True)
            else:
                grad = grad.expand(*(size if d == dim else -1 for d in range(3)))
    return grad


def _prod_coefficients(
    grad: Tensor, forward: tuple[Any, ...], operands: list[Tensor], text: str
) -> tuple[Tensor, Tensor]:
    """What a factor's gradient is multiplied by: rows without a zero, and with exactly one."""
    (product,) = torch.ops.pyg_accel.gspmm(*forward, operands, f"nonzero({text})", ["prod"], False)
    (zeros,) = torch.ops.pyg_accel.gspmm(*forward, operands, f"iszero({text})", ["sum"], False)
    scaled = grad * product
    return scaled * (zeros == 0), scaled * (zeros == 1)


def _scatter_arg(grad: Tensor, arg: Tensor, num_rows: int) -> Tensor:
    spec = OpSpec("scatter_arg", grad.device.type, grad.dtype, arg.dtype, grad.size(0), num_rows,
                  grad.size(0), 1, grad.size(1))  # fmt: skip
    return choose(spec).backend.scatter_arg(grad, arg, num_rows)


def _scatter_arg_fake(grad: Tensor, arg: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(1))


def _scatter_arg_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_arg_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.pyg_accel.gather_arg(grad, ctx.saved_tensors[0]), None, None


def _gather_arg(x: Tensor, arg: Tensor) -> Tensor:
    return torch.where(arg < 0, 0, x.gather(0, arg.clamp(min=0).long()))


def _gather_arg_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].size(0)


def _gather_arg_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad = grad.contiguous()
    return torch.ops.pyg_accel.scatter_arg(grad, ctx.saved_tensors[0], ctx.rows), None


for _name, _run, _fake, _differentiate, _setup in (
    ("gspmm", _gspmm, _gspmm_fake, _backward, _setup_context),
    ("scatter_arg", _scatter_arg, _scatter_arg_fake, _scatter_arg_backward, _scatter_arg_setup),
    ("gather_arg", _gather_arg, lambda x, arg: torch.empty_like(x).new_empty(arg.shape),
     _gather_arg_backward, _gather_arg_setup),
):  # fmt: skip
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyg_accel::{_name}", _fake, lib=_library)
    torch.library.register_autograd(
        f"pyg_accel::{_name}", _differentiate, setup_context=_setup, lib=_library
    )
