"""Results of products that are not computed before somebody asks for their data."""

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["ABOUT", "Deferred", "Linear", "Messages", "Product", "Unfit", "settled"]

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
Linear = tuple[Tensor, Tensor | None]  # weight [out, in] and bias


@dataclass(frozen=True)
class Product:
    """A product, with its values.

    Attributes:
        x: features [N, F].
        before: what they are multiplied with.
        aggregates: they are summed up over the edges.
        mean: they are averaged.
        weight: of the edges, [E, 1]; None for none.
        after: what the sums are multiplied with.
    """

    x: Tensor
    before: Linear | None = None
    aggregates: bool = False
    mean: bool = False
    weight: Tensor | None = None
    after: Linear | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the values."""
        shapes = [None if m is None else (*m[0].shape, m[1] is not None)
                  for m in (self.before, self.after)]  # fmt: skip
        return (self.x.size(1), *shapes, self.mean, self.weight is not None)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that it reads."""
        several = (self.x, *(self.before or ()), self.weight, *(self.after or ()))
        return tuple(t for t in several if t is not None)


class Owner(Protocol):
    """What computes the data."""

    pending: "list[weakref.ref[Deferred]]"

    def computed(self, item: "Deferred") -> Tensor:
        """Return the data of what was put off."""
        ...


class Unfit(RuntimeError):
    """Data are asked for where computing them would leave traces; the text says which."""


class Deferred(Tensor):
    """The result of a product that has not been computed yet.

    Attributes:
        run: that it belongs to.
        product: what it is.
        source: what it is made from, if that was put off too.
        value: the data, once they were asked for.
        used: a product that was computed has this as a part.
    """

    run: Owner
    product: Product
    source: "Deferred | None"
    value: Tensor | None
    used: bool

    @classmethod
    def of(
        cls,
        run: Owner,
        product: Product,
        source: "Deferred | None",
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Any:
        """Make one."""
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in product.operands)
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=product.x.device, requires_grad=learns
        )
        made.run, made.product, made.source = run, product, source
        made.value, made.used = None, False
        run.pending.append(weakref.ref(made))
        return made

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that it is computed from."""
        return self.product.operands

    def settle(self) -> Tensor:
        """Return the data."""
        if self.value is None:
            self.value = self.run.computed(self)
            self.source = None
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no data, and compute them for everything else."""
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        return func(*settled(args), **settled(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations that came around ``__torch_function__``: gradients would be lost."""
        raise Unfit("features are given to a function that torch does not let us follow")


class Messages(Deferred):
    """Rows of features, one an edge, times a number an edge."""

    factor: Tensor | float | None = None

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that they are computed from."""
        factor = (self.factor,) if isinstance(self.factor, Tensor) else ()
        return (*self.product.operands, *factor)

    def times(self, factor: Any, *, inverse: bool) -> "Messages | None":
        """Return the messages times a factor, if that is one number an edge."""
        if isinstance(factor, Tensor):
            rows = factor.size(0) if factor.dim() == 2 else 1
            if (
                isinstance(factor, Deferred)
                or factor.layout != torch.strided
                or factor.dim() > 2
                or (factor.dim() and factor.size(-1) != 1)
                or rows not in (1, self.size(0))
                or factor.is_complex()
            ):
                return None
            if factor.dim() and torch.promote_types(factor.dtype, self.dtype) != self.dtype:
                return None
            factor = factor.to(self.dtype)
        elif type(factor) not in (int, float):
            return None
        known = self.factor
        made = self.of(self.run, self.product, self.source, tuple(self.shape), self.dtype)
        if inverse:
            made.factor = (1.0 if known is None else known) / factor
        else:
            made.factor = factor if known is None else known * factor
        return made  # type: ignore[no-any-return]

    def weight(self) -> Tensor | None:
        """Return the factors, [E, 1]."""
        if self.factor is None:
            return None
        factor = torch.as_tensor(self.factor, dtype=self.dtype, device=self.product.x.device)
        return factor.expand(self.size(0), 1)


def settled(value: Any) -> Any:
    """Replace what was put off by its data."""
    if isinstance(value, Deferred):
        return value.settle()
    if type(value) in (tuple, list):
        return type(value)(settled(v) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(settled, value))
    if type(value) is dict:
        return {key: settled(v) for key, v in value.items()}
    return value
