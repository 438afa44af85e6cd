"""The calls of layers in the code of a model, from a torch.fx graph: for people to read."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric import utils
from torch_geometric.nn import MessagePassing, pool

from pyg_accel.layers.reading import FAILURES
from pyg_accel.module_state import as_it_was

__all__ = ["Unreadable", "calls_of", "kinds_of", "read"]

MOST = 6  # nested calls in the text of an argument


class Unreadable(Exception):
    """The code of a model cannot be traced with torch.fx; the text says why."""


class _Symbol:
    """Stands for an argument of the graph: a tensor, or an object that has tensors."""


def kinds_of(value: Any) -> Any:
    """Return an argument with symbols in place of everything but constants."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(kinds_of, value))
    return {k: kinds_of(v) for k, v in value.items()} if type(value) is dict else _Symbol()


def _opened(kind: Any, symbol: Any) -> Any:
    """Return an argument with the proxy of the whole, or parts of it, in place of symbols."""
    if isinstance(kind, _Symbol):
        return symbol
    if isinstance(kind, (tuple, list)):
        return type(kind)(_opened(inner, symbol[i]) for i, inner in enumerate(kind))
    return {k: _opened(v, symbol[k]) for k, v in kind.items()} if isinstance(kind, dict) else kind


class _Tracer(fx.Tracer):
    """Records calls of layers, and of modules without layers."""

    def __init__(self, example: Mapping[str, Any]) -> None:
        functions = [f for module in (utils, pool) for f in vars(module).values()
                     if isinstance(f, FunctionType)]  # fmt: skip
        super().__init__(autowrap_functions=tuple(functions))  # they branch on their arguments
        self._example = example

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MessagePassing) or not any(
            isinstance(inner, MessagePassing) for inner in m.modules()
        )

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Pass proxies, or structures of proxies and constants, for parameters of any kind."""
        args: list[Any] = []
        named: dict[str, Any] = {}
        for name, parameter in list(signature(root_fn).parameters.items())[1:]:
            symbol = self.create_proxy("placeholder", name, (), {})
            value = _opened(self._example.get(name), symbol)
            if parameter.kind is Parameter.VAR_POSITIONAL:
                args += value
            elif parameter.kind is Parameter.VAR_KEYWORD:
                named |= value
            elif parameter.kind is Parameter.KEYWORD_ONLY:
                named[name] = value
            else:
                args.append(value)
        return lambda root: root_fn(root, *args, **named), [self.root]


def read(model: torch.nn.Module, example: Mapping[str, Any]) -> fx.Graph:
    """Trace the calls of a model, and restore its state afterwards.

    Args:
        model: any module.
        example: :func:`kinds_of` the arguments of a call, by name.

    Raises:
        Unreadable: if its code needs values that proxies do not have.
    """
    with as_it_was(model.modules()):
        try:
            return _Tracer(example).trace(model)
        except FAILURES as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise Unreadable(reason) from error


def calls_of(model: torch.nn.Module, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return the calls of every layer as text, by its path in the model."""
    calls: dict[str, tuple[str, ...]] = {}

    def text(value: Any, depth: int) -> str:
        if isinstance(value, Tensor):
            return "a tensor"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(text(v, depth) for v in value)})"
        if not isinstance(value, fx.Node):
            return str(value)
        if value.op in ("placeholder", "get_attr") or value.target in calls:
            return str(value.target)
        return call(value, depth - 1) if depth else "…"

    def call(node: fx.Node, depth: int) -> str:
        args = [text(v, depth) for v in node.args]
        name = getattr(node.target, "__name__", node.target)
        if name == "getitem":
            return f"{args[0]}[{args[1]}]"
        if name == "getattr":
            return f"{args[0]}.{args[1]}"
        args += [f"{key}={text(v, depth)}" for key, v in node.kwargs.items()]
        return f"{name}({', '.join(args)})"

    for node in graph.nodes:
        if node.op == "call_module" and isinstance(
            model.get_submodule(node.target), MessagePassing
        ):
            calls[node.target] = (*calls.get(node.target, ()), call(node, MOST))
    return calls
