"""Layers behind a ReLU in user-written models, found with torch.fx and swapped in place."""

import inspect
import operator
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import Dropout, Identity, Module
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing, Sequential

from pyg_accel.layers.reading import Reader, Unreadable, kinds_of, read
from pyg_accel.layers.swaps import Swap, swap, why_not

__all__ = ["swap_pairs"]

_RELUS = {F.relu, torch.relu, torch.relu_, F.relu_}
_PASSES = (Dropout, Identity)
_KEPT = "the forward is the model's own"


def swap_pairs(model: Module, k: int, leaves: Collection[int]) -> list[Swap]:
    """Swap the layers that are called on the result of a ReLU, wherever they are called.

    The forward of the model stays what it is, with its ReLU: MaxK selects from what that lets
    through.

    Args:
        model: a model, whose layers are changed.
        k: how many features to keep.
        leaves: ids of modules that have been dealt with.

    Returns:
        What became of its layers.
    """
    convs = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, MessagePassing) and id(m) not in leaves
    }
    graph, unread = fx.Graph(), ""
    try:
        graph = _graph_of(model, leaves)
    except Unreadable as error:
        unread = f"torch.fx cannot read the forward: {error}"
    swaps = []
    for name, conv in convs.items():
        calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
        reason = why_not(conv, k) or unread
        if not reason and not getattr(conv, "project", False):  # that brings its own ReLU
            if not calls:
                reason = "torch.fx does not see it being called"
            elif not all(_is_behind_relu(model, call) for call in calls):
                reason = "no ReLU in front of it"
        swaps.append(
            Swap(name, type(conv).__name__, reason) if reason else swap(name, conv, k, _KEPT)
        )
    return swaps


class _Reader(Reader):
    """Records calls of layers, PyG's and torch's, and looks into everything else."""

    def __init__(self, leaves: Collection[int]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        known = isinstance(m, MessagePassing) or id(m) in self._leaves
        return known or fx.Tracer.is_leaf_module(self, m, module_qualified_name)


def _graph_of(model: Module, leaves: Collection[int]) -> fx.Graph:
    """The calls of a model that is given what its forward has no default for."""
    if isinstance(model, MessagePassing):
        raise Unreadable("it is the whole model: no ReLU in front of it")
    if isinstance(model, Sequential):
        return _written(model)
    options = inspect.signature(model.forward).parameters.values()
    empty = inspect.Parameter.empty
    example = {p.name: kinds_of(p.default) for p in options if p.default is not empty}
    return read(model, example, partial(_Reader, leaves))


def _written(model: Sequential) -> fx.Graph:
    """The graph of PyG's Sequential: a list of calls, by a forward without argument names."""
    graph = fx.Graph()
    known: dict[str, Any] = {name: graph.placeholder(name) for name in model.signature.param_dict}
    out: Any = None
    for child in model._children:
        given = tuple(known[name] for name in child.param_names)
        module = getattr(model, child.name)
        if isinstance(module, Module):
            out = graph.call_module(child.name, given)
        else:
            out = graph.call_function(module, given)
        several = len(child.return_names) > 1
        for i, name in enumerate(child.return_names):
            known[name] = graph.call_function(operator.getitem, (out, i)) if several else out
    graph.output(out)
    return graph


def _is_behind_relu(model: Module, call: fx.Node) -> bool:
    """Whether features of a call come from a ReLU, with nothing but dropout in between."""
    node: Any = call.args[0] if call.args else call.kwargs.get("x")
    while isinstance(node, fx.Node):
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, torch.nn.ReLU) or node.target in _RELUS:
            return True
        if node.op == "call_method" and node.target in ("relu", "relu_"):
            return True
        if node.target is not F.dropout and not isinstance(module, _PASSES):
            return False
        node = node.args[0]
    return False
