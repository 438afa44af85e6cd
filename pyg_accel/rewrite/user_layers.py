"""Runs the code of a layer as it is, and puts off the products that it asks for.

What linear layers, sums and ``propagate`` make of the features is not computed where the code asks
for it. The code gets a tensor without data, whose shape, type and device it may read; the first
operation that needs data has the whole product computed, in the order of the factors that is
fastest. So nothing is assumed about the code: it takes its own branches in every call, whatever
they depend on.

Code that turns out not to work on such tensors runs again, on ordinary ones. Random numbers,
buffers and attributes are put back before; code that changes anything else that was there before
the call is interrupted before it does.
"""

from collections.abc import Callable
from copy import copy
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_accel.cache import memory_of, saved_tensors_are_hooked
from pyg_accel.patching.lazy import LazyTensor
from pyg_accel.patching.reasons import modules_in
from pyg_accel.patching.rng_state import random_state, restore, tensors_of
from pyg_accel.patching.running import Unrecognised, running
from pyg_accel.record.edge_tensors import changed_in_place, name_of
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.deferred import ABOUT, Deferred, Unfit, settle_items, settled
from pyg_accel.rewrite.guards import asks_types, with_propagate
from pyg_accel.rewrite.ir import Leaf, leaves_of
from pyg_accel.rewrite.record import Record, record_of
from pyg_accel.rewrite.recorder import Reading, Recorder
from pyg_accel.rewrite.tree import is_sparse

__all__ = ["UserLayerRun", "lift_user_layer"]

# Functions that leave something behind on a tensor, or in gradients.
_LASTING = {
    Tensor.backward, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
}  # fmt: skip
# What code may raise that is given tensors without data. The layer is called again without them,
# and a mistake of its own comes up once more.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _context(device: torch.device) -> tuple[Any, ...]:
    """What decides about a result and its gradient beside the operands."""
    cast = torch.is_autocast_enabled(device.type)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast,
        torch.get_autocast_dtype(device.type) if cast else None,
        torch._C._autograd._top_saved_tensors_default_hooks(True), get_ident(),
    )  # fmt: skip


class UserLayerRun(Recorder):
    """One run of a layer's own code.

    Attributes:
        reasons: why products were left to PyG.
        left: why calls like this one are better left to the layer; may be empty.
    """

    def __init__(self, call: Call, compute: Callable[[Call], Tensor]) -> None:
        """Take a call, and what computes a product in one: ``call.memo["record"]``."""
        super().__init__(call)
        if call.x.is_meta:
            raise NotLifted("features without data")
        self.reasons: dict[str, None] = {}
        self.left = ""
        self._compute = compute
        self._busy = self._again = self._failed = self._computed = self._over = False
        self._given: tuple[Any, ...] = ()
        self._storages: set[int] | None = None
        self._saved: set[int] = set()
        self._start = _context(call.x.device)
        self._propagate = call.conv.propagate

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer returns."""
        kinds: set[Any] = set(map(type, modules_in(self.call.conv)))
        if any(map(asks_types, kinds)):
            raise NotLifted(f"the code of {self._name} asks for the types of objects")
        if saved_tensors_are_hooked():  # a checkpoint counts them: they must be the same twice
            raise NotLifted("saved-tensor hooks are active")
        conv = self.layer = with_propagate(self.call.conv, self.propagate)
        self._given = args, kwargs
        state = random_state(self.call.x.device, self.call.conv)
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
            return self.call.conv(*args, **kwargs)
        if not self._computed:
            self.left = self.left or "; ".join(self.reasons)
            self.left = self.left or f"{self._name} does not call propagate"
        return out

    def _remaining(self) -> bool:
        return any(ref() is not None for ref in self.pending)

    def _settle_attributes(self) -> None:
        """Give data to what the code keeps for later."""
        for module in modules_in(self.call.conv):
            for values in (vars(module), module._buffers):
                settle_items(values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer what can be."""
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        if func in ABOUT:  # nearly every second call
            if len(types) != 1 or types[0] is not Deferred:
                return func(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = self.deferred(func, args, kwargs)
        if found is not None:
            return found
        name = name_of(func)
        if changed := changed_in_place(name, args, kwargs):
            self._before_change(name, changed)
        elif func in _LASTING or kwargs.get("generator") is not None:
            self._decline(f"'{name}' changes more than what {self._name} returns")
        return func(*args, **kwargs)

    def steady(self) -> bool:
        """See :meth:`Features.steady`."""
        return _context(self.call.x.device) == self._start

    def product_dtype_of(self, *values: Any) -> torch.dtype | None:
        """See :meth:`Features.product_dtype_of`; autocast has one of its own."""
        device = self.call.x.device.type
        if not torch.is_autocast_enabled(device):
            return self.dtype_of(*values)
        dtypes = {v.dtype for v in values if isinstance(v, Tensor)}
        return None if torch.float64 in dtypes else torch.get_autocast_dtype(device)

    def _decline(self, reason: str) -> NoReturn:
        """Have the layer do this call itself, also if its code catches the error.

        Raises:
            Unfit: always.
        """
        self._again, self.left = True, reason
        raise Unfit(reason)

    def _before_change(self, name: str, changed: list[Tensor]) -> None:
        """Compute what was put off and reads tensors that are about to be written to.

        Raises:
            Unfit: if they were there before the call and cannot be put back.
        """
        changed = settled(changed)
        with torch._C.DisableTorchFunction():
            if self._storages is None:
                held = [*tree_leaves(self._given), *tensors_of(self.call.conv)]
                self._storages = {memory_of(t) for t in held if isinstance(t, Tensor)}
            if not self._storages.isdisjoint(map(memory_of, changed)):
                self._decline(f"'{name}' changes a tensor in place that {self._name} was given")
        for ref in self.pending:
            item = ref()
            if item is not None and item.value is None:
                made = [part.value for part in _parts_of(item) if part.value is not None]
                if any(_overlap(a, b) for a in changed for b in (*item.reads, *made)):
                    item.settle()
        if not self._saved.isdisjoint(map(memory_of, changed)):
            self._decline(f"'{name}' changes features in place that a gradient may need")

    def propagate(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the layer's ``propagate``."""
        call, conv = self.call, self.call.conv
        if self._over:
            return self._propagate(edge_index, *args, **kwargs)
        try:
            trace, message, mean = self.message(edge_index, args, kwargs)
        except NotLifted as reason:
            self.reasons[str(reason)] = None
            return self._propagate(*settled((edge_index, *args)), **settled(kwargs))
        except Unrecognised as reason:
            self._decline(f"the message of {self._name} is no formula: {reason}")
        if not isinstance(message, LazyTensor):
            index = call.edge_index[call.target]
            return conv.aggregate(settled(message), index, dim_size=call.num_rows)

        def again() -> Tensor:
            return self._reduced(trace, message, "mean" if mean else "sum")

        with torch._C.DisableTorchFunction():
            expr = self.aggregated(trace, message, mean)
            shape = (call.num_rows, message.size(-1))
            out = self.defer(expr, shape, again, tuple(trace.operands), message.dtype)
        if out is None:
            self.reasons[f"the message of {self._name} is not linear in its features"] = None
            return again()
        return out

    def _reduced(self, trace: Reading, message: LazyTensor, reduce: str) -> Tensor:
        """Compute a sum or mean of messages by the kernels of ``patch()``."""
        try:
            operands = settled([*trace.operands])
            if torch.is_grad_enabled():
                self._saved.update(map(memory_of, operands))
            return trace.reduced(message, reduce, self.call.num_rows)
        except Unrecognised as reason:
            self._decline(f"the message of {self._name} is no formula: {reason}")

    def computed(self, item: Deferred) -> Tensor:
        """Return the data of a deferred tensor."""
        if not self.steady():
            self._decline(f"{self._name} changes the mode of autograd or autocast")
        if item.used and not isinstance(item.expr, Leaf):
            self.left = f"{self._name} uses its features, or their sums, otherwise too"
        busy, self._busy = self._busy, True
        try:
            if running.traces:  # it sees the functions of a message alone
                with torch._C.DisableTorchFunction():
                    return self._value(item).to(item.dtype)
            return self._value(item).to(item.dtype)
        finally:
            self._busy = busy

    def _value(self, item: Deferred) -> Tensor:
        leaves = set(leaves_of(item.expr))
        parts = _parts_of(item)
        if torch.is_grad_enabled() and any(map(is_sparse, leaves)):
            self._saved.update(map(memory_of, item.reads))
            self._saved.update(memory_of(p.value) for p in parts if p.value is not None)
        open_ = all(p.value is None or isinstance(p.expr, Leaf) for p in parts)
        if open_ and any(map(is_sparse, leaves)):
            try:
                if not any(leaf.kind == "weight" for leaf in leaves):
                    raise NotLifted(f"{self._name} has no linear layer beside its aggregation")
                return self._product(item, parts)
            except NotLifted as reason:
                self.reasons[str(reason)] = None
        assert item.again is not None
        return item.again()

    def _product(self, item: Deferred, parts: list[Deferred]) -> Tensor:
        """Compute a product in the order that is fastest."""
        call = copy(self.call)
        record = record_of(self, item.expr)
        call.memo = {"record": record, "made": self}
        self._failed = True
        try:
            out = self._compute(call)
        except NotLifted:
            self._failed = False
            raise
        self._failed, self._computed = False, True
        for part in parts:
            part.used = True
        return out


def _parts_of(item: Deferred) -> list[Deferred]:
    """The deferred tensors that one is made of."""
    found = {id(part): part for part in item.sources}
    todo = [*item.sources]
    for part in todo:  # as it grows
        todo += [source for source in part.sources if id(source) not in found]
        found |= {id(source): source for source in part.sources}
    return [*found.values()]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory."""
    if a.layout != torch.strided or b.layout != torch.strided:
        return True
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def lift_user_layer(conv: Any, call: Call) -> Algebra:
    """Return the product of a call, by default the first one.

    Raises:
        NotLifted: if the layer computes none.
    """
    if "record" not in call.memo:
        call.memo |= _first(call)
    record: Record = call.memo["record"]
    values = {name: _value(name) for name in record.entries}
    learned = tuple(name for name, entry in record.entries.items()
                    if entry.leaf.kind in ("weighted", "diagonal") and entry.tensors)  # fmt: skip
    return record.algebra(call.memo["made"], values, owners=("edge_weight",), learned=learned,
                          compiles=False)  # fmt: skip


def _value(name: str) -> Callable[[Call], Value]:
    def value(call: Call) -> Value:
        entry = call.memo["record"].entries[name]
        return entry.make(call, *entry.tensors)  # type: ignore[no-any-return]

    return value


class _Found(Exception):
    """The first product of a layer."""


def _first(call: Call) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def compute(inner: Call) -> Tensor:
        found.append(inner.memo)
        raise _Found

    run = UserLayerRun(call, compute)
    state = random_state(call.x.device, call.conv)
    try:
        run(tuple(call.given.values()), {})
    except _Found:
        restore(state)
        return found[0]
    raise NotLifted(run.left)
