"""``optimize()``: the same model with the cheapest order of its matrix products."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, get_args

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import is_uninitialized_parameter as is_lazy

from pyg_accel.errors import VerificationError
from pyg_accel.layers.reading import FAILURES
from pyg_accel.rewrite.cost import CostModel
from pyg_accel.rewrite.halos import DISTRIBUTED
from pyg_accel.rewrite.layer import RewrittenLayer
from pyg_accel.rewrite.module import RewrittenModule
from pyg_accel.rewrite.select import Choose, Options
from pyg_accel.rewrite.shadow import Embedding, ShadowModules, stray
from pyg_accel.rewrite.trace import Unreadable, holds_layers, read
from pyg_accel.rewrite.tree import Tree
from pyg_accel.rewrite.verify import Outcome, differences, evaluated
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
    has sizes that differ by more than a factor of two. Parameters and buffers are shared with
    ``model``. Their names, results and gradients stay the same (up to rounding), and so does what
    ``train()`` and ``eval()`` do. Other layers stay as they are, and :func:`explain`
    says why. Code that a graph cannot stand for (contexts, assignments, branches) is run as it is
    on rewritten layers; the attribute ``unread`` of the result says where and why.

    The examples are run in both modes, with ``train=True`` backwards too. Buffers, random numbers
    and what else the model holds are as before afterwards.

    Args:
        model: any module made of PyG layers, or one layer.
        example_inputs: arguments of a call, e.g. ``x, edge_index``.
        train: forward and backward together are to be fast; by default forward alone.
        static: names of arguments that are the same tensors in every call, such as ``("x",)`` for
            the features of a fixed graph: what a layer aggregates of them is computed once. A
            change of the tensor is noticed.
        choose: an association to use in place of the choice: its text, a tree of
            :func:`~pyg_accel.rewrite.lift`, or a function that picks one of those it is
            given; for experiments.
        cost: a cost model in place of that of the device.
        price_all: predict the time of every association, also where sizes suffice to choose: what
            :func:`explain` shows.
        example_kwargs: arguments of that call by name.

    Returns:
        A module that is called like ``model``.

    Raises:
        ValueError: if ``model`` has no message passing layer, if ``static`` or ``choose`` names
            nothing, or if the examples do not fit or come in another order.
        TypeError: if an example is an array of numpy.
        VerificationError: with ``PYG_ACCEL_VERIFY=1``, if the result differs from the original's.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"expected 'model' to be a torch.nn.Module (got {model!r})")
    if any(isinstance(m, RewrittenLayer) for m in model.modules()):
        raise ValueError("expected a model that is not rewritten yet: optimize the original again")
    if any(m in DISTRIBUTED for m in model.modules()):
        raise ValueError("expected a model before distribute(): optimize() it, then distribute it")
    if not any(isinstance(m, MessagePassing) for m in model.modules()):
        raise ValueError(f"{type(model).__name__} has no message passing layer to rewrite")
    given = _bind(model, example_inputs, example_kwargs)
    static = _checked(train, static, choose, cost, price_all, given)
    if any(is_lazy(p) for p in model.parameters()):  # sizes are known after a first call
        evaluated(model, example_inputs, example_kwargs)
    options = Options(train=train, choose=choose, cost=cost, price_all=price_all)
    name = type(model).__name__
    copied = _copied(model, options)
    if held := stray(_by_path(copied), {id(m) for m in model.modules()}):
        why = f"'{held}' holds the model that it is a part of: nothing is rewritten"
        return RewrittenModule.of(model, None, {"": why}, name)
    graph, unread = _read(copied, given)
    _tell(copied, graph, given, static)
    if static and not any(
        isinstance(m, RewrittenLayer) and m.options.static for m in _within(copied)
    ):
        warnings.warn(
            f"static={list(static)} has no effect: no layer gets {' or '.join(static)} as it is"
            + "".join(f"; {path or 'the model'} is not read: {why}"
                      for path, why in unread.items()), stacklevel=2,
        )  # fmt: skip
    expected = evaluated(copied, example_inputs, example_kwargs)
    fast = RewrittenModule.of(copied, graph, unread, name)
    if graph is not None:
        wrong = _misread(copied, fast, example_inputs, example_kwargs, expected, train)
        if wrong:
            fast = RewrittenModule.of(copied, None, unread | {"": wrong}, name)
    if settings.verify:
        stock, mine = (
            evaluated(m, example_inputs, example_kwargs, gradients=train) for m in (model, fast)
        )
        if wrong := differences(stock, mine):
            raise VerificationError(f"{name}, rewritten: {wrong}")
    return fast


def _checked(
    train: Any, static: Any, choose: Any, cost: Any, price_all: Any, given: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names of the static arguments; refuse options that mean nothing."""
    for name, value in {"train": train, "price_all": price_all}.items():
        if not isinstance(value, bool):
            raise ValueError(f"expected '{name}' to be True or False (got {value!r})")
    names = (static,) if isinstance(static, str) else static
    if names is None:
        names = ()
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"expected 'static' to be names of arguments (got {_short(static)})")
    if unknown := [name for name in names if name not in given]:
        raise ValueError(f"expected 'static' to name arguments of the model (got {unknown})")
    if not (choose is None or callable(choose) or isinstance(choose, (str, *get_args(Tree)))):
        raise ValueError(f"expected 'choose' to be a text, a tree or a function (got {choose!r})")
    if cost is not None and not callable(getattr(cost, "many", None)):
        raise ValueError(f"expected 'cost' to be a CostModel (got {cost!r})")
    return tuple(names)


def _short(value: Any) -> str:
    """Text of a wrong argument; tensors are abbreviated."""
    return type(value).__name__ if isinstance(value, (Tensor, list, tuple)) else repr(value)


def _misread(
    copied: torch.nn.Module,
    fast: RewrittenModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    expected: Outcome,
    train: bool,
) -> str:
    """Why a graph is not what the code means, or nothing.

    Code that was read may mean something else on symbols, so it is run as it is beside that, in
    both modes. Both run the same layers: what PyG would compute may not even fit into memory.
    """
    try:
        if wrong := differences(expected, evaluated(fast, args, kwargs)):
            return f"its graph computes something else: {wrong}"
    except FAILURES as error:
        return f"its graph cannot be run: {type(error).__name__}: {error}"
    try:
        expected, found = (
            evaluated(m, args, kwargs, mode=True, gradients=train) for m in (copied, fast)
        )
    except FAILURES as error:  # one batch of one node, no labels: its graph cannot be compared
        return f"it cannot be run in training mode: {type(error).__name__}: {error}"
    wrong = differences(expected, found)
    return f"its graph computes something else in training mode: {wrong}" if wrong else ""


def _bind(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"the examples do not fit {type(model).__name__}: {error} (expected them as the model "
            "takes them, one by one: optimize(model, x, edge_index))"
        ) from None
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        _check_example(name, value)
    return dict(bound.arguments)


def _check_example(name: str, value: Any) -> None:
    """Refuse arrays of numpy, features in the place of a graph, and a graph in theirs."""
    if type(value).__module__.partition(".")[0] == "numpy":
        raise TypeError(f"expected '{name}' to be a tensor (got {_array(value)}); use "
                        "torch.from_numpy")  # fmt: skip
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return
    whole = not value.is_floating_point() and not value.is_complex()
    if name == "edge_index" and (not whole or value.dim() != 2 or value.size(0) != 2):
        raise ValueError(f"expected 'edge_index' to be whole numbers [2, E] (got {value.dtype} "
                         f"{list(value.shape)}; arguments in another order?)")  # fmt: skip


def _array(value: Any) -> str:
    """A numpy value in a message."""
    return f"numpy.{type(value).__name__} {list(getattr(value, 'shape', ()))}"


def _copied(model: torch.nn.Module, options: Options) -> torch.nn.Module:
    """A copy of the model with rewritten layers, and modes of its own."""

    def stand_in(module: torch.nn.Module) -> torch.nn.Module | None:
        return RewrittenLayer(module, options) if isinstance(module, MessagePassing) else None

    copied = ShadowModules(stand_in)(model)
    for module in _within(copied):
        if type(module) is torch.nn.Embedding:
            module.__class__ = Embedding
    return copied


def _by_path(module: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """The copies of modules, by path: those outside of layers, and of a layer its shadow."""
    if isinstance(module, RewrittenLayer):
        return {path: module.conv}
    found = {path: module}
    for name, child in module._modules.items():
        if child is not None:
            found |= _by_path(child, f"{path}.{name}" if path else name)
    return found


def _within(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and those inside, but for what is inside of layers."""
    yield module
    if not isinstance(module, RewrittenLayer):
        for child in module.children():
            yield from _within(child)


def _read(
    copied: torch.nn.Module, given: Mapping[str, Any]
) -> tuple[fx.Graph | None, dict[str, str]]:
    """The graph of a model, if it has one, and why modules are not read: they keep their code."""
    unread: dict[str, str] = {}
    while holds_layers(copied) and "" not in unread:
        try:
            return read(copied, given, unread), unread
        except Unreadable as error:
            unread[error.path] = str(error)
    return None, unread


def _tell(
    copied: torch.nn.Module,
    graph: fx.Graph | None,
    given: Mapping[str, Any],
    static: Sequence[str],
) -> None:
    """Tell every layer that the graph calls what is known of its features."""
    if isinstance(copied, RewrittenLayer):
        learn = _requires_grad(given.get("x"))
        copied.options = replace(copied.options, static="x" in static, upstream=learn)
    if graph is None:
        return
    learns: dict[fx.Node, bool] = {}
    known: set[int] = set()
    for node in graph.nodes:
        learns[node] = any(learns[n] for n in node.all_input_nodes)
        if node.op == "placeholder":
            learns[node] = _requires_grad(given.get(node.target))
        elif node.op == "get_attr":
            learns[node] = _requires_grad(_attribute(copied, node.target))
        elif node.op == "call_module":
            layer = copied.get_submodule(node.target)
            if isinstance(layer, RewrittenLayer):
                sources = _nodes_in(node.args[0] if node.args else node.kwargs.get("x"))
                fixed = bool(sources) and all(_names_one_of(n, static) for n in sources)
                learn = any(learns[n] for n in sources)
                if id(layer) in known:  # called twice: what holds for both
                    fixed = fixed and layer.options.static
                    learn = learn or bool(layer.options.upstream)
                layer.options = replace(layer.options, static=fixed, upstream=learn)
                known.add(id(layer))
            learns[node] |= any(p.requires_grad for p in layer.parameters())


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
