"""Calls of propagate that are recorded by themselves, as the call of their layer cannot be."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.utils import to_torch_csr_tensor

import pyg_accel
from benchmarks.layers.modes import traces
from tests.user_layers import says, written

pytestmark = pytest.mark.usefixtures("always")

F, H = 6, 4
LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "gcn": lambda: pyg.GCNConv(F, H),
    "sage-max": lambda: pyg.SAGEConv(F, H, aggr="max"),
    "gat": lambda: pyg.GATConv(F, H, heads=2),
    "transformer": lambda: pyg.TransformerConv(F, H, heads=2),
    "fa": lambda: pyg.FAConv(F),
    "edge": lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * F, H), nn.ReLU(), nn.Linear(H, H))),
}


def make(name: str) -> MessagePassing:
    return LAYERS[name]().double()


def edges(nodes: int, count: int) -> Tensor:
    out = torch.randint(nodes - 1, (2, count)).unique(dim=1)
    return out[:, out[0] != out[1]]


def features(nodes: int) -> Tensor:
    return torch.randn(nodes, F, dtype=torch.float64, requires_grad=True)


def plain(layer: Any, x: Tensor, graph: Any, **kwargs: Any) -> Any:
    return (
        layer(x, x, graph, **kwargs) if isinstance(layer, pyg.FAConv) else layer(x, graph, **kwargs)
    )


def checkpointed(layer: Any, x: Tensor, graph: Any) -> Any:
    return checkpoint(plain, layer, x, graph, use_reentrant=False)


def outcome(layer: Any, x: Tensor, graph: Any, call: Callable[..., Any] = plain) -> list[Tensor]:
    torch.manual_seed(7)
    out = call(layer, x, graph)
    leaves = [x, *layer.parameters()]
    return [out, *torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True), torch.rand(2)]


def assert_alike(ours: list[Tensor], stock: list[Tensor]) -> None:
    torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-9)


def change(*layers: MessagePassing) -> None:
    with torch.no_grad():
        for layer in layers:
            for p in layer.parameters():
                p.mul_(-1.5)


SIZES = [(9, 40)] * 3 + [(9, 41), (12, 70), (30, 300), (9, 40)]


def alike(layer: Any, stock: Any, graphs: Iterable[tuple[Tensor, Any]],
          call: Callable[..., Any] = plain) -> list[Any]:  # fmt: skip
    """Compare calls with those of stock, between which parameters change; what the last traced."""
    for number, (x, graph) in enumerate(graphs):
        if number == 2:
            change(layer, stock)
        with pyg_accel.patched(), traces() as entered:
            ours = outcome(layer, x, graph, call)
        assert_alike(ours, outcome(stock, x, graph, call))
    return entered


def of_sizes(given: Callable[[Tensor, int], Any] = lambda graph, nodes: graph) -> Any:
    return ((features(nodes), given(edges(nodes, count), nodes)) for nodes, count in SIZES)


def as_matrix(edge_index: Tensor, nodes: int) -> Tensor:
    return (
        to_torch_csr_tensor(edge_index, size=(nodes, nodes)).to(torch.float64).t().to_sparse_csr()
    )


def as_edge_index(edge_index: Tensor, nodes: int) -> EdgeIndex:
    return EdgeIndex(edge_index, sparse_size=(nodes, nodes))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("given", [as_matrix, as_edge_index])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("gcn", "fa")])
def test_programs_take_matrices_and_edge_indices(name, given):
    if given is as_matrix and name == "sage-max":
        pytest.skip("a product with the matrix")
    layer = make(name)
    assert not alike(layer, copy.deepcopy(layer), of_sizes(given))


IN_PLACE = {
    "values of a matrix": (
        lambda: pyg.GATConv(F, H, edge_dim=1).double(), as_matrix,
        lambda graph: graph.values().mul_(2.5)),
    "an EdgeIndex": (
        lambda: make("sage-max"), as_edge_index,
        lambda graph: graph.as_tensor()[0].add_(1).remainder_(9)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_graph_that_changes_in_place_is_another(name):
    build, given, change_it = IN_PLACE[name]
    layer, x, graph = build(), features(9), given(edges(9, 40), 9)
    for _ in range(4):
        with pyg_accel.patched():
            ours = outcome(layer, x, graph)
        assert_alike(ours, outcome(layer, x, graph))
        change_it(graph)


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_on_a_layer_are_called_and_propagate_is_a_program(name):
    x, graph, layer, heard = features(9), edges(9, 40), make(name), []
    stock = copy.deepcopy(layer)
    layer.register_forward_hook(lambda module, args, out: heard.append(out.shape) or out * 2)
    stock.register_forward_hook(lambda module, args, out: out * 2)
    entered = alike(layer, stock, [(x, graph)] * 4)
    assert len(heard) == 4 and not entered


SENT = written(
    forward=lambda self, x, edge_index: self.propagate(edge_index, x=self.outside(x)),
    message=lambda self, x_j: self.inside(x_j),
)


def sent(cls: Any = SENT) -> Any:
    """Has one layer outside of its message and one inside."""
    return cls(outside=nn.Linear(F, H), inside=nn.Linear(H, H)).double()


STEPS = ["", "", "outside", "", "inside", "", "", "remove", "", "outside", "inside", ""]


@pytest.mark.parametrize("pre", [False, True], ids=["after", "before"])
def test_a_hook_that_a_message_calls_is_called_whenever_it_comes(pre):
    x, graph, layer = features(9), edges(9, 40), sent()

    def put(module: nn.Module, part: str) -> Any:
        module = getattr(module, part)
        if pre:
            return module.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
        return module.register_forward_hook(lambda module, args, out: out * 3)

    stock = copy.deepcopy(layer)
    handles = []
    with pyg_accel.patched():
        for step in STEPS:
            if step == "remove":
                handles.pop().remove()
                handles.pop().remove()
            elif step:
                handles += [put(layer, step), put(stock, step)]
            assert_alike(outcome(layer, x, graph), outcome(stock, x, graph))


def test_layers_with_hooks_share_no_program_with_layers_that_have_none():
    x, graph = features(9), edges(9, 40)
    first, second = sent(), sent()
    first.outside.register_forward_hook(lambda module, args, out: out + 1)
    with pyg_accel.patched():
        for _ in range(3):
            outcome(first, x, graph)
        second.inside.register_forward_hook(lambda module, args, out: out * 5)
        for _ in range(3):
            ours = outcome(second, x, graph)
    assert_alike(ours, outcome(second, x, graph))


# -- attention weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gat", "transformer", "fa"])
def test_weights_that_are_asked_for_between_calls_of_a_program(name):
    x, graph, layer = features(9), edges(9, 40), make(name)
    layer.register_forward_hook(lambda *_: None)
    with pyg_accel.patched():
        for asked in (None, None, True, None, True, True, None):
            ours = plain(layer, x, graph, return_attention_weights=asked)
            assert getattr(layer, "_alpha", None) is None
            if asked:
                actual = ours
    right = plain(layer, x, graph, return_attention_weights=True)
    torch.testing.assert_close(actual[0], right[0])
    torch.testing.assert_close(actual[1][1], right[1][1])


class Reads(pyg.TransformerConv):
    """A forward of the user that reads the weights itself, and clears them."""

    def forward(self, x: Any, edge_index: Any, return_attention_weights: Any = None) -> Any:  # type: ignore[override]
        x = self.lin_key(x).view(-1, self.heads, self.out_channels)
        out = self.propagate(edge_index, query=x, key=x, value=x, edge_attr=None)
        alpha = self._alpha
        self._alpha = None
        return out.flatten(1) * alpha.sum()


@pytest.mark.parametrize("hook", [False, True])
def test_weights_that_a_forward_reads_itself(hook):
    x, graph, layer = features(9), edges(9, 40), Reads(F, H, heads=2).double()
    if hook:
        layer.register_forward_hook(lambda *_: None)
    right = outcome(layer, x, graph)
    with pyg_accel.patched():
        for _ in range(4):
            assert_alike(outcome(layer, x, graph), right)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_runs_programs_and_equals_stock(name):
    layer = make(name)
    assert not alike(layer, copy.deepcopy(layer), of_sizes(), checkpointed)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_inside_and_outside_of_a_checkpoint_in_one_step(name):
    x, graph, layer = features(9), edges(9, 40), make(name)
    stock = copy.deepcopy(layer)

    def both(layer: Any, x: Tensor, graph: Tensor) -> Tensor:
        inside = checkpointed(layer, x, graph)
        return inside + plain(layer, x, graph) + plain(layer, x.detach(), graph)

    with pyg_accel.patched():
        for _ in range(4):
            assert_alike(outcome(layer, x, graph, both), outcome(stock, x, graph, both))


def counts(self: Any, x_i: Tensor, x_j: Tensor) -> Tensor:
    """Draws random numbers, and counts its calls in a buffer and in an attribute."""
    self.calls += 1
    self.seen += 1
    return nn.functional.dropout(x_i * x_j, 0.5, self.training)


def test_a_record_in_a_checkpoint_leaves_nothing_behind():
    x, graph, layer = features(9), edges(9, 40), says(counts, calls=0)()
    layer.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    stock = copy.deepcopy(layer)
    with pyg_accel.patched():
        for _ in range(4):
            ours = outcome(layer, x, graph, checkpointed)
            assert_alike(ours, outcome(stock, x, graph, checkpointed))
            assert layer.calls == stock.calls and torch.equal(layer.seen, stock.seen)


# -- what is left to PyG ---------------------------------------------------------------------------


READER = written(
    SENT,
    message=lambda self, x_j, index: x_j * (2.0 if int(index.max()) > 3 else 1.0),
)


@pytest.fixture
def reasons(report_of: Any) -> Iterator[Callable[[], set[str]]]:
    def rows() -> set[str]:
        return {row.reason for row in report_of() if not row.formula}

    yield rows


def test_what_cannot_be_recorded_is_pygs_with_the_reason(reasons):
    x, graph, layer = features(9), edges(9, 40), sent(READER)
    right = outcome(layer, x, graph)
    with pyg_accel.patched():
        for _ in range(3):
            outcome(layer, x, graph)
        pyg_accel.reset_report()
        with traces() as entered:
            ours = outcome(layer, x, graph)
    assert_alike(ours, right)
    assert not entered
    assert reasons() == {"what it does depends on the numbers in a tensor (__int__)"}
