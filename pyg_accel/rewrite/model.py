"""``optimize()``: the same model with the cheapest order of its matrix products."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import is_uninitialized_parameter as is_lazy

from pyg_accel.errors import VerificationError
from pyg_accel.rewrite.choice import Choose
from pyg_accel.rewrite.copies import clone, with_embeddings
from pyg_accel.rewrite.cost import CostModel
from pyg_accel.rewrite.decision import Options
from pyg_accel.rewrite.layer import Associated
from pyg_accel.rewrite.module import Rewritten
from pyg_accel.rewrite.trace import Mode, Unreadable, holds_layers, trace
from pyg_accel.rewrite.verify import differences, evaluated
from pyg_accel.settings import settings

__all__ = ["optimize"]


def optimize(
    model: torch.nn.Module,
    *example_inputs: Any,
    train: bool = False,
    static: Sequence[str] | None = (),
    choose: Choose | None = None,
    cost: CostModel | None = None,
    price_all: bool = False,
    **example_kwargs: Any,
) -> fx.GraphModule:
    """Rewrite a model so that each layer multiplies its matrices in the fastest order.

    Layers are lifted into products of matrices, all orders are enumerated, and one is chosen for
    the sizes, the graph and the machine at hand: now for the examples, and again whenever a call
    has sizes that differ by more than a factor of two. Parameters are shared with ``model``; names,
    results and gradients stay the same (up to rounding), and so does what ``train()`` and
    ``eval()`` do. Layers that no rule covers stay as they are, and :func:`explain` says why.

    Args:
        model: any module made of PyG layers, or one layer.
        example_inputs: arguments of a call, e.g. ``x, edge_index``.
        train: forward and backward together are to be fast; by default forward alone.
        static: names of arguments that are the same tensors in every call, such as ``("x",)`` for
            the features of a fixed graph: what a layer aggregates of them is computed once. A
            change of the tensor is noticed.
        choose: an association to use in place of the choice: its text, a tree of
            :func:`~pyg_accel.rewrite.associations`, or a function that picks one of those it is
            given; for experiments.
        cost: a cost model in place of that of the device.
        price_all: predict the time of every association, also where sizes suffice to choose: what
            :func:`explain` shows.
        example_kwargs: arguments of that call by name.

    Returns:
        A module that is called like ``model``.

    Raises:
        ValueError: if ``model`` has no message passing layer, if ``static`` or ``choose`` names
            nothing, or if the examples do not fit.
        VerificationError: with ``PYG_ACCEL_VERIFY=1``, if the result differs from the original's.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
    if any(isinstance(m, Associated) for m in model.modules()):
        raise ValueError("expected a model that is not rewritten yet: optimize the original again")
    if not any(isinstance(m, MessagePassing) for m in model.modules()):
        raise ValueError(f"{type(model).__name__} has no message passing layer to rewrite")
    static = (static,) if isinstance(static, str) else tuple(static or ())
    given = _bind(model, example_inputs, example_kwargs)
    if unknown := [name for name in static if name not in given]:
        raise ValueError(f"expected 'static' to name arguments of the model (got {unknown})")
    if any(is_lazy(p) for p in model.parameters()):  # sizes are known after a first call
        evaluated(model, example_inputs, example_kwargs)
    options = Options(train=train, choose=choose, cost=cost, price_all=price_all)
    layers: dict[int, Associated] = {}
    fast = _read(model, given, options, static, layers)
    if static and not any(isinstance(m, Associated) and m.options.static for m in fast.modules()):
        warnings.warn(
            f"static={list(static)} has no effect: no layer gets {' or '.join(static)} as it is"
            + "".join(f"; {path or 'the model'} is not read: {why}"
                      for path, why in fast.unread.items()), stacklevel=2,
        )  # fmt: skip
    found = evaluated(fast, example_inputs, example_kwargs)
    if not fast.is_whole:
        # Code that was read may mean something else on symbols, so it is run as it is beside that.
        # Both run the same layers: what PyG would compute may not even fit into memory.
        whole = Rewritten.whole(model, _by_parts(model, options, layers), {}, given)
        expected = evaluated(whole, example_inputs, example_kwargs)
        if wrong := differences(expected, found):
            whole.unread[""] = f"its graph computes something else: {wrong}"
            fast, found = whole, expected
    if settings.verify:
        stock = evaluated(model, example_inputs, example_kwargs)
        if wrong := differences(stock, found):
            raise VerificationError(f"{type(model).__name__}, rewritten: {wrong}")
    return fast


def _bind(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"the examples do not fit {type(model).__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _read(
    model: torch.nn.Module,
    given: Mapping[str, Any],
    options: Options,
    static: Sequence[str],
    layers: dict[int, Associated],
) -> Rewritten:
    """Read the model; modules that cannot be read keep their code, with rewritten children."""
    unread: dict[str, str] = {}
    opaque: dict[str, torch.nn.Module] = {}
    while "" not in unread and holds_layers(model):
        try:
            root, graph = trace(model, given, opaque)
        except Unreadable as error:
            unread[error.path] = str(error)
            if error.path:
                module = model.get_submodule(error.path)
                opaque[error.path] = _by_parts(module, options, layers)
            continue
        found = _layers(root, graph, given, options, static)
        layers.update({id(layer.source): layer for layer in found.values()})
        return Rewritten.of(model, root, graph, found, unread)
    if isinstance(model, MessagePassing):
        learn = _requires_grad(given.get("x"))
        options = replace(options, static="x" in static, upstream=learn)
    return Rewritten.whole(model, _by_parts(model, options, layers), unread, given)


def _by_parts(
    module: torch.nn.Module, options: Options, layers: dict[int, Associated]
) -> torch.nn.Module:
    """Return a module that runs the code of this one on rewritten layers."""
    if isinstance(module, MessagePassing):
        return layers.setdefault(id(module), Associated(module, options))
    copied = clone(module)
    for name, child in module._modules.items():
        if child is not None and (isinstance(child, MessagePassing) or holds_layers(child)):
            copied._modules[name] = _by_parts(child, options, layers)
        elif child is not None:
            copied._modules[name] = with_embeddings(child)
    return copied


def _layers(
    root: torch.nn.Module,
    graph: fx.Graph,
    given: Mapping[str, Any],
    options: Options,
    static: Sequence[str],
) -> dict[str, Associated]:
    """The layers that the graph calls, by path, each told what is known of its features."""
    learns: dict[fx.Node, bool] = {}
    known: dict[int, Options] = {}
    calls: list[tuple[str, MessagePassing]] = []
    for node in graph.nodes:
        learns[node] = any(learns[n] for n in node.all_input_nodes)
        if node.op == "placeholder":
            learns[node] = _requires_grad(given.get(node.target))
        elif node.op == "get_attr":
            learns[node] = _requires_grad(_attribute(root, node.target))
        elif node.op == "call_module":
            module = root.get_submodule(node.target)
            if isinstance(module, MessagePassing):
                features = node.args[0] if node.args else node.kwargs.get("x")
                sources = _nodes_in(features)
                fixed = bool(sources) and all(_names_one_of(n, static) for n in sources)
                learn = any(learns[n] for n in sources)
                before = known.get(id(module), options)
                if id(module) in known:  # called twice: what holds for both
                    fixed, learn = fixed and before.static, learn or bool(before.upstream)
                known[id(module)] = replace(options, static=fixed, upstream=learn)
                calls.append((node.target, module))
            learns[node] |= not isinstance(module, Mode) and any(
                p.requires_grad for p in module.parameters()
            )
    made = {id(module): Associated(module, known[id(module)]) for _, module in calls}
    return {path: made[id(module)] for path, module in calls}


def _names_one_of(node: fx.Node, names: Sequence[str]) -> bool:
    return node.op == "placeholder" and node.target in names


def _nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument; elements of an argument of the model are that argument."""
    found: list[fx.Node] = []

    def add(node: fx.Node) -> fx.Node:
        while node.op == "call_function" and node.name.startswith("getitem"):
            inner = node.args[0]
            if not isinstance(inner, fx.Node) or inner.op != "placeholder":
                break
            node = inner
        found.append(node)
        return node

    fx.node.map_arg(value, add)
    return found


def _requires_grad(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


def _attribute(root: torch.nn.Module, path: str) -> Any:
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name)
    return found
