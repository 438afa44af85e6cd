"""Features that a layer's code computes, as an expression: data are made when they are needed."""

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.record.edge_tensors import DeferredOperand
from pyg_accel.rewrite.ir import Expr

__all__ = ["ABOUT", "Deferred", "Unfit", "settle_items", "settled"]

_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque)

# What a tensor without data can be asked for.
ABOUT = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex,
    torch.numel, Tensor.get_device, Tensor.element_size,
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda", "is_cpu",
        "is_sparse", "is_meta", "is_quantized", "itemsize",
    )),
}  # fmt: skip


class Owner(Protocol):
    """The recorder of a call."""

    pending: "list[weakref.ref[Deferred]]"

    def apply(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a function, deferred if it can be."""
        ...

    def computed(self, item: "Deferred") -> Tensor:
        """Return the data of a deferred tensor."""
        ...


class Unfit(RuntimeError):
    """Data are asked for where computing them would leave traces; the text says which."""


class Deferred(DeferredOperand):
    """Features [N, F] that were not computed yet.

    Attributes:
        run: the recorder that made it.
        expr: what it is.
        again: computes it the way that the layer's code does; None once there are data.
        sources: the deferred tensors that the code made it of.
        reads: the tensors with data that it is computed from.
        value: the data, once they were asked for.
        used: it is a part of a product that was computed.
    """

    of_nodes = True
    run: Owner
    expr: Expr
    again: Callable[[], Tensor] | None
    sources: "tuple[Deferred, ...]"
    reads: tuple[Tensor, ...]
    value: Tensor | None
    used: bool

    @classmethod
    def of(
        cls,
        run: Owner,
        expr: Expr,
        like: Tensor,
        shape: tuple[int, ...],
        again: Callable[[], Tensor],
        made_of: tuple[Any, ...],
        dtype: torch.dtype | None = None,
    ) -> "Deferred":
        """Make one of a shape, else like another tensor."""
        sources = tuple(t for t in made_of if isinstance(t, Deferred) and t.value is None)
        reads = dict.fromkeys(t for s in sources for t in s.reads)
        reads |= dict.fromkeys(t for t in map(settled_already, made_of) if t is not None)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in reads)
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype or like.dtype, device=like.device, requires_grad=learns
        )
        made.run, made.expr, made.again = run, expr, again
        made.sources, made.reads = sources, tuple(reads)
        made.value, made.used = None, False
        run.pending.append(weakref.ref(made))
        return made

    def settle(self) -> Tensor:
        """Return the data."""
        if self.value is None:
            self.value = self.run.computed(self)
            self.sources, self.again = (), None
        return self.value

    def ordinary(self) -> Tensor:
        """See :meth:`DeferredOperand.ordinary`."""
        return self.settle()

    def differentiable(self) -> bool:
        """See :meth:`DeferredOperand.differentiable`."""
        return any(t.requires_grad for t in self.reads)

    def hoisted(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See :meth:`DeferredOperand.hoisted`."""
        return self.run.apply(func, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs no data, and compute them for everything else."""
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if any(issubclass(t, LazyTensor) for t in types):
            return NotImplemented  # the messages know what to do
        return func(*settled(args), **settled(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that came around ``__torch_function__``: gradients would be lost."""
        raise Unfit("features are given to a function that torch does not let us follow")


def settled_already(value: Any) -> Tensor | None:
    """Return a tensor that has data."""
    if isinstance(value, Deferred):
        return value.value
    return value if isinstance(value, Tensor) and not isinstance(value, DeferredOperand) else None


def settled(value: Any) -> Any:
    """Replace deferred tensors by their data."""
    if isinstance(value, Deferred):
        return value.settle()
    if type(value) in (tuple, list):
        return type(value)(settled(v) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(settled, value))
    if type(value) is dict:
        return {key: settled(v) for key, v in value.items()}
    return value


def settle_items(values: Any, depth: int = 3) -> None:
    """Replace what was put off by its data, in containers that stay the same objects."""
    for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
        if type(value) in _CONTAINERS and depth:
            settle_items(value, depth - 1)
        elif (data := settled(value)) is not value and (
            isinstance(value, Deferred) or any(isinstance(v, Deferred) for v in tree_leaves(value))
        ):
            values[key] = data
