"""Base classes of tensors of edges without storage.

A :class:`~pyg_accel.patching.lazy.LazyTensor` represents messages in one call. A
:class:`DeferredOperand` is an operand of messages that is only computed if needed, as a fused
kernel may do without it: softmax weights, products with one matrix per relation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

__all__ = [
    "DeferredOperand",
    "EdgeTensor",
    "asks",
    "changed_in_place",
    "follow",
    "materialize",
    "name_of",
    "plain_shape",
    "replaced",
]


class EdgeTensor(Tensor):
    """A tensor [.., E, ..] with a shape, dtype and device, but no storage.

    Attributes:
        waits: whether it is a :class:`DeferredOperand`.
    """

    waits = False

    def edges(self) -> tuple[int, int]:
        """Return the dimension of the edges and how many there are."""
        raise NotImplementedError

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``__new__`` has set all attributes."""


class DeferredOperand(EdgeTensor):
    """A tensor [E, ...] that is computed when a function reads its values."""

    waits = True

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, **attributes: Any
    ) -> Self:
        """Return a tensor with attributes that say how it is computed."""
        self: Self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        vars(self).update(attributes)
        return self

    def edges(self) -> tuple[int, int]:
        """See :meth:`EdgeTensor.edges`."""
        return 0, plain_shape(self)[0]

    def ordinary(self) -> Tensor:
        """Return it as an ordinary tensor."""
        raise NotImplementedError

    def differentiable(self) -> bool:
        """Return whether it has gradients, without computing it."""
        raise NotImplementedError

    def after(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return a deferred result of ``func(self, *args, **kwargs)``; None if there is none."""
        return None

    def hoisted(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a function that works row by row."""
        return follow(func, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, EdgeTensor) and not issubclass(t, DeferredOperand) for t in types):
            return NotImplemented  # torch calls that of the LazyTensor next
        return follow(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only reached from C++, below autograd.
        def materialize(waiting: DeferredOperand) -> Tensor:
            if waiting.differentiable():
                raise RuntimeError(f"'{func}' on an edge tensor with gradients: clone() it")
            return waiting.ordinary()

        args, kwargs = tree_map_only(DeferredOperand, materialize, (args, kwargs or {}))
        return func(*args, **kwargs)


def materialize(operand: Tensor) -> Tensor:
    """Return an operand as an ordinary tensor."""
    return operand.ordinary() if isinstance(operand, DeferredOperand) else operand


def plain_shape(tensor: Tensor) -> torch.Size:
    """Return the shape without going through ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.shape


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function, e.g. ``index_select``."""
    return getattr(func, "__name__", str(func))


_ASSIGNMENTS = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__",
    "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
}  # fmt: skip


def changed_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a torch function of this name writes to.

    Except running statistics of normalisations, which are buffers of modules.
    """
    changed: list[Any] = []
    if name in _ASSIGNMENTS or (name.endswith("_") and not name.endswith("__")):
        changed += args[:1] or list(kwargs.values())[:1]
    if kwargs:
        if kwargs.get("inplace"):
            changed += args[:1] or [kwargs.get("input")]
        changed.append(kwargs.get("out"))
    for value in changed:  # as it grows
        changed += value if isinstance(value, (list, tuple)) else ()
    return [value for value in changed if isinstance(value, Tensor)]


_METHODS = {
    "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
    "get_device", "__len__", "ndimension", "is_signed", "is_inference", "__hash__", "is_conj",
    "is_neg",
}  # fmt: skip
_ATTRIBUTES = {
    "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_cuda", "is_cpu",
    "is_meta", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn", "itemsize", "names",
}  # fmt: skip


def asks(func: Callable[..., Any]) -> bool:
    """Whether a function reads a property that a tensor without storage has."""
    name = name_of(func)
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return name in _METHODS or (name == "__get__" and attribute in _ATTRIBUTES)


def follow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on deferred operands: its result is deferred too, or they are computed."""
    if args and isinstance(args[0], DeferredOperand):
        if asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = args[0].after(name_of(func), func, args[1:], kwargs)
        if result is not None:
            return result
    args, kwargs = replaced(DeferredOperand, lambda waiting: waiting.ordinary(), args, kwargs)
    return func(*args, **kwargs)


def replaced(
    kind: type, by: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with the tensors of a class replaced, also those in lists and tuples."""

    def materialize(value: Any) -> Any:
        if isinstance(value, kind):
            return by(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, kind) for v in value):
            return type(value)(materialize(v) for v in value)
        return value

    return tuple(materialize(a) for a in args), {k: materialize(v) for k, v in kwargs.items()}
