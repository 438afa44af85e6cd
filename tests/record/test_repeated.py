"""A call that a program gives up is made again: nothing may have happened that counts twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d
from torch.nn.functional import dropout, linear
from torch_geometric.nn import MessagePassing

import pyg_accel

N, E, F = 50, 400, 6


class Layer(MessagePassing):
    """Sums of what a function of the layer and the arguments makes of features."""

    def __init__(self, prepare: Callable[..., Any]) -> None:
        super().__init__()
        self.norm, self.prepare = BatchNorm1d(F), prepare

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x, edge_index, scale = self.prepare(self, x, edge_index)
        return self.propagate(edge_index, x=x) / scale

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


def dropped_edges(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    edges = edges[:, torch.rand(edges.size(1)) < 0.5]
    return x, edges, edges.size(1)


def loops_after_dropout(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    x = dropout(x, 0.5)
    edges = edges[:, edges[0] != edges[1]]
    return x, edges, edges.size(1)


def a_size_after_a_norm(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    x = layer.norm(x)
    return (x.tanh() if x.size(0) > N + 1 else x), edges, 1


def changed_edges(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    edges = edges.clone()
    x = dropout(x, 0.5)
    edges[0] = edges[0].flip(0)
    return x, edges, 1


def a_norm(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    return dropout(layer.norm(x), 0.5), edges, 1


def run(prepare: Callable[..., Any], *, bad: bool) -> list[Any]:
    """The results and the state after calls on several graphs, the last maybe out of range."""
    torch.manual_seed(0)
    layer, outs = Layer(prepare).double(), []
    for call in range(12):
        nodes = N + call // 3
        x = torch.randn(nodes, F, dtype=torch.float64)
        edges = torch.randint(nodes, (2, E + call))
        if bad and call == 11:
            edges[0, 7] = 10 * N
            with pytest.raises(IndexError, match="indices in 'edge_index'"):
                layer(x, edges)
        else:
            outs.append(layer(x, edges))
    return [*outs, *layer.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("bad", [False, True], ids=["sizes", "index"])
@pytest.mark.parametrize(
    "prepare", [dropped_edges, loops_after_dropout, a_size_after_a_norm, changed_edges, a_norm]
)
def test_effects_of_a_call_happen_once(prepare, bad, always):
    if bad and prepare in (dropped_edges, loops_after_dropout):
        pytest.skip("the edge may be dropped")
    stock = run(prepare, bad=bad)
    with pyg_accel.patched():
        torch.testing.assert_close(run(prepare, bad=bad), stock)


def first(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).sum()


# Sizes that depend on the numbers in a tensor.
COUNTS: dict[str, Callable[[Tensor, Tensor], int]] = {
    "mask behind dots": lambda x, e: e[..., x[e[0], 0] > 0].size(1),
    "mask behind None": lambda x, e: x[:, None, x[0] > 0].size(2),
    "mask behind a slice": lambda x, e: x[5:, x[0] > 0].size(1),
    "mask of two dimensions": lambda x, e: x[x > 0].size(0),
    "coalesced": lambda x, e: torch.sparse_coo_tensor(
        e, x.new_ones(e.size(1)), (2 * N, 2 * N)
    ).coalesce().indices().size(1),
    "sparse values": lambda x, e: x.relu().to_sparse().values().numel(),
    "CSR values": lambda x, e: x.relu().to_sparse_csr().values().numel(),
    "slice": lambda x, e: x[: first(x)].size(0),
    "slice of edges": lambda x, e: e[:, : first(x)].size(1),
    "arange": lambda x, e: torch.arange(first(x)).size(0),
    "new_zeros": lambda x, e: x.new_zeros(first(x)).size(0),
    "expand": lambda x, e: x[0].expand(first(x), F).size(0),
    "repeat": lambda x, e: x[:2].repeat(first(x), 1).size(0),
    "tensor_split": lambda x, e: x.tensor_split(first(x).view(1))[0].size(0),
    "columns of a selected weight": lambda x, e: linear(x, x[x[:, 0] > 0]).size(1) + 1,
    "selected rows twice": lambda x, e: torch.cat([x[x[:, 0] > 0]] * 2).size(0) + 1,
    "text": lambda x, e: 1 + len(f"{first(x)}") + int(f"{first(x)}" > "2"),
}  # fmt: skip


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sizes_that_depend_on_numbers_are_those_of_the_call(count, always):
    def outputs() -> list[Tensor]:
        torch.manual_seed(0)
        layer = Layer(lambda layer, x, edges: (x, edges, count(x, edges)))
        return [
            layer(torch.randn(N, F) + 0.2 * call - 0.4, torch.randint(N // (1 + call), (2, E)))
            for call in (0, 0, 1, 2, 3, 4)
        ]

    stock = outputs()
    with pyg_accel.patched():
        torch.testing.assert_close(outputs(), stock)


def test_a_layer_that_returns_a_size_returns_a_size(always):
    class Sized(Layer):
        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            return self.propagate(edge_index, x=x), x.shape

    layer, x, edges = Sized(a_norm), torch.randn(N, F), torch.randint(N, (2, E))
    with pyg_accel.patched():
        assert [type(layer(x, edges)[1]) for _ in range(3)] == [torch.Size] * 3


def test_targets_are_counted_in_each_call(always):
    class Few(Layer):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=(x, x[: edge_index[1].max() + 1]))

    layer, x = Few(a_norm), torch.randn(N, F)
    with pyg_accel.patched():
        for most in (50, 50, 30, 30, 20, 45):
            edges = torch.randint(most, (2, E))
            edges[1, 0] = most - 1
            assert layer(x, edges).shape == (most, F)


@torch.library.custom_op("pyg_accel_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def an_operator(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    return noisy(x), edges, 1 + x.size(0) // (N + 1)


def written_edges(layer: Layer, x: Tensor, edges: Tensor) -> Any:
    edges[0].add_(1).remainder_(x.size(0))
    return x, edges, 1


@pytest.mark.parametrize("prepare", [an_operator, written_edges])
def test_operators_and_changes_of_arguments_are_seen(prepare, always):
    stock = run(prepare, bad=False)
    with pyg_accel.patched():
        torch.testing.assert_close(run(prepare, bad=False), stock)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_second_gradients_of_extremes_of_narrow_operands(aggr):
    class Narrow(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, weight=weight)

        def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
            return x_j + weight.view(-1, 1)

    layer = Narrow(aggr=aggr)
    x = torch.randn(N, F, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(E, dtype=torch.float64, requires_grad=True)
    edges = torch.randint(N, (2, E))

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(layer(x, edges, weight).pow(3).sum(), [x, weight],
                                    create_graph=True)  # fmt: skip
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), [x, weight])

    stock = second()
    with pyg_accel.patched():
        torch.testing.assert_close(second(), stock)
