"""Models, their calls, and a comparison of captured calls with eager ones."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.utils._pytree import tree_leaves, tree_map_only

import pyg_accel

Inputs = dict[str, Any]


def module(forward: Callable[..., Any], **parts: Any) -> torch.nn.Module:
    """A module with this `forward` and these parts; tensors are buffers."""
    made = type("Model", (torch.nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if isinstance(part, Tensor):
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def conv(forward: Callable[..., Any], width: int = 4) -> torch.nn.Module:
    """A model with a layer from 6 features on."""
    return module(forward, conv=pyg.SAGEConv(6, width)).double()


def outcome(run: Callable[..., Any], call: Inputs | tuple[Any, ...]) -> list[Tensor]:
    """Results, gradients of arguments and parameters, and the buffers afterwards."""
    run.zero_grad()
    leaf = lambda t: t.clone().requires_grad_(t.is_floating_point())  # noqa: E731
    inputs = tree_map_only(Tensor, leaf, call)
    outs = tree_leaves(run(**inputs) if isinstance(inputs, dict) else run(*inputs))
    numbers = torch.Generator().manual_seed(3)
    weights = [torch.randn(o.shape, generator=numbers, dtype=o.dtype).to(o) for o in outs]
    sum((o * w).sum() for o, w in zip(outs, weights, strict=True)).backward()
    leaves = [*tree_leaves(inputs), *run.parameters()]
    grads = [t.grad.clone() for t in leaves if isinstance(t, Tensor) and t.grad is not None]
    return [*(o.detach() for o in outs), *grads, *(b.clone() for b in run.buffers())]


def close(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-8) -> None:
    """Compare tensors, relative to the largest element of each."""
    for one, other in zip(actual, expected, strict=True):
        scale = max(float(other.detach().abs().max()) if other.numel() else 0.0, 1e-3)
        torch.testing.assert_close(one, other, rtol=0, atol=max(tolerance * scale, 1e-9))


def same(
    model: torch.nn.Module, calls: Iterable[Any], tolerance: float = 1e-8, **options: Any
) -> Any:
    """Assert that captured calls are those of eager ones; return the captured model."""
    eager, fast = copy.deepcopy(model), pyg_accel.graphed(model, **options)
    for call in calls:
        expected = outcome(eager, call)
        close(outcome(fast, call), expected, tolerance)
    return fast


def some(batches: list[Inputs], *names: str) -> list[Inputs]:
    return [{name: batch[name] for name in names} for batch in batches]


def batch_of(graphs: int, seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    numbers = torch.Generator().manual_seed(seed)
    nodes = torch.randint(4, 12, (graphs,), generator=numbers)
    batch = torch.repeat_interleave(torch.arange(graphs), nodes)
    starts = nodes.cumsum(0) - nodes
    target = torch.randint(len(batch), (2 * len(batch) + seed % 7,), generator=numbers)
    place = torch.rand(len(target), generator=numbers) * nodes[batch[target]]
    return {
        "x": torch.randn(len(batch), 6, generator=numbers, dtype=dtype),
        "edge_index": torch.stack([starts[batch[target]] + place.long(), target]),
        "edge_attr": torch.randn(len(target), 3, generator=numbers, dtype=dtype),
        "batch": batch,
    }


SIZES = [5, 7, 6, 5, 8, 6, 4, 7, 6, 3]


def mlp(rows: int, hidden: int) -> Sequential:
    return Sequential(Linear(rows, hidden), BatchNorm1d(hidden), ReLU(), Linear(hidden, hidden))


class Network(torch.nn.Module):
    """Two layers, a normalisation and a reduction over each graph."""

    def __init__(self, conv: Callable[[int, int], torch.nn.Module],
                 norm: torch.nn.Module | None = None,
                 pool: Callable[..., Tensor] = pyg.global_mean_pool, *,
                 edges: bool = False, batched: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.first, self.second = conv(6, 8), conv(8, 8)
        self.norm, self.pool = norm, pool
        self.edges, self.batched = edges, batched
        self.head = Sequential(Linear(8, 8), BatchNorm1d(8), ReLU(), Linear(8, 2))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Any:
        more = (edge_attr,) if self.edges else ()
        x = self.first(x, edge_index, *more)
        if self.norm is not None:
            x = self.norm(x, batch) if self.batched else self.norm(x)
        x = self.second(x.relu(), edge_index, *more)
        return self.head(self.pool(x, batch)), x


def sampled() -> torch.nn.Module:
    """What batches of sampled neighbours are given to."""

    def forward(self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        x = self.norm(self.conv(x, edge_index)).relu()
        return self.last(x, edge_index, edge_weight)

    return module(
        forward, conv=pyg.SAGEConv(6, 8), norm=pyg.BatchNorm(8), last=pyg.GraphConv(8, 4)
    ).double()
