"""The calls of a model's layers, as text."""

from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn import MessagePassing

__all__ = ["calls_of"]

MOST = 6  # calls between a layer and the layers that its arguments come from, in a text


def calls_of(model: torch.nn.Module, graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return the calls of every layer as text, by its path in the model."""
    found: dict[str, tuple[str, ...]] = {}

    def text(value: Any, depth: int) -> str:
        if isinstance(value, Tensor):
            return "a tensor"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(text(v, depth) for v in value)})"
        if not isinstance(value, fx.Node):
            return str(value)
        if value.op in ("placeholder", "get_attr") or value.target in found:
            return str(value.target)
        return call(value, depth - 1) if depth else "…"

    def call(node: fx.Node, depth: int) -> str:
        given = [text(v, depth) for v in node.args]
        name = getattr(node.target, "__name__", node.target)
        if name in ("getitem", "getattr"):
            return f"{given[0]}[{given[1]}]" if name == "getitem" else f"{given[0]}.{given[1]}"
        given += [f"{key}={text(v, depth)}" for key, v in node.kwargs.items()]
        return f"{name}({', '.join(given)})"

    for node in graph.nodes:
        if node.op == "call_module" and isinstance(
            model.get_submodule(node.target), MessagePassing
        ):
            found[node.target] = (*found.get(node.target, ()), call(node, MOST))
    return found
