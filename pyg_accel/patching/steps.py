"""Functions of ordinary tensors that a plan calls again, and what is asked of their arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ON_OPERANDS", "REPEATABLE", "VIEWS", "Step", "for_any_size", "is_index", "stacked"]

# A function with its arguments, to be called with what the one before it returned.
Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

VIEWS = frozenset({Tensor.view, Tensor.unsqueeze, Tensor.reshape})
# What layers do to features of edges; its results depend on its arguments alone.
REPEATABLE = frozenset({
    torch.nn.functional.linear, Tensor.mul, torch.mul, Tensor.add, torch.add, Tensor.sum, torch.sum,
    Tensor.repeat,
})  # fmt: skip


def stacked(first: Tensor, dim: int, *others: Tensor) -> Tensor:
    """``torch.stack`` with the tensors one by one."""
    return torch.stack([first, *others], dim)


# What rules do to the operands of messages.
ON_OPERANDS = frozenset({
    torch.nn.functional.linear, Tensor.__getitem__, Tensor.reshape, stacked, torch.add, torch.neg,
})  # fmt: skip


def is_index(value: Any) -> bool:
    """Whether this picks columns of all rows, as a constant says."""
    if type(value) is not tuple or value[:1] != (slice(None),):
        return False
    ends = [e for i in value for e in ((i.start, i.stop, i.step) if type(i) is slice else (i,))]
    return all(type(end) in (int, type(None)) for end in ends)


def for_any_size(step: Step, num_edges: int) -> Step | None:
    """A step that does the same for any number of edges; None if it names another number."""
    function, args, kwargs = step
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = tuple(args[0])
    if not all(type(a) in (int, float, bool) for a in (*args, *kwargs.values())):
        return None
    if function.__name__ not in ("view", "reshape"):
        return function, args, kwargs
    if kwargs or not args or args[0] not in (-1, num_edges) or -1 in args[1:]:
        return None
    return function, (-1, *args[1:]), kwargs
