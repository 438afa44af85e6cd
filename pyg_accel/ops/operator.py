"""Operators: registered with torch.library under ``pyg_accel``, and a short way to call them.

A registered operator is what torch.compile, tensor subclasses and modes see. Going
through torch's dispatcher and its Python autograd takes several times as long as launching a
kernel, so where none of those is active :func:`call` runs the same functions without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pyg_accel.backends.dispatch import asked_for, prefer_backend
from pyg_accel.ops.derivative import Gradients, derivative_of

__all__ = ["call", "define", "each_gradient", "is_batch"]

_library = torch.library.Library("pyg_accel", "FRAGMENT")


@dataclass(frozen=True)
class _Operator:
    run: Callable[..., Any]
    setup: Callable[..., None] | None
    differentiate: Callable[..., tuple[Any, ...]] | None


_operators: dict[str, _Operator] = {}


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., tuple[Any, ...]] | None = None,
    setup: Callable[..., None] | None = None,
    *,
    gradients: Gradients | None = None,
) -> None:
    """Register an operator.

    An operator whose arguments change takes another name: inductor's cache on disk looks graphs up
    by the names of their operators, and code that it wrote for an older release would be run.

    Args:
        schema: name, arguments and results, as ``torch.library`` writes them.
        run: computes the results.
        fake: makes results of the same shapes without data.
        differentiate: of the context and the gradients of the results, returns those of the
            arguments; by other operators, so that it can be differentiated as well.
        setup: of the context, arguments and results, keeps what ``differentiate`` needs.
        gradients: in place of these two: see :mod:`.derivative`.
    """
    name = schema.partition("(")[0]
    if gradients is not None:
        setup, differentiate = derivative_of(schema, gradients)
    if differentiate is not None and setup is not None:
        differentiate, setup = _where_it_was_asked_for(differentiate, setup)
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyg_accel::{name}", fake, lib=_library)
    if differentiate is not None:
        torch.library.register_autograd(
            f"pyg_accel::{name}", differentiate, setup_context=setup, lib=_library
        )
    overload = getattr(torch.ops.pyg_accel, name).default
    torch.library.register_vmap(
        f"pyg_accel::{name}",
        lambda info, dims, *args: _each_of(overload, info.batch_size, dims, args),
        lib=_library,
    )
    _operators[name] = _Operator(run, setup, differentiate)


def _where_it_was_asked_for(
    differentiate: Callable[..., tuple[Any, ...]], setup: Callable[..., None]
) -> tuple[Callable[..., tuple[Any, ...]], Callable[..., None]]:
    """Differentiate on the backend that was named for the forward pass, where it can.

    On a GPU backward passes run in threads of their own, which know nothing of ``use_backend``. And
    a backend that was asked for by name need not have the formulas of all gradients.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)
        ctx.asked_for = asked_for()

    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if is_batch(grads[0]):
            return each_gradient(lambda *one: run(ctx, *one), grads)
        if ctx.asked_for == "auto":
            return differentiate(ctx, *grads)
        with prefer_backend(ctx.asked_for):
            return differentiate(ctx, *grads)

    return run, remember


def _each_of(
    function: Callable[..., Any], size: int, dims: Any, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Call a function for each item of a batch: no kernel takes one.

    Args:
        function: of tensors, lists of them, and other things.
        size: of the batch.
        dims: which dimension of each argument counts the items; None for those without.
        args: of all items.

    Returns:
        The stacked results, and the dimensions that count them.
    """
    flat, form = tree_flatten(args)
    places = tree_flatten(dims)[0]
    outs = []
    for item in range(size):
        given = [
            value if place is None else value.select(place, item).contiguous()
            for value, place in zip(flat, places, strict=True)
        ]
        outs.append(tree_flatten(function(*tree_unflatten(given, form))))
    stacked = [None if column[0] is None else torch.stack(column) for column in
               zip(*(values for values, _ in outs), strict=True)]  # fmt: skip
    result = tree_unflatten(stacked, outs[0][1])
    return result, tree_map(lambda value: None if value is None else 0, result)


def is_batch(grads: Any) -> bool:
    """Whether gradients are many at once, as for ``torch.autograd.grad(is_grads_batched=True)``.

    Function transforms (``torch.func``) make batches of another kind, which the dispatcher knows.
    """
    if type(grads) is list:
        return any(is_batch(grad) for grad in grads)
    return grads is not None and torch._C._functorch.is_legacy_batchedtensor(grads)


def each_gradient(
    differentiate: Callable[..., tuple[Any, ...]], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Differentiate for each gradient of a batch."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    flat, form = tree_flatten(grads)
    dims: list[int | None] = [None] * len(flat)
    size = 0
    while not size:  # batches of batches: the innermost that these are of
        for place, grad in enumerate(flat):
            if is_batch(grad):
                whole = torch._remove_batch_dim(grad, level, 0, 0)  # [0, ...] of another level's
                if whole.size(0):
                    flat[place], dims[place], size = whole, 0, whole.size(0)
        level -= not size
    found, _ = _each_of(differentiate, size, tree_unflatten(dims, form), tree_unflatten(flat, form))
    grads = tree_map(
        lambda grad: None if grad is None else torch._add_batch_dim(grad, 0, level), found
    )
    return grads


def call(name: str, *args: Any) -> Any:
    """Call an operator."""
    if torch.compiler.is_compiling() or _is_observed():
        return getattr(torch.ops.pyg_accel, name)(*args)
    needs = False
    for argument in args:
        for item in argument if type(argument) is list else (argument,):
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                needs = needs or item.requires_grad
            elif isinstance(item, Tensor):
                return getattr(torch.ops.pyg_accel, name)(*args)
    operator = _operators[name]
    if not needs or operator.differentiate is None or not torch.is_grad_enabled():
        return operator.run(*args)
    sizes = tuple(len(a) if type(a) is list else -1 for a in args)
    flat = [item for a in args for item in (a if type(a) is list else (a,))]
    result = _Differentiable.apply(operator, sizes, *flat)  # type: ignore[no-untyped-call]
    return list(result) if isinstance(result, tuple) else result


def _is_observed() -> bool:
    """Whether calls must be visible: to a mode, or a function transform."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class _Differentiable(torch.autograd.Function):
    """Any operator; lists among its arguments come one item after the other."""

    @staticmethod
    def forward(ctx: Any, operator: _Operator, sizes: tuple[int, ...], *flat: Any) -> Any:
        args = _grouped(sizes, flat)
        result = operator.run(*args)
        assert operator.setup is not None
        operator.setup(ctx, args, result)
        ctx.operator, ctx.sizes, ctx.is_list = operator, sizes, isinstance(result, list)
        ctx.set_materialize_grads(not ctx.is_list)  # of lists, unused results have None
        return tuple(result) if ctx.is_list else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = ctx.operator.differentiate(ctx, list(grads) if ctx.is_list else grads[0])
        flat: list[Any] = [None, None]
        for size, grad in zip(ctx.sizes, found, strict=True):
            flat += [grad] if size < 0 else [None] * size if grad is None else grad
        return tuple(flat)


def _grouped(sizes: tuple[int, ...], flat: tuple[Any, ...]) -> tuple[Any, ...]:
    args, at = [], 0
    for size in sizes:
        args.append(flat[at] if size < 0 else list(flat[at : at + size]))
        at += abs(size)
    return tuple(args)
