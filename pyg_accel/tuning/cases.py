"""Layers of every kind of call, and what a training step or a prediction does with them."""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_accel.settings import settings

__all__ = ["DEGREE", "in_patch", "layers", "step"]

_nn: Any = torch_geometric.nn  # whose layers type checkers take for abstract
DEGREE, RELATIONS, EDGE_FEATURES = 8, 4, 16


def layers(features: int) -> dict[str, tuple[str, torch.nn.Module]]:
    """Return layers of every kind of call, by name, each with the name of its kind."""
    f, heads = features, {"heads": 4, "out_channels": features // 4}
    narrow = {"heads": 4, "out_channels": min(features // 4, 8)}
    with_edges, linear = {"edge_dim": EDGE_FEATURES}, torch.nn.Linear(features, features)
    return {
        "SAGEConv mean": ("sums", _nn.SAGEConv(f, f)),
        "GraphConv weighted": ("sums", _nn.GraphConv(f, f)),
        "SAGEConv max": ("sums", _nn.SAGEConv(f, f, aggr="max")),
        "EGConv": ("other sums", _nn.EGConv(f, f)),
        "FiLMConv": ("messages", _nn.FiLMConv(f, f)),
        "ResGatedGraphConv": ("messages", _nn.ResGatedGraphConv(f, f)),
        "GENConv": ("other messages", _nn.GENConv(f, f)),
        "HypergraphConv": ("other messages", _nn.HypergraphConv(f, f)),
        "GATConv": ("attention", _nn.GATConv(f, **heads)),
        "GATv2Conv": ("attention", _nn.GATv2Conv(f, **heads)),
        "GINEConv": ("edge features", _nn.GINEConv(linear, **with_edges)),
        "TransformerConv": ("edge attention", _nn.TransformerConv(f, **narrow, **with_edges)),
        "AGNNConv": ("other attention", _nn.AGNNConv()),
        "GENConv with edges": ("other edge features", _nn.GENConv(f, f, **with_edges)),
        "EdgeConv": ("edge networks", _nn.EdgeConv(_network(2 * f, f, f))),
        "NNConv": ("edge matrices", _nn.NNConv(f, 8, _network(EDGE_FEATURES, 32, 8 * f))),
        "RGCNConv": ("relations", _nn.RGCNConv(f, f, RELATIONS)),
    }


def _network(inputs: int, hidden: int, outputs: int) -> torch.nn.Module:
    first, last = torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, outputs)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last)


def step(
    kind: str, layer: torch.nn.Module, x: Tensor, edge_index: Tensor, *, fresh: bool, train: bool
) -> Callable[[], None]:
    """Return a call of a layer, with its backward pass to train.

    Args:
        kind: of call, as :func:`layers` names it.
        layer: to call.
        x: [N, F].
        edge_index: [2, E].
        fresh: every call has a new edge_index.
        train: run the backward pass as well.
    """
    edges = edge_index.size(1)
    rest: list[Tensor] = []
    if isinstance(layer, _nn.GraphConv):
        rest = [x.new_ones(edges)]
    elif kind in ("edge features", "other edge features", "edge attention", "edge matrices"):
        rest = [torch.randn(edges, EDGE_FEATURES, device=x.device)]
    elif kind == "relations":
        rest = [torch.randint(RELATIONS, (edges,), device=x.device)]

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = layer(x, edge_index.clone() if fresh else edge_index, *rest)
        if train:
            out.sum().backward()
        if out.is_cuda:
            torch.cuda.synchronize()

    return run


def in_patch(run: Callable[[], None]) -> Callable[[], None]:
    """Return the same call, accelerated whatever its size.

    ``patch()`` is on for the whole measurement, so stock calls pass through its wrappers too: what
    is compared is the choice that a threshold makes.
    """

    def patched() -> None:
        settings.always = True
        run()
        settings.always = False

    return patched
