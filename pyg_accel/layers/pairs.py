"""Finds pairs of ReLU and convolution in user-written models with torch.fx, and swaps them.

torch.fx records one run of the forward. A model is refused if another run records other calls: in
evaluation mode, or without an optional argument.
"""

import inspect
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.nn import Dropout, Identity, Module
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing, Sequential

from pyg_accel.hooks import has_hooks
from pyg_accel.layers.reading import FAILURES, LeftOut, Reader
from pyg_accel.layers.recorded import Recorded
from pyg_accel.layers.swaps import Swap, swap, why_not
from pyg_accel.module_state import CONSTANT, as_it_was

__all__ = ["swap_pairs"]

_RELUS = {F.relu, torch.relu, torch.relu_, F.relu_}
_IN_PLACE = {torch.relu_, F.relu_, "relu_"}
_PASSES = (Dropout, Identity)


def swap_pairs(model: Module, k: int, leaves: Collection[int]) -> tuple[Module, list[Swap]]:
    """Swap all pairs in a model.

    Args:
        model: a model, whose layers are changed.
        k: how many features to keep.
        leaves: ids of modules that are not traced.

    Returns:
        A module that runs the graph, or the model itself if nothing was swapped; and a
        :class:`~pyg_accel.layers.swaps.Swap` for each layer.
    """
    convs = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, MessagePassing) and id(m) not in leaves
    }
    try:
        if isinstance(model, Sequential):
            graph = _graph_of_sequential(model)
        else:
            graph = _recorded(model, leaves)
    except LeftOut as reason:
        return model, [
            Swap(n, type(m).__name__, why_not(m, k) or str(reason)) for n, m in convs.items()
        ]
    pairs: dict[fx.Node, fx.Node] = {}  # calls of layers and the ReLU in front of them
    reasons: dict[str, str] = {}
    for name, conv in convs.items():
        calls = [n for n in graph.nodes if n.op == "call_module" and n.target == name]
        relus = [_relu_in_front(model, call) for call in calls]
        reasons[name] = why_not(conv, k)
        if getattr(conv, "project", False):
            continue  # the layer has a ReLU inside
        if not calls:
            reasons[name] = reasons[name] or "torch.fx does not see it being called"
        elif None in relus:
            reasons[name] = reasons[name] or "no ReLU in front of it"
        if not reasons[name]:
            pairs |= {call: relu for call, relu in zip(calls, relus, strict=True) if relu}
    kept = {relu: _why_kept(model, relu, pairs) for relu in pairs.values()}
    swaps = []
    for name, conv in convs.items():
        if reasons[name]:
            swaps.append(Swap(name, type(conv).__name__, reasons[name]))
            continue
        why = "; ".join({kept[relu] for call, relu in pairs.items() if call.target == name} - {""})
        swaps.append(swap(name, conv, k, why))
    for relu, why in kept.items():
        if not why:
            relu.replace_all_uses_with(relu.all_input_nodes[0])
            graph.erase_node(relu)
    if not any(s.swapped for s in swaps):
        return model, swaps
    graph.lint()
    return Recorded(model, graph), swaps


def _recorded(model: Module, leaves: Collection[int]) -> fx.Graph:
    """Record the forward of a model, with modules for dropout, so that it depends on the mode."""
    if isinstance(model, MessagePassing):
        raise LeftOut("it is the whole model: no ReLU in front of it")
    options = inspect.signature(model.forward).parameters.values()
    without = {p.name: None for p in options if p.default is None}
    try:
        evaluated, _ = _read(model, False, leaves)
        shorter = _read(model, True, leaves, without)[0] if without else None
        graph, constants = _read(model, True, leaves)
    except FAILURES as error:
        raise LeftOut(f"torch.fx cannot read the forward: {error}") from error
    vars(model).update(constants)
    shorter = shorter or graph
    if _calls(graph) != _calls(shorter):
        raise LeftOut("the forward depends on whether an optional argument is given")
    if _calls(graph) != _calls(evaluated):
        raise LeftOut("the forward depends on the mode, training or evaluation")
    for node, other in zip(list(graph.nodes), evaluated.nodes, strict=True):
        if (str(node.args), str(node.kwargs)) == (str(other.args), str(other.kwargs)):
            continue
        if node.target is not F.dropout:
            raise LeftOut("the forward depends on the mode, training or evaluation")
        bound = inspect.signature(F.dropout).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        name = f"maxk_{node.name}"
        model.add_module(name, Dropout(bound.arguments["p"]).train(model.training))
        node.op, node.target, node.kwargs = "call_module", name, {}
        node.args = (bound.arguments["input"],)
    return graph


def _read(
    model: Module, mode: bool, leaves: Collection[int], without: dict[str, None] | None = None
) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the calls of a model in a mode, and constant tensors that its code creates."""
    modules = list(model.modules())
    with as_it_was(modules):
        model.train(mode)
        tracer = Reader(leaves)
        for module in modules:
            if not tracer.is_leaf_module(module, "") and has_hooks(module):
                raise LeftOut(f"a hook on {type(module).__name__} would not be run")
        with as_it_was(modules) as state:
            graph = tracer.trace(model, without)
            if change := state.changed():
                raise LeftOut(f"{change}, and a graph would not")
            constants = {n: v for n, v in vars(model).items() if n.startswith(CONSTANT)}
    return graph, constants


def _graph_of_sequential(model: Sequential) -> fx.Graph:
    """Return the graph of PyG's Sequential, which torch.fx cannot trace: it takes ``*args``."""
    graph = fx.Graph()
    values: dict[str, Any] = {name: graph.placeholder(name) for name in model.signature.param_dict}
    out: Any = None
    for child in model._children:
        args = tuple(values[name] for name in child.param_names)
        module = getattr(model, child.name)
        if isinstance(module, Module):
            out = graph.call_module(child.name, args)
        else:
            out = graph.call_function(module, args)
        several = len(child.return_names) > 1
        for i, name in enumerate(child.return_names):
            values[name] = graph.call_function(operator.getitem, (out, i)) if several else out
    graph.output(out)
    return graph


def _calls(graph: fx.Graph) -> list[tuple[str, Any]]:
    """Return the calls of a graph, without the checks that fx adds for constant arguments."""
    return [
        (n.op, n.target)
        for n in graph.nodes
        if n.op != "placeholder" and not getattr(n.target, "__name__", "").startswith("_assert")
    ]


def _module(model: Module, node: fx.Node) -> Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _features_of(call: fx.Node) -> Any:
    return call.args[0] if call.args else call.kwargs.get("x")


def _passes(model: Module, node: fx.Node) -> bool:
    """Whether a call between a ReLU and a layer preserves zeros and signs."""
    return node.target is F.dropout or isinstance(_module(model, node), _PASSES)


def _is_relu(model: Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(_module(model, node), torch.nn.ReLU)
    return node.target in _RELUS or (node.op == "call_method" and node.target in ("relu", "relu_"))


def _relu_in_front(model: Module, call: fx.Node) -> fx.Node | None:
    node = _features_of(call)
    while isinstance(node, fx.Node) and _passes(model, node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _is_relu(model, node) else None


def _why_kept(model: Module, relu: fx.Node, pairs: dict[fx.Node, fx.Node]) -> str:
    """Return why a ReLU stays; empty if only swapped layers read it."""
    readers = [(relu, user) for user in relu.users]
    while readers:
        node, user = readers.pop()
        uses = sum(arg is node for arg in (*user.args, *user.kwargs.values()))
        if user in pairs and _features_of(user) is node and uses == 1:
            continue
        if not _passes(model, user):
            return f"{user.name} reads it as well"
        readers += [(user, reader) for reader in user.users]
    module = _module(model, relu)
    in_place = relu.target in _IN_PLACE or relu.kwargs.get("inplace") or True in relu.args
    in_place = in_place or bool(getattr(module, "inplace", False))
    if in_place and len(relu.all_input_nodes[0].users) > 1:
        return "it works in place, on what others read"
    return ""
