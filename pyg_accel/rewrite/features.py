"""Features as expressions, and what functions of torch make of them.

A layer's own code runs on tensors without data (:class:`~pyg_accel.rewrite.deferred.Deferred`).
Linear layers, sums and factors per node make other ones; :mod:`.recorder` adds ``propagate``. What
happens with a deferred tensor that is asked for its data is up to the subclass.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_accel.cache import memory_of
from pyg_accel.rewrite.algebra import Call, Value
from pyg_accel.rewrite.deferred import Deferred, settled
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf, Sum, is_bias
from pyg_accel.rewrite.rules.common import ExprBuilder, ones_of

__all__ = ["Entry", "Features", "is_same"]


class Entry(NamedTuple):
    """A leaf of an expression, and its value for a call: ``make(call, *tensors)``."""

    leaf: Leaf
    tensors: tuple[Tensor, ...]
    make: Callable[..., Value]


def _given(call: Call, tensor: Tensor) -> Tensor:
    return tensor


def _transposed(call: Call, weight: Tensor) -> Tensor:
    return weight.t()


def _row(call: Call, bias: Tensor) -> Tensor:
    return bias.unsqueeze(0)


def _vector(call: Call, vector: Tensor) -> Tensor:
    return vector.reshape(-1)


def _inverted(call: Call, vector: Tensor) -> Tensor:
    return vector.reshape(-1).reciprocal()


class Features(TorchFunctionMode):
    """One run of a layer's own code, and what is known of its features.

    Attributes:
        call: what the layer is called with.
        layer: what runs the code.
        entries: the leaves that were met, by what they are.
        parts: leaves that rules share, and functions of expressions.
        widths: symbols of numbers of columns.
        same: symbols, and others that are the same size.
        pending: what was deferred.
    """

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call: Call = call
        self.layer: Any = call.conv
        self.entries: dict[Any, Entry] = {}
        self.parts = ExprBuilder()
        self.widths: dict[str, int] = {}
        self.same: dict[str, str] = {}
        self.pending: list[weakref.ref[Deferred]] = []
        self._name = type(call.conv).__name__

    # -- leaves ------------------------------------------------------------------------------------

    def leaf(
        self,
        key: Any,
        base: str,
        rows: str,
        cols: "str | int",
        kind: Any,
        make: Callable[..., Value] = _given,
        *tensors: Tensor,
        **more: Any,
    ) -> Leaf:
        """Return the leaf of a key; a new one may have a number of columns in place of a symbol."""
        if key not in self.entries:
            if isinstance(cols, int):
                self.widths[symbol := f"w{len(self.widths)}"] = cols
                cols = symbol
            leaf = Leaf(f"{base}#{len(self.entries)}", rows, cols, kind, **more)
            self.entries[key] = Entry(leaf, tensors, make)
        return self.entries[key].leaf

    def unite(self, first: str, second: str) -> None:
        """Take a note that two symbols are the same size."""
        first, second = (self._root(symbol) for symbol in (first, second))
        if first != second:
            self.same[second] = first

    def _root(self, symbol: str) -> str:
        while symbol in self.same:
            symbol = self.same[symbol]
        return symbol

    def expr_of(self, value: Any) -> Expr | None:
        """Return features as an expression."""
        call = self.call
        if isinstance(value, Deferred):
            if value.value is None:
                return value.expr if value.run is self else None
            value = value.value
        if type(value) not in (Tensor, torch.nn.Parameter) or value.dim() != 2:
            return None
        key, width = ("data", id(value)), value.size(1)
        if not value.is_floating_point() or value.layout != torch.strided:
            return None
        if value is call.x:
            return self.leaf(key, "X", "M" if call.bipartite else "N", width, "data", _given, value)
        if call.x_dst is not None and value is call.x_dst:
            return self.leaf(key, "Y", "N", width, "data", _given, value)
        if call.bipartite or value.size(0) != call.num_rows:
            return None
        return self.leaf(key, "Z", "N", width, "data", _given, value)

    def movable(self, expr: Expr) -> Expr:
        """Return a sum whose bias is a product and a column of ones, which can be moved."""
        if not isinstance(expr, Sum):
            return expr
        terms: list[Expr] = []
        for term in expr.terms:
            if is_bias(term):
                assert isinstance(term, Leaf)
                (bias,) = next(e.tensors for e in self.entries.values() if e.leaf is term)
                rows = expr.rows
                ones = self.leaf(("ones", rows), f"e{rows}", rows, "1", "data", ones_of(rows))
                row = self.leaf(("row", id(bias)), "w", "1", term.cols, "weight", _row, bias)
                term = ones @ row
            terms.append(term)
        return Sum(tuple(terms))

    def total(self, *parts: Expr) -> Expr:
        """Return a sum, biases last."""
        terms = [t for p in parts for t in (p.terms if isinstance(p, Sum) else (p,))]
        terms.sort(key=is_bias)
        for term in terms[1:]:
            self.unite(terms[0].cols, term.cols)
        return Sum(tuple(terms))

    def number(self, value: float, expr: Expr) -> Expr:
        """Return an expression times a number."""
        if value == 1:
            return expr
        rows = expr.rows
        leaf = self.leaf(("number", value, rows), f"{value:.4g}", rows, rows, "diagonal",
                         lambda call: value, number=True)  # fmt: skip
        return leaf @ self.movable(expr)

    def vector(self, tensor: Tensor, expr: Expr, *, inverse: bool = False) -> Expr | None:
        """Return an expression with its rows multiplied by a vector, or divided."""
        rows, key = expr.rows, ("vector", id(tensor), inverse, expr.rows)
        make = _inverted if inverse else _vector
        if tensor.numel() == 1 and tensor.dim() <= 2:
            return self.leaf(key, "c", rows, rows, "diagonal", make, tensor, number=True) @ (
                self.movable(expr)
            )
        size = self.call.num_cols if rows == "M" else self.call.num_rows
        if tuple(tensor.shape) != (size, 1):
            return None
        return Broadcast(
            self.leaf(key, "d", rows, rows, "diagonal", make, tensor), self.movable(expr)
        )

    # -- functions of features ---------------------------------------------------------------------

    def defer(
        self,
        expr: Expr | None,
        shape: tuple[int, ...],
        again: Callable[[], Tensor],
        made_of: tuple[Any, ...],
        dtype: torch.dtype | None = None,
    ) -> Deferred | None:
        """Return features that are an expression."""
        if expr is None:
            return None
        return Deferred.of(self, expr, self.call.x, shape, again, made_of, dtype)

    def computed(self, item: Deferred) -> Tensor:
        """Return the data of a deferred tensor."""
        raise NotImplementedError

    def steady(self) -> bool:
        """Return whether autograd and autocast do what they did when the code began to run."""
        return True

    def deferred(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Deferred | None:
        """Return the result of a function without data, if it is one of those that are recorded."""
        handler = _HANDLERS.get(func)
        if handler is None or not self.steady():
            return None
        if func != F.linear and not any(_is_open(a) for a in args):
            return None
        with torch._C.DisableTorchFunction():
            return handler(self, lambda: func(*settled(args), **settled(kwargs)), *args, **kwargs)

    def apply(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a function."""
        found = self.deferred(func, args, kwargs)
        return func(*settled(args), **settled(kwargs)) if found is None else found

    def linear(
        self, again: Any, input: Any, weight: Any, bias: Any = None, *, transposed: bool = True
    ) -> Deferred | None:
        """Multiply with a weight."""
        dtype = self.product_dtype_of(input, weight, bias)
        if dtype is None or type(weight) not in (Tensor, torch.nn.Parameter) or weight.dim() != 2:
            return None
        if (expr := self.expr_of(input)) is None:
            return None
        inner, outer = weight.shape[::-1] if transposed else weight.shape
        if inner != input.size(1):
            return None
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (outer,)):
            return None
        make = _transposed if transposed else _given
        w = self.leaf(("weight", id(weight), transposed), "W", expr.cols, outer, "weight", make,
                      weight)  # fmt: skip
        self.unite(w.rows, expr.cols)
        out: Expr = self.movable(expr) @ w
        if bias is not None:
            key = ("bias", id(bias))
            out = self.total(out, self.leaf(key, "b", "1", w.cols, "bias", _given, bias))
        shape = (input.size(0), outer)
        return self.defer(out, shape, again, (input, weight, bias), dtype)

    def add(self, again: Any, a: Any, b: Any, *, sign: float = 1.0) -> Deferred | None:
        """Add features, or a bias."""
        dtype = self.dtype_of(a, b)
        if dtype is None:
            return None
        shape = tuple((a if _is_open(a) else b).shape)
        if isinstance(b, Tensor) and b.dim() == 1 and b.shape == shape[1:] and sign == 1:
            expr = self.expr_of(a)
            assert expr is not None
            out: Expr = self.total(
                expr, self.leaf(("bias", id(b)), "b", "1", expr.cols, "bias", _given, b)
            )
        else:
            left, right = self.expr_of(a), self.expr_of(b)
            if left is None or right is None or a.shape != b.shape or left.rows != right.rows:
                return None
            out = self.total(left, self.number(sign, right))
        return self.defer(out, shape, again, (a, b), dtype)

    def multiply(self, again: Any, a: Any, b: Any, *, inverse: bool = False) -> Deferred | None:
        """Multiply with a number, for all or per node."""
        if not _is_open(a):
            if inverse:
                return None
            a, b = b, a
        expr = self.expr_of(a)
        if expr is None:
            return None
        if type(b) in (int, float):
            if inverse and not b:
                return None
            out: Expr | None = self.number(1 / b if inverse else float(b), expr)
        elif type(b) in (Tensor, torch.nn.Parameter) and self.dtype_of(a, b):
            out = self.vector(b, expr, inverse=inverse)
        else:
            return None
        return self.defer(out, tuple(a.shape), again, (a, b), a.dtype)

    def product_dtype_of(self, *values: Any) -> torch.dtype | None:
        """Return the dtype of a product."""
        return self.dtype_of(*values)

    def dtype_of(self, *values: Any) -> torch.dtype | None:
        """Return the one dtype of tensors."""
        dtypes = {v.dtype for v in values if isinstance(v, Tensor)}
        return next(iter(dtypes)) if len(dtypes) == 1 else None


def _is_open(value: Any) -> bool:
    """Whether a value is deferred and has no data."""
    return isinstance(value, Deferred) and value.value is None


def is_same(tensor: Tensor, other: Any) -> bool:
    """Whether a tensor has the elements of another, in that order and in the same memory."""
    return (
        isinstance(other, Tensor)
        and memory_of(tensor) == memory_of(other)
        and (tensor.numel(), tensor.dtype) == (other.numel(), other.dtype)
        and tensor.is_contiguous()
        and other.is_contiguous()
    )


_HANDLERS: dict[Callable[..., Any], Callable[..., Deferred | None]] = {F.linear: Features.linear}
for _functions, _handler in (
    ((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), Features.add),
    ((torch.sub, Tensor.sub, Tensor.__sub__), partial(Features.add, sign=-1.0)),
    ((torch.neg, Tensor.neg, Tensor.__neg__), partial(Features.multiply, b=-1.0)),
    ((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
     Features.multiply),
    ((torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide,
      Tensor.__truediv__), partial(Features.multiply, inverse=True)),
    ((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__),
     partial(Features.linear, transposed=False)),
):  # fmt: skip
    _HANDLERS |= dict.fromkeys(_functions, _handler)
