"""Sizes that a call tells only while it runs: of edges that it derives of its graph, or selects."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MessagePassing, TAGConv
from torch_geometric.utils import add_self_loops, coalesce, remove_self_loops

import pyg_accel
from benchmarks.layers.cases import CASES, Case, Inputs, inputs
from benchmarks.layers.modes import traces
from pyg_accel.patching import programs

pytestmark = [pytest.mark.usefixtures("always"), pytest.mark.filterwarnings("ignore")]

NODES, EDGES, WIDTH = 50, 300, 16
# Layers that add, remove or select edges.
DERIVING = {
    "AGNNConv", "APPNP", "ARMAConv", "ChebConv", "ClusterGCNConv", "DNAConv", "DirGNNConv",
    "EGConv", "FAConv", "FeaStConv", "FiLMConv", "GATConv", "GATv2Conv", "GCN2Conv", "GCNConv",
    "LGConv", "MixHopConv", "PANConv", "PDNConv", "PPFConv", "PointNetConv",
    "PointTransformerConv", "RGCNConv", "SGConv", "SSGConv", "SimpleConv", "SuperGATConv",
    "TAGConv",
}  # fmt: skip
DERIVED = {key: case for key, case in CASES.items() if key[0] in DERIVING}


def with_loops(graph: Inputs, count: int) -> Inputs:
    """The same graph with so many self-loops."""
    source, target = graph.edge_index
    target = torch.where(source == target, (target + 1) % NODES, target)
    loops = torch.arange(EDGES) < count
    return replace(graph, edge_index=torch.stack([source, torch.where(loops, source, target)]))


def outcome(model: torch.nn.Module, args: tuple[Any, ...], *, train: bool) -> list[Tensor]:
    """Results and gradients of a call."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(train):
        out = model(*args)
    actual = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    if train:
        losses = [(t * t.detach().cos()).sum() for t in actual if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        actual += [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach() for t in actual]


def same(model: torch.nn.Module, calls: list[tuple[Any, ...]], *, train: bool) -> None:
    other = copy.deepcopy(model)
    expected = [outcome(other, args, train=train) for args in calls]
    with pyg_accel.patched():
        actual = [outcome(model, args, train=train) for args in calls]
    for number, pair in enumerate(zip(expected, actual, strict=True)):
        for right, mine in zip(*pair, strict=True):
            scale = float(right.abs().max().clamp(min=1)) if right.numel() else 1.0
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-3 * scale,
                                       msg=lambda m, n=number: f"call {n}: {m}")  # fmt: skip


@pytest.mark.one_of(5)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", DERIVED.values(), ids=map(" ".join, DERIVED))
def test_self_loops_of_any_number(case: Case, train: bool) -> None:
    torch.manual_seed(0)
    model, graph = case.make(WIDTH).train(train), inputs(NODES, EDGES, WIDTH, "cpu")
    graphs = [with_loops(graph, count) for count in (0, 0, 7, 3, EDGES - 1, 1)]
    calls = [case.call(g) for g in graphs]
    same(model, calls, train=train)


class Derives(MessagePassing):
    """A layer whose forward does something with the edges that it derives."""

    def __init__(self, derive: Callable[[Tensor, int], tuple[Tensor, Any]]) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 4)
        self.derive = derive

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, scale = self.derive(edge_index, x.size(0))
        return self.propagate(edges, x=self.lin(x)) * (scale / EDGES)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


def _without_loops(edges: Tensor) -> Tensor:
    return remove_self_loops(edges)[0]


DERIVE: dict[str, Callable[[Tensor, int], tuple[Tensor, Any]]] = {
    "a quotient": lambda e, n: (e, 1 / (1 + _without_loops(e).size(1))),
    "a power": lambda e, n: (e, _without_loops(e).size(-1) ** 0.5),
    "len": lambda e, n: (e, 1.0 + len(_without_loops(e)[0])),
    "numel": lambda e, n: (e, 1.0 + _without_loops(e).numel()),
    "an integer": lambda e, n: (e, int(0.5 * _without_loops(e).size(1))),
    "a branch": lambda e, n: (e, 2.0 if _without_loops(e).size(1) == EDGES else 3.0),
    "a branch at 0": lambda e, n: (e, 2.0 if _without_loops(e).size(1) else 3.0),
    "a difference": lambda e, n: (e, torch.ones(()) * (_without_loops(e).size(1) - n)),
    "flattened": lambda e, n: (e, torch.ones(_without_loops(e).view(-1).size(0)).sum()),
    "joined": lambda e, n: (e, torch.ones(torch.cat([_without_loops(e), e], 1).size(1)).sum()),
    "a mask": lambda e, n: (e[:, e[0] != e[1]], torch.ones(e[:, e[0] != e[1]].size(1)).sum()),
    "a mask of rows": lambda e, n: (e, 1 / (1 + e.t()[e[0] < e[1]].shape[0])),
    "nonzero": lambda e, n: (e, (e[0] == e[1]).nonzero().size(0) / 2),
    "coalesced": lambda e, n: (coalesce(e), torch.ones(coalesce(e).size(1)).sum()),
    "added": lambda e, n: (e, add_self_loops(_without_loops(e), num_nodes=n)[0].size(1) / 9),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", DERIVE)
def test_numbers_of_derived_edges_are_computed_in_each_call(name: str) -> None:
    graph = inputs(NODES, EDGES, WIDTH, "cpu")
    graphs = [with_loops(graph, count) for count in (0, 0, 7, 3, EDGES - 1, EDGES, 0, 250)]
    for train in (False, True):
        same(Derives(DERIVE[name]), [(g.x, g.edge_index) for g in graphs], train=train)


def test_sizes_may_equal_a_number_subtracted_from_them() -> None:
    """What is computed of a size that is 2 or more may be less."""

    class Rest(Derives):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = self.propagate(edge_index, x=self.lin(x))
            return out * 2 if x.size(0) - 5 > 0 else out

    x = torch.randn(9, WIDTH)
    calls = [(x[:n], torch.randint(n, (2, 12))) for n in (9, 8, 7, 5, 3, 6)]
    same(Rest(lambda e, n: (e, 1)), calls, train=False)


def test_layers_of_pyg_have_programs_for_any_number_of_self_loops() -> None:
    graph = inputs(NODES, EDGES, WIDTH, "cpu")
    model = DERIVED["PPFConv", ""].make(WIDTH)
    calls = [DERIVED["PPFConv", ""].call(with_loops(graph, count)) for count in (0, 1, 2, 3)]
    with traces() as entered:
        same(model, calls, train=True)
    assert len(entered) == 1


class Model(torch.nn.Module):
    """A model of one layer."""

    def __init__(self, conv: torch.nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize("name", ["an integer", "a branch", "a branch at 0", "a mask"])
def test_layers_of_an_optimized_model_compute_sizes_too(name: str) -> None:
    graph = inputs(NODES, EDGES, WIDTH, "cpu")
    graphs = [with_loops(graph, count) for count in (0, 0, 7, 3, EDGES, 0)]
    calls = [(g.x, g.edge_index) for g in graphs]
    model = Model(Derives(DERIVE[name]))
    expected = [outcome(model, args, train=False) for args in calls]
    fast = pyg_accel.optimize(model.eval(), *calls[0])
    for args, (right,) in zip(calls, expected, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(outcome(fast, args, train=False)[0], right, rtol=0,
                                   atol=1e-3 * scale)  # fmt: skip


class Rounds(MessagePassing):
    """A layer that makes the same number of different sizes."""

    def __init__(self, number: Callable[[Any, int], Any]) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 4)
        self.number, self.ratio, self.table = number, 0.1, {14: 3.0}
        self.bounds, self.whole = {"most": 1.35}, 3

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x)) * self.number(self, x.size(0))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


ROUNDS: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda layer, n: int(layer.ratio * n),
    "ceil": lambda layer, n: math.ceil(n / 10),
    "round": lambda layer, n: round(n * 0.1),
    "a table": lambda layer, n: layer.table.get(n, 1.0),
    "a branch": lambda layer, n: 2.0 if layer.ratio * n > 1.35 else 3.0,
    "attributes": lambda layer, n: 2 if layer.ratio * n > layer.bounds["most"] else 3,
    "a quotient": lambda layer, n: 2 if n / 4 > layer.whole else 3,
    "a function": lambda layer, n: 2 if _is_above(layer.ratio, n) else 3,
    "a default": lambda layer, n: 2 if _is_large(n) else 3,
}


def _is_above(ratio: float, size: int) -> bool:
    return ratio * size > 1


def _is_large(size: int, ratio: float = 0.1) -> bool:
    return ratio * size > 1


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ROUNDS)
def test_sizes_of_which_the_same_number_is_made(name: str) -> None:
    sizes = (11, 12, 13, 14, 30, 8, 11)
    calls = [(torch.randn(n, WIDTH), torch.randint(8, (2, 20))) for n in sizes]
    same(Rounds(ROUNDS[name]), calls, train=False)


def test_sizes_times_a_number_among_the_arguments() -> None:
    class Scaled(Rounds):
        def forward(self, x: Tensor, edge_index: Tensor, ratio: float) -> Tensor:
            factor = 2 if ratio * x.size(0) > self.whole else 3
            return self.propagate(edge_index, x=self.lin(x)) * factor

    calls = [(torch.randn(n, WIDTH), torch.randint(8, (2, 20)), 0.25) for n in (11, 12, 13, 30, 8)]
    same(Scaled(int), calls, train=False)


class Hops(MessagePassing):
    """Means over neighbours of neighbours, without self-loops."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, _ = remove_self_loops(edge_index)
        for _ in range(3):
            x = x + self.propagate(edges, x=x)
        return self.lin(x)


@pytest.mark.parametrize("make", [Hops, lambda: TAGConv(WIDTH, 4)], ids=["own", "TAGConv"])
def test_as_many_derived_edges_as_nodes(make: Callable[[], MessagePassing]) -> None:
    """Sums have a row for each node, whatever the number of edges."""
    source = torch.arange(NODES).repeat(2)
    cycle = torch.stack([source, (source + torch.arange(1, 3).repeat_interleave(NODES)) % NODES])
    loops = torch.arange(NODES).expand(2, -1)
    graphs = [torch.cat([cycle[:, :count], loops[:, : 2 * NODES - count]], 1)
              for count in (NODES, NODES, NODES + 7, NODES)]  # fmt: skip
    if isinstance(make(), TAGConv):
        graphs = [cycle[:, :NODES], cycle[:, :NODES], cycle[:, : NODES + 7], cycle[:, :NODES]]
    layer, calls = make(), [(torch.randn(NODES, WIDTH), graph) for graph in graphs]
    same(copy.deepcopy(layer), calls, train=True)
    with pyg_accel.patched():
        layer(*calls[0])
        (program,) = programs.find(layer, "call").programs
    assert not any(node.target == "size" for node in program.graph.nodes)


# What code does with the number of nodes: above 100 of them it is something else.
ABOVE_100: dict[str, Callable[[Tensor], Any]] = {
    "negative": lambda x: -x.size(0) < -100,
    "bits": lambda x: x.size(0) & 128,
    "shifted": lambda x: x.size(0) >> 7,
    "a power": lambda x: x.size(0) ** 2 > 10000,
    "a quotient": lambda x: x.size(0) / 100 > 1,
    "bit_length": lambda x: x.size(0).bit_length() > 7,
    "text": lambda x: len(str(x.size(0))) > 2,
    "formatted": lambda x: len(f"{x.size(0)}") > 2,
    "an item": lambda x: (0, 1, 1)[x.size(0) // 100],
    "numerator": lambda x: x.size(0).numerator > 100,
    "isqrt": lambda x: math.isqrt(x.size(0)) > 10,
    "len": lambda x: len(x) > 100,
    "range": lambda x: len(range(x.size(0))) > 100,
    "numel of a shape": lambda x: x.shape.numel() > 100 * WIDTH,
    "unbind": lambda x: len(x.unbind()) > 100,
    "split": lambda x: len(x.split(100)) > 1,
    "chunk": lambda x: len(x.chunk(400)) > 100,
}


class Branches(MessagePassing):
    """Multiplies what it reads of many nodes by 5."""

    def __init__(self, ask: Callable[[Tensor], Any], place: str) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(WIDTH, 4)
        self.ask, self.place = ask, place

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        if self.place == "forward":
            x = x * 5 if self.ask(x) else x
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.place == "message":
            return x_j * 5 if self.ask(x_j) else x_j
        return x_j


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", ["forward", "message"])
@pytest.mark.parametrize("name", ABOVE_100)
def test_code_that_does_anything_with_a_size(name: str, place: str) -> None:
    sizes = [(12, 60), (12, 60), (20, 90), (20, 90), (250, 80), (30, 250), (250, 260), (12, 60)]
    graphs = [inputs(nodes, edges, WIDTH, "cpu") for nodes, edges in sizes]
    same(Branches(ABOVE_100[name], place), [(g.x, g.edge_index) for g in graphs], train=False)
