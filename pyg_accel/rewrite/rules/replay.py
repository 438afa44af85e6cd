"""What a layer's code makes of features and parameters beside products: calls that are done again.

Functions that no expression says run on tensors of the meta device. Which function made a tensor of
which arguments is kept, so that other calls can make theirs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.patching.reasons import modules_in
from pyg_accel.record.edge_tensors import DeferredOperand, asks, name_of
from pyg_accel.rewrite.algebra import Call, NotLifted
from pyg_accel.rewrite.deferred import Deferred
from pyg_accel.rewrite.ir import Expr, Leaf, Map, Product, Sum
from pyg_accel.rewrite.recorder import Recorder

__all__ = ["Replay", "ReplayRecorder"]

Replay = Callable[[Call, Any], Any]  # makes a tensor of what another call has, and of features

_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "rsub", "__rsub__"}
_LINEAR = {"view", "reshape", "mul", "__mul__", "__rmul__", "sum", "linear"}
# Functions that do the same in all modes, and write to none of their arguments.
_REPEATED = _SUMS | _LINEAR | {"cat", "sigmoid", "contiguous", "unsqueeze", "flatten", "div",
                               "__truediv__"}  # fmt: skip


class ReplayRecorder(Recorder):
    """A recorder of code that runs without data.

    Attributes:
        made: tensors that the code made, and how, by their ids.
        followed: those of the meta device: features in heads, and what was made of them.
        exprs: of features in heads, what they are.
        inputs: the features that the layer is given, and the attributes of a call they come from.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.made: dict[int, tuple[Any, ...]] = {}
        self.followed: dict[int, Tensor] = {}
        self.exprs: dict[int, Expr] = {}
        self.inputs: dict[int, str] = {id(call.x): "x"}
        if call.x_dst is not None:
            self.inputs.setdefault(id(call.x_dst), "x_dst")

    def refuse(self) -> Tensor:
        """Refuse to compute data."""
        raise NotImplementedError

    # -- tensors without data ----------------------------------------------------------------------

    def without_data(self, shape: tuple[int, ...], expr: Expr | None = None) -> Tensor:
        """Return a tensor that stands for features in heads, or for attributes of edges."""
        made = torch.empty(shape, dtype=self.call.x.dtype, device="meta")
        self.followed[id(made)] = made
        if expr is not None:
            self.exprs[id(made)] = expr
        return made

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a function, recorded; None if nothing of it is followed."""
        given = [*_leaves(args), *_leaves(kwargs)]
        if not args or any(
            isinstance(t, DeferredOperand | LazyTensor) and not isinstance(t, Deferred)
            for t in given
        ):
            return None
        if id(args[0]) in self.exprs and (joined := self._joined(func, args, kwargs)) is not None:
            return joined
        if not any(id(t) in self.followed or isinstance(t, Deferred) for t in given):
            return None
        if isinstance(args[0], Deferred) and name_of(func) in ("view", "reshape"):
            return self._in_heads(args[0], func, args[1:])
        if asks(func) or getattr(func, "__self__", None) is Tensor._version:
            return None
        if name_of(func) not in _REPEATED or kwargs.get("out") is not None:
            return self.refuse()
        result = self._run(func, args, kwargs)
        self.followed[id(result)] = result
        self.made[id(result)] = result, func, args, kwargs
        return result

    def keep(self, result: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Take a note of how a tensor was made, if it can be made again."""
        if isinstance(result, Tensor) and name_of(func) in _REPEATED:
            self.made[id(result)] = result, func, args, kwargs

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            args, kwargs = tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (args, kwargs)
            )
            found: Tensor = func(*args, **kwargs)
        return found

    def _in_heads(self, features: Deferred, func: Callable[..., Any], shape: Any) -> Tensor:
        """Return a view [N, heads, width] of features."""
        view = self._run(func, (features, *shape), {})
        if view.dim() != 3 or view.size(0) != features.size(0):
            return self.refuse()
        heads, width = view.shape[1:]

        def split(expr: Expr) -> Expr:
            match expr:
                case Sum(terms=terms):
                    return self.total(*map(split, terms))
                case Product(factors=(*first, Leaf(kind="weight") as last)):
                    entry = next(e for e in self.entries.values() if e.leaf is last)
                    base, key = last.name.partition("#")[0], ("heads", last.name, heads)
                    leaf = self.leaf(key, base, last.rows, width, "weight", entry.make,
                                     *entry.tensors, heads=heads)  # fmt: skip
                    return Product((*first, leaf))
            raise NotLifted(f"{self._name} divides {expr} into heads")

        return self.without_data(tuple(view.shape), split(self.movable(features.expr)))

    def _joined(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Deferred | None:
        """Return features whose heads are side by side, or averaged; None for another function."""
        name, out = name_of(func), self.exprs[id(args[0])]
        if name not in ("view", "reshape", "flatten", "mean"):
            return None
        shape = tuple(self._run(func, args, kwargs).shape)
        rows, heads, width = args[0].shape
        if shape != (rows, width if name == "mean" else heads * width):
            return None
        self.widths[symbol := f"w{len(self.widths)}"] = shape[1]
        if name == "mean":
            self.parts.maps["mean_heads"] = lambda t: t.mean(dim=1) if t.dim() == 3 else t
            out = Map("mean_heads", out, symbol)
        else:
            self.parts.maps["concat"] = lambda t: t.flatten(1)
            out = Map("concat", out, symbol, free=True)
        return self.defer(out, shape, self.refuse, ())

    # -- making them again -------------------------------------------------------------------------

    def sources_of(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the features that a tensor is made of."""
        _, _, args, kwargs = self.made.get(id(tensor), (None, None, (), {}))
        inner = [t for t in (*_leaves(args), *_leaves(kwargs)) if isinstance(t, Tensor)]
        for part in inner:
            yield from self.sources_of(part)
        followed = id(tensor) in self.followed or isinstance(tensor, Deferred)
        if followed and not inner and id(tensor) not in self.inputs:
            yield tensor

    def is_linear(self, tensor: Tensor) -> bool:
        """Whether a tensor [N, ...] is linear in the one that it is made of."""
        _, func, args, kwargs = self.made.get(id(tensor), (None, None, (), {}))
        if func is None:
            return id(tensor) in self.followed
        biased = bool(args[2:] or kwargs) and name_of(func) == "linear"
        parts = [t for t in args if id(t) in self.followed]
        linear = name_of(func) in _LINEAR and not (biased and args[2:] != (None,))
        return linear and len(parts) == 1 and self.is_linear(parts[0])

    def replay(self, value: Any, source: Tensor | None = None) -> Replay:
        """Return how a tensor is made in any call, of what takes the place of ``source``."""
        if isinstance(value, (list, tuple)):
            several = [self.replay(v, source) for v in value]
            return lambda call, given: [one(call, given) for one in several]
        if not isinstance(value, Tensor):
            return lambda call, given: value
        if value is source:
            return lambda call, given: given
        if id(value) in self.inputs:
            name = self.inputs[id(value)]
            return lambda call, given: getattr(call, name)
        for module in modules_in(self.call.conv):
            for table in (module._parameters, module._buffers):
                for name, own in table.items():
                    if own is value:
                        return _attribute(module, name)
        if id(value) not in self.made:
            raise NotLifted(f"{self._name} multiplies with what is neither parameter nor argument")
        _, func, args, kwargs = self.made[id(value)]
        inner = [self.replay(a, source) for a in args]
        return lambda call, given: func(*[one(call, given) for one in inner], **kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples and dictionaries hold: ``tree_leaves``, in a third of the time."""
    if isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _attribute(module: torch.nn.Module, name: str) -> Replay:
    return lambda call, given: getattr(module, name)
