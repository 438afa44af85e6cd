"""Runs the code of a layer as it is, and puts off the products that it asks for.

What a linear layer makes of the features, what ``propagate`` makes of that, and what another linear
layer makes of the sum are not computed where the code asks for them. The code gets a tensor without
data, whose shape, type and device it may read; the first operation that needs data has the whole
product computed, in the order of the factors that is fastest. So nothing is assumed about the code:
it takes its own branches in every call, whatever they depend on.

Code that turns out not to work on such tensors runs again, on ordinary ones. Random numbers,
buffers and attributes are put back before; code that changes anything else that was there before
the call is interrupted before it does.

``message`` is run in the same way, on messages that may be multiplied with one number an edge. If
it does something else with them, they are gathered, and PyG's own aggregation sums them up.
"""

import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import lru_cache
from inspect import Parameter, signature
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_accel.kept import memory_of, saved_tensors_are_hooked
from pyg_accel.patching.edge_tensors import changed_in_place, name_of
from pyg_accel.patching.randomness import random_state, restore, tensors_of
from pyg_accel.patching.reasons import modules_in
from pyg_accel.rewrite.algebra import Call, NotLifted
from pyg_accel.rewrite.deferred import ABOUT, Deferred, Messages, Product, Unfit, settled
from pyg_accel.rewrite.following import asks_types, followed, settle_items
from pyg_accel.rewrite.guards import RENDERED, is_rendered
from pyg_accel.rewrite.rules.common import need_sum_or_mean

__all__ = ["Run"]

_FIXED = ("aggregate", "update", "message_and_aggregate")  # methods that have to be PyG's own
_MULTIPLY = {
    torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__,
}  # fmt: skip
_DIVIDE = {
    torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide,
    Tensor.__truediv__,
}  # fmt: skip
_FACTORS = _MULTIPLY | _DIVIDE
# Functions that leave something behind on a tensor, or in gradients.
_LASTING = {
    Tensor.backward, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
}  # fmt: skip
_OURS = (Deferred, Messages)
# What code may raise that is given tensors without data. The layer is called again without them,
# and a mistake of its own comes up once more.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


@lru_cache(maxsize=256)
def _parameters(message: Any) -> tuple[Parameter, ...]:
    return tuple(signature(message).parameters.values())[1:]


def _context(device: torch.device) -> tuple[Any, ...]:
    """What decides about a result and its gradient beside the operands."""
    cast = torch.is_autocast_enabled(device.type)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast,
        torch.get_autocast_dtype(device.type) if cast else None,
        torch._C._autograd._top_saved_tensors_default_hooks(True), get_ident(),
    )  # fmt: skip


class Run(TorchFunctionMode):
    """One run of a layer's own code.

    Attributes:
        reasons: why products were left to PyG.
        left: why calls like this one are better left to the layer; may be empty.
        pending: what was put off.
    """

    def __init__(self, call: Call, compute: Callable[[Call], Tensor]) -> None:
        """Take a call, and what computes a product in one: ``call.memo["product"]``."""
        super().__init__()
        self.reasons: dict[str, None] = {}
        self.left = ""
        self.pending: list[weakref.ref[Deferred]] = []
        self._call, self._conv, self._compute = call, call.conv, compute
        self._name = type(call.conv).__name__
        self._busy = self._again = self._failed = self._computed = self._over = False
        self._given: tuple[Any, ...] = ()
        self._storages: set[int] | None = None
        self._start = _context(call.x.device)
        self._propagate = call.conv.propagate

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer returns."""
        if self._call.bipartite:
            raise NotLifted(f"no lifting rule for {self._name} on a bipartite graph")
        kinds: set[Any] = set(map(type, modules_in(self._conv)))
        if any(map(asks_types, kinds)):
            raise NotLifted(f"the code of {self._name} asks for the types of objects")
        if saved_tensors_are_hooked():  # a checkpoint counts them: they must be the same twice
            raise NotLifted("somebody is told of each tensor that is saved for the backward pass")
        conv = followed(self._conv, self.propagate)
        self._given = args, kwargs
        state = random_state(self._call.x.device, self._conv)
        try:
            with self:
                out = conv(*args, **kwargs)
            out = settled(out)
            if self._remaining():
                self._settle_attributes()
            if self._remaining():
                self._again, self.left = True, f"{self._name} keeps what it computes"
        except _FAILURES as error:
            if self._failed or not (self.pending or self._again):
                raise
            self._again = True
            self.left = self.left or f"the code of {self._name} cannot be followed: {error}"
        finally:
            self._over, self.pending = True, []
        if self._again:
            restore(state)
            return self._conv(*args, **kwargs)
        if not self._computed:
            self.left = self.left or "; ".join(self.reasons)
            self.left = self.left or f"{self._name} does not call propagate"
        return out

    def _remaining(self) -> bool:
        return any(ref() is not None for ref in self.pending)

    def _settle_attributes(self) -> None:
        """Give data to what the code keeps for later."""
        for module in modules_in(self._conv):
            for values in (vars(module), module._buffers):
                settle_items(values)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Put off products with weights, and multiply messages."""
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        if func in ABOUT:  # nearly every second call
            if len(types) != 1 or types[0] not in _OURS:
                return func(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = None
        if func == F.linear:
            found = self._linear(*args, **kwargs)
        elif Messages in types and func in _FACTORS and len(args) == 2 and not kwargs:
            found = _multiplied(*args, inverse=func in _DIVIDE)
        if found is not None:
            return found
        name = name_of(func)
        if changed := changed_in_place(name, args, kwargs):
            self._before_change(name, changed)
        elif func in _LASTING or kwargs.get("generator") is not None:
            self._decline(f"'{name}' changes more than what {self._name} returns")
        return func(*args, **kwargs)

    def _decline(self, reason: str) -> None:
        """Have the layer do this call itself, also if its code catches the error.

        Raises:
            Unfit: always.
        """
        self._again, self.left = True, reason
        raise Unfit(reason)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        """Put off what a linear layer does with the features, or with their sums."""
        call = self._call
        last = input if isinstance(input, Deferred) and input.value is None else None
        if last is None and input is not call.x:
            return None
        if last is not None and (not last.product.aggregates or last.product.after is not None):
            return None
        plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dim() == 2
        if not plain or weight.size(1) != input.size(1) or _context(call.x.device) != self._start:
            return None
        if bias is not None and (not isinstance(bias, Tensor) or bias.shape != weight.shape[:1]):
            return None
        dtype = input.dtype
        kinds = {dtype, weight.dtype, *(() if bias is None else (bias.dtype,))}
        if torch.is_autocast_enabled(call.x.device.type):
            if torch.float64 in kinds:
                return None
            dtype = torch.get_autocast_dtype(call.x.device.type)
        elif len(kinds) > 1:
            return None
        factors = (weight, bias)
        product = Product(call.x, factors) if last is None else replace(last.product, after=factors)
        return Deferred.of(self, product, last, (input.size(0), weight.size(0)), dtype)

    def _before_change(self, name: str, changed: list[Tensor]) -> None:
        """Compute what was put off and reads tensors that are about to be written to.

        Raises:
            Unfit: if they were there before the call and cannot be put back.
        """
        with torch._C.DisableTorchFunction():
            changed = [t for t in changed if not isinstance(t, Deferred)]
            if self._storages is None:
                held = [*tree_leaves(self._given), *tensors_of(self._conv)]
                self._storages = {memory_of(t) for t in held if isinstance(t, Tensor)}
            if not self._storages.isdisjoint(map(memory_of, changed)):
                self._decline(f"'{name}' changes a tensor in place that {self._name} was given")
        for ref in self.pending:
            item = ref()
            if item is not None and any(_overlap(a, b) for a in changed for b in item.operands):
                item.settle()

    def propagate(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the layer's ``propagate``."""
        if self._over:
            return self._propagate(edge_index, *args, **kwargs)
        try:
            with torch._C.DisableTorchFunction():
                features, given, mean = self._arguments(edge_index, args, kwargs)
                last = features if isinstance(features, Deferred) else None
                product = Product(self._call.x) if last is None else last.product
                shape = (edge_index.size(1), features.size(1))
                rows = Messages.of(self, product, last, shape, features.dtype)
        except NotLifted as reason:
            self.reasons[str(reason)] = None
            return self._propagate(*settled((edge_index, *args)), **settled(kwargs))
        call, conv = self._call, self._conv
        name = next(n for n, value in given.items() if value is features and n.endswith("_j"))
        out = conv.message(**given | {name: rows})
        if isinstance(out, Messages) and out.value is None:
            with torch._C.DisableTorchFunction():
                product = replace(product, aggregates=True, mean=mean, weight=out.weight())
                return Deferred.of(self, product, out, (call.num_rows, shape[1]), out.dtype)
        self.reasons[f"the message of {self._name} is not w * x_j, with one number an edge"] = None
        return conv.aggregate(settled(out), call.edge_index[call.target], dim_size=call.num_rows)

    def _arguments(
        self, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any], bool]:
        """Return the features, the arguments of ``message``, and whether messages are averaged."""
        cls, call, name = type(self._conv), self._call, self._name
        for method in _FIXED:
            if getattr(cls, method) is not getattr(MessagePassing, method):
                raise NotLifted(f"{name} has its own {method}")
        for method in RENDERED:
            if not is_rendered(getattr(cls, method), cls):
                raise NotLifted(f"{name} has its own {method}")
        mean = need_sum_or_mean(self._conv)
        if edge_index is not call.edge_index:
            raise NotLifted(f"{name} makes another graph in every call")
        if args or kwargs.get("size") is not None:
            raise NotLifted(f"{name} calls propagate with a size")
        if _context(call.x.device) != self._start:
            raise NotLifted(f"{name} changes the mode of autograd or autocast")
        rows, entries = call.num_rows, call.edge_index
        known: dict[str, Callable[[], Any]] = {
            "edge_index": lambda: entries, "ptr": lambda: None, "dim_size": lambda: rows,
            "index": lambda: entries[call.target], "edge_index_i": lambda: entries[call.target],
            "edge_index_j": lambda: entries[1 - call.target], "size_i": lambda: rows,
            "size_j": lambda: rows,
        }  # fmt: skip
        given: dict[str, Any] = {}
        features = None
        for parameter in _parameters(cls.message):
            key = parameter.name
            base = key[:-2]
            if key in known:
                given[key] = known[key]()
            elif key.endswith("_j") and features is None and isinstance(kwargs.get(base), Tensor):
                features = given[key] = kwargs[base]
            elif (
                key.endswith(("_i", "_j")) or parameter.kind is not Parameter.POSITIONAL_OR_KEYWORD
            ):
                raise NotLifted(f"the message of {name} is not w * x_j")
            elif key in kwargs:
                given[key] = kwargs[key]
            elif parameter.default is Parameter.empty:
                raise NotLifted(f"the message of {name} takes {key}")
        if features is None:
            raise NotLifted(f"the message of {name} is not w * x_j")
        put_off = isinstance(features, Deferred)
        if put_off and (features.value is not None or features.product.aggregates):
            put_off = False
        if not put_off and features is not call.x:
            raise NotLifted(f"{name} changes its features before it aggregates them")
        return features, given, mean

    def computed(self, item: Deferred) -> Tensor:
        """Return the data of what was put off."""
        if _context(item.product.x.device) != self._start:
            self._decline(f"{self._name} changes the mode of autograd or autocast")
        if item.used:
            self.left = f"{self._name} uses its features, or their sums, otherwise too"
        busy, self._busy = self._busy, True
        try:
            return self._value(item).to(item.dtype)
        finally:
            self._busy = busy

    def _value(self, item: Deferred) -> Tensor:
        product, source, call = item.product, item.source, self._call
        if isinstance(item, Messages):
            features = product.x if source is None else source.settle()
            rows = features.index_select(0, call.edge_index[1 - call.target])
            return rows if item.factor is None else rows * item.factor
        if not product.aggregates:
            assert product.before is not None
            return F.linear(product.x, *product.before)
        assert source is not None
        if product.after is None or source.value is None:
            try:
                return self._product(item)
            except NotLifted as reason:
                self.reasons[str(reason)] = None
        if product.after is not None:
            return F.linear(source.settle(), *product.after)
        index = call.edge_index[call.target]
        total: Tensor = self._conv.aggregate(source.settle(), index, dim_size=call.num_rows)
        return total

    def _product(self, item: Deferred) -> Tensor:
        """Compute a product in the order that is fastest."""
        if item.product.before is None and item.product.after is None:
            raise NotLifted(f"{self._name} has no linear layer beside its aggregation")
        call = copy(self._call)
        call.memo = {"product": item.product}
        self._failed = True
        try:
            out = self._compute(call)
        except NotLifted:
            self._failed = False
            raise
        self._failed, self._computed = False, True
        part = item.source
        while part is not None:
            if part.value is not None and not isinstance(part, Messages):
                self.left = f"{self._name} uses its features, or their sums, otherwise too"
            part.used, part = True, part.source
        return out


def _multiplied(first: Any, second: Any, *, inverse: bool) -> Messages | None:
    if isinstance(first, Messages) and first.value is None:
        return first.times(second, inverse=inverse)
    if isinstance(second, Messages) and second.value is None and not inverse:
        return second.times(first, inverse=False)
    return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return True
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
