"""Checks while Dynamo reads PyG's own path of a call: guards, and side effects.

Dynamo does not read the function that makes an accelerated call (:mod:`.compiled`). It may replace
PyG's path only if that has no effects but its result and attributes of the layer, and depends on
guarded values only. The functions here run inside of Dynamo, by ``comptime``.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import FloatTensorSource, LocalSource
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_unbacked_symbols,
    guard_or_false,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing

from pyg_accel.runtime.module_state import refill

__all__ = ["Look", "Reading", "Run", "accept", "after", "before", "begin", "find",
           "picked_from"]  # fmt: skip

# Makes an accelerated call outside of Dynamo: returns its result and formulas.
Run = Callable[..., tuple[Tensor, str]]


@dataclass
class Reading:
    """One call that Dynamo reads.

    Attributes:
        layer: of the call.
        run: makes the call.
        reason: for PyG's own path; empty without one, None while undecided.
        formulas: computed in place of PyG's path.
        draws: number of draws of random numbers, in place of PyG's path.
    """

    layer: "weakref.ref[MessagePassing]"
    run: Run
    reason: str | None = None
    formulas: str = ""
    draws: int = 0
    _changed: set[int] = field(default_factory=set)
    _set: list[tuple[torch.nn.Module, str, Any]] = field(default_factory=list)
    _last: Node | None = None

    def module(self) -> MessagePassing:
        """Return the layer."""
        module = self.layer()
        assert module is not None, "a layer that is being called is alive"
        return module

    def before(self, context: ComptimeContext) -> None:
        """Note the changes that Dynamo has recorded before the call, but not applied."""
        modules = {id(m): m for m in self.module().modules()}
        for key, variable in _changed(context).items():
            self._changed.add(key)
            value: Any = getattr(variable, "value", None)
            if id(value) in modules:
                for name, pending in _pending(context, variable).items():
                    if pending.is_python_constant():
                        self._set.append((value, name, pending.as_python_constant()))
                    else:
                        self.reason = "attributes of the layer that were set in the same graph"
            elif not isinstance(value, torch.nn.Module):
                self.reason = "objects that were changed in the same graph"
        edge_index: Any = context.get_local("edge_index").as_proxy()
        _note_origin(edge_index.node)
        self._last = next(iter(reversed(context.graph().nodes)), None)

    @contextmanager
    def attributes(self) -> Iterator[MessagePassing]:
        """Set the pending attributes of the layer; restore all attributes afterwards."""
        module = self.module()
        before = [(vars(m), dict(vars(m))) for m in module.modules()]
        try:
            for owner, name, value in self._set:
                vars(owner)[name] = value
            yield module
        finally:  # stored tensors have no data
            for attributes, saved in before:
                refill(attributes, saved)

    def after(self, context: ComptimeContext) -> None:
        """Check the changes and the guards of PyG's path."""
        modules = {id(m) for m in self.module().modules()}
        for key, variable in _changed(context).items():
            if key not in self._changed and id(getattr(variable, "value", None)) not in modules:
                self.reason = self.reason or "a message that changes objects"
        for number in _output(context).unspec_variable_map.values():
            origin = number.source
            if isinstance(origin, FloatTensorSource):
                origin = origin.base
            if isinstance(origin, LocalSource):  # comes as an argument if at all
                continue
            install_guard(origin.make_guard(GuardBuilder.EQUALS_MATCH))  # a constant of the call

    def accept(self, context: ComptimeContext) -> None:
        """Remove the random numbers of PyG's unused path from the graph."""
        if self.reason or not self.draws:
            return
        nodes = list(context.graph().nodes)
        if self._last is not None:
            nodes = nodes[nodes.index(self._last) + 1 :]
        drawing = [node for node in nodes if _draws(node)]
        if len(drawing) != self.draws:
            self.reason = "random numbers in a message"
            return
        random = set(drawing)
        for node in nodes:
            if not random.isdisjoint(node.all_input_nodes):
                random.add(node)
        module = self.module()
        for variable in _changed(context).values():
            value = getattr(variable, "value", None)
            if any(value is part for part in module.modules()) and any(
                not pending.is_python_constant()
                and (not pending.is_tensor() or pending.as_proxy().node in random)
                for pending in _pending(context, variable).values()
            ):
                self.reason = "random numbers in an attribute that a message sets"
                return
        for node in drawing:
            arguments = dict(zip(("p", "training", "inplace"), node.args[1:], strict=False))
            node.args, node.kwargs = node.args[:1], arguments | node.kwargs | {"training": False}


_readings: dict[str, Reading] = {}
_numbers = count()


def begin(layer: MessagePassing, run: Run, reason: str) -> str:
    """Return the key of a new reading, which is valid while its layer lives.

    Args:
        layer: of the call.
        run: makes the call.
        reason: for PyG's own path, if there is one already.
    """
    key = str(next(_numbers))
    owner = weakref.ref(layer, lambda _: _readings.pop(key, None))
    _readings[key] = Reading(owner, run, reason or None)
    return key


def find(key: str) -> Reading:
    """Return a reading."""
    return _readings[key]


# Dynamo passes a view of the function that calls ``comptime``: its variable ``key`` is the key
# of the reading.


def before(context: ComptimeContext) -> None:
    """See :meth:`Reading.before`."""
    _of(context).before(context)


def after(context: ComptimeContext) -> None:
    """See :meth:`Reading.after`."""
    _of(context).after(context)


def accept(context: ComptimeContext) -> None:
    """See :meth:`Reading.accept`."""
    _of(context).accept(context)


def _of(context: ComptimeContext) -> Reading:
    return _readings[context.get_local("key").as_python_constant()]


def _output(context: ComptimeContext) -> Any:
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output


def _changed(context: ComptimeContext) -> dict[int, Any]:
    """Existing objects that Dynamo will change after the graph has run."""
    effects = _output(context).side_effects
    return {
        key: variable
        for key, variable in [*effects.id_to_variable.items()]  # reading one may create others
        if not isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        and effects.is_modified(variable)
    }


def _pending(context: ComptimeContext, variable: Any) -> dict[str, Any]:
    mutations: dict[str, Any] = _output(context).side_effects.store_attr_mutations.get(variable, {})
    return dict(mutations)


def _draws(node: Node) -> bool:
    if node.target not in (torch.nn.functional.dropout, torch.dropout):
        return False
    arguments: dict[str, Any] = dict(zip(("p", "training"), node.args[1:], strict=False))
    arguments |= node.kwargs
    return arguments.get("training", True) is not False and arguments.get("p", 0.5) != 0


# For numbers of edges that are no property of an input: the number of edges before the selection.
_PICKED: "weakref.WeakKeyDictionary[ShapeEnv, list[tuple[Any, int | torch.SymInt]]]" = (
    weakref.WeakKeyDictionary()
)


def _note_origin(edge_index: Node) -> None:
    """Store the number of edges of the input graphs from which an edge_index was computed."""
    size = edge_index.meta["example_value"].size(1)
    if not (isinstance(size, torch.SymInt) and free_unbacked_symbols(size)):
        return
    inputs, ancestors = [], [edge_index]
    for node in ancestors:  # as it grows
        ancestors += [one for one in node.all_input_nodes if one not in ancestors]
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor) and _is_edge_index(value):
            inputs.append(value.size(1))
    if inputs:
        origins = _PICKED.setdefault(size.node.shape_env, [])
        origins.append((size.node.expr, functools.reduce(torch.sym_max, inputs)))


def _is_edge_index(value: Tensor) -> bool:
    if value.dtype not in (torch.int32, torch.int64):
        return False
    return value.dim() == 2 and guard_or_false(value.size(0) == 2)


def picked_from(size: torch.SymInt) -> int | torch.SymInt:
    """Return the number of edges before their selection, or the same number."""
    env, expr = size.node.shape_env, size.node.expr
    origins = (origin for one, origin in _PICKED.get(env, ()) if env.replace(one) == expr)
    return next(origins, size)


class Look(TorchDispatchMode):
    """Counts draws of random numbers, and detects tensors that are unknown to Dynamo.

    Attributes:
        draws: number of operators that drew random numbers.
        foreign: whether an operator read a tensor with data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws, self.foreign = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        if not func.__name__.startswith("lift"):  # number literals
            self.foreign |= any(
                type(t) in (Tensor, torch.nn.Parameter) for t in tree_leaves((args, kwargs))
            )
        return func(*args, **(kwargs or {}))
