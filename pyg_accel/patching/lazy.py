"""Edge tensors that are not computed until something needs them.

Inside an accelerated ``propagate`` the tensors ``x_i``, ``x_j`` and what ``message`` makes of them
are :class:`LazyTensor`: they have a shape and a formula, but no storage. A reduction over the
target nodes turns the formula into one kernel call and an ordinary tensor. PyG's own code runs on
them unchanged.

What a function on a lazy tensor becomes is in :mod:`pyg_accel.patching.rules`; the call that it
belongs to is a :class:`~pyg_accel.patching.trace.Trace`.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_accel.formula import Formula, Operand
from pyg_accel.ops.gspmm import REDUCES
from pyg_accel.record.edge_tensors import EdgeTensor, asks, plain_shape, replaced

if TYPE_CHECKING:
    from pyg_accel.patching.trace import Trace

__all__ = [
    "IDENTITY",
    "LazyTensor",
    "PostReduce",
    "Unrecognised",
    "first_operand",
    "is_single_side",
    "rules",
    "running",
]


class Unrecognised(Exception):
    """The message does something that no formula says.

    Attributes:
        permanent: the same layer will do it again, so there is no need to try.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.permanent = permanent
        if running.traces and running.traces[-1].failure is None:
            running.traces[-1].failure = self


@dataclass(frozen=True)
class PostReduce:
    """What is left to do to messages, and can be done to the reduced ones instead.

    Attributes:
        apply: a function of a tensor with its rows first.
        commutes_with: the reductions for which the order makes no difference.
    """

    apply: Callable[[Tensor], Tensor]
    commutes_with: Collection[str] = REDUCES

    def then(self, following: "PostReduce") -> "PostReduce":
        """Return both, one after the other."""
        both = set(self.commutes_with) & set(following.commutes_with)
        return PostReduce(lambda t: following.apply(self.apply(t)), both)


IDENTITY = PostReduce(lambda t: t)


class _Running(threading.local):
    """The calls that are being traced in a thread. A mode is off while it looks at a function."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []


running = _Running()


@lru_cache(maxsize=1)
def rules() -> ModuleType:
    """The rules, which know this module."""
    return import_module("pyg_accel.patching.rules")


class LazyTensor(EdgeTensor):
    """A tensor with an edge dimension and a formula in place of storage.

    Outside of the formula language it behaves as an ordinary tensor: narrow ones are computed when
    an unknown function asks for them, wide ones raise :class:`Unrecognised`.
    """

    tracer: "Trace"
    formula: Formula
    edge_dim: int
    parts: "tuple[Tensor, ...] | None"
    later: PostReduce
    shared: bool
    summed: bool

    @staticmethod
    def __new__(
        cls,
        trace: "Trace",
        formula: Formula,
        shape: Sequence[int],
        edge_dim: int,
        dtype: torch.dtype,
        parts: "tuple[Tensor, ...] | None" = None,
        later: PostReduce = IDENTITY,
        summed: bool = False,
    ) -> "LazyTensor":
        """Make one; ``parts`` are the pieces of a concatenation that waits for a linear layer.

        With something to do ``later``, ``shape`` is what comes out of that. One that is ``summed``
        has one number per edge, or per edge and head, and operands [rows, heads | 1, width | 1]
        over whose width its formula sums.
        """
        lazy = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=trace.device)
        lazy.tracer, lazy.formula, lazy.edge_dim, lazy.parts = trace, formula, edge_dim, parts
        lazy.later, lazy.summed = later, summed
        lazy.shared = False  # a view or the base of this tensor exists
        return lazy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({self.formula}, shape={list(plain_shape(self))})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not running.traces:  # the call is over, and a message of it was kept
            args, kwargs = replaced(LazyTensor, lambda t: t.tracer.compute(t), args, kwargs)
            return func(*args, **kwargs)
        running.traces[-1].check_modes()
        return rules().apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Every function is caught above; an operator that comes by another way has no formula.
        raise Unrecognised(f"'{func}' on messages")


def is_single_side(lazy: LazyTensor) -> bool:
    """Whether a lazy tensor is one operand, not yet combined with another side."""
    return isinstance(lazy.formula, Operand) and lazy.parts is None and lazy.later is IDENTITY


def first_operand(lazy: LazyTensor) -> Tensor:
    """Return the operand of a lazy tensor of one side."""
    assert isinstance(lazy.formula, Operand)
    return lazy.tracer.operands[lazy.formula.index]
