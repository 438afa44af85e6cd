"""Layers that are given a sparse matrix, of torch or of torch_sparse, in place of an edge_index."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.models import GCN, GraphSAGE
from torch_geometric.utils import to_torch_csc_tensor

import pyg_accel
from pyg_accel.graph import derived
from pyg_accel.patching import sparse
from pyg_accel.runtime.state import running
from pyg_accel.settings import settings

pytestmark = pytest.mark.usefixtures("always")

N, E, F = 25, 140, 6


@pytest.fixture(autouse=True)
def no_advice_on_layouts():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Converting sparse tensor")
        warnings.filterwarnings("ignore", message="Sparse (CSR|CSC) tensor support")
        yield


def edges() -> tuple[Tensor, Tensor]:
    """Targets and sources of a graph without duplicates, rows first, in the order of a matrix."""
    cells = torch.randperm(N * (N - 3), generator=torch.Generator().manual_seed(1))[:E].sort()[0]
    return cells // (N - 3), cells % (N - 3)


def torch_sparse_tensor(values: Tensor | None) -> Any:
    sparse = pytest.importorskip("torch_sparse", reason="torch_sparse is not installed")
    row, col = edges()
    return sparse.SparseTensor(row=row, col=col, value=values, sparse_sizes=(N, N))


def torch_matrix(layout: torch.layout) -> Callable[[Tensor | None], Tensor]:
    def make(values: Tensor | None) -> Tensor:
        ones = torch.ones(E, dtype=torch.float64) if values is None else values
        coo = torch.sparse_coo_tensor(torch.stack(edges()), ones, (N, N)).coalesce()
        return coo.to_sparse(layout=layout)

    return make


def edge_index_object(values: Tensor | None) -> EdgeIndex:
    row, col = edges()
    return EdgeIndex(torch.stack([col, row]), sparse_size=(N, N), sort_order="col")


MATRICES: dict[str, Callable[[Tensor | None], Any]] = {
    "SparseTensor": torch_sparse_tensor,
    "csr": torch_matrix(torch.sparse_csr),
    "csc": torch_matrix(torch.sparse_csc),
    "coo": torch_matrix(torch.sparse_coo),
    "EdgeIndex": edge_index_object,
}
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(F, 4),
    "gcn-without-loops": lambda: pyg.GCNConv(F, 4, add_self_loops=False),
    "gcn-not-normalised": lambda: pyg.GCNConv(F, 4, normalize=False),
    "sage": lambda: pyg.SAGEConv(F, 4),
    "sage-max": lambda: pyg.SAGEConv(F, 4, aggr="max"),
    "sage-min": lambda: pyg.SAGEConv(F, 4, aggr="min"),
    "sage-many": lambda: pyg.SAGEConv(F, 4, aggr=["mean", "max"]),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(F, 4)),
    "graph": lambda: pyg.GraphConv(F, 4),
    "gat": lambda: pyg.GATConv(F, 4, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(F, 4, heads=2, add_self_loops=False),
    "gine": lambda: pyg.GINEConv(torch.nn.Linear(F, 4)),
    "transformer": lambda: pyg.TransformerConv(F, 4, heads=2),
    "cheb-like": lambda: pyg.SGConv(F, 4, 2),
    "le": lambda: pyg.LEConv(F, 4),
    "edge-conv": lambda: pyg.EdgeConv(torch.nn.Linear(2 * F, 4)),
}


def features() -> Tensor:
    return torch.randn(N, F, dtype=torch.float64, requires_grad=True)


def both(layer: torch.nn.Module, adj: Any, *more: Any, leaves: Any = ()) -> list[Any]:
    """Stock's and our results and gradients; in place of them the error, where there is one."""
    x, actual = features(), []
    wanted = [x, *leaves, *layer.parameters()]

    def once() -> Any:
        try:
            out = layer(x, adj, *more)
            return out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True)
        except (ValueError, NotImplementedError, RuntimeError, AttributeError, TypeError) as error:
            return type(error)

    actual.append(once())
    with pyg_accel.patched():
        actual += [once(), once()]
    return actual


def assert_alike(actual: list[Any]) -> None:
    stock = actual[0]
    for ours in actual[1:]:
        if isinstance(stock, type):
            assert ours is stock
        else:
            torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-9)


@pytest.mark.pairs
@pytest.mark.parametrize("valued", [False, True], ids=["plain", "values"])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_matrix_gives_the_results_and_gradients_of_stock(name, matrix, valued):
    if (name, matrix) == ("graph", "EdgeIndex"):
        pytest.skip("PyG multiplies an EdgeIndex with float32 only")
    values = torch.rand(E, dtype=torch.float64) if valued else None
    assert_alike(both(LAYERS[name]().double(), MATRICES[matrix](values)))


@pytest.mark.parametrize("name", ["gine", "transformer", "gat"])
@pytest.mark.parametrize("matrix", ["SparseTensor"])
def test_values_of_several_features_are_the_edges_features(name, matrix):
    layer = {
        "gine": lambda: pyg.GINEConv(torch.nn.Linear(F, 4)),
        "transformer": lambda: pyg.TransformerConv(F, 4, heads=2, edge_dim=F),
        "gat": lambda: pyg.GATConv(F, 4, heads=2, edge_dim=F),
    }[name]()
    values = torch.rand(E, F, dtype=torch.float64, requires_grad=True)
    assert_alike(both(layer.double(), MATRICES[matrix](values), leaves=[values]))


@pytest.mark.parametrize("name", ["gcn", "gcn-not-normalised", "graph", "gin", "sage-many", "le"])
def test_values_that_are_learned_get_the_gradients_of_stock(name):
    values = torch.rand(E, dtype=torch.float64, requires_grad=True)
    assert_alike(both(LAYERS[name]().double(), torch_sparse_tensor(values), leaves=[values]))


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_a_torch_matrix_that_is_learned_gets_the_gradients_of_stock(layout):
    adj = MATRICES[layout](torch.rand(E, dtype=torch.float64)).requires_grad_()
    actual = both(LAYERS["graph"]().double(), adj)
    assert_alike(actual)


RUNS = {
    ("gcn", "SparseTensor"): {"sum_j mul(u0,e1)"},
    ("gcn", "csr"): {"sum_j mul(u0,e1)"},
    ("sage", "SparseTensor"): {"mean_j u0"},
    ("sage-max", "coo"): {"max_j mul(u0,e1)"},
    ("gin", "csc"): {"sum_j mul(u0,e1)"},
    ("gat", "SparseTensor"): {"softmax_j(leaky_relu(add(u0,v1),0.2))", "sum_j mul(e0,u1)"},
    ("gatv2", "csr"): {
        "softmax_j(sum(mul(leaky_relu(add(v0,u1),0.2),v2)))",
        "sum_j mul(u0,e1)",  # weights leave a call that is recorded by itself
    },
    ("sage-many", "coo"): {"mean+max_j u0"},
    ("le", "SparseTensor"): {"sum_j sub(u0,v1)"},
}


@pytest.mark.parametrize(("name", "matrix"), RUNS)
def test_it_runs_as_the_table_says(name, matrix, report_of):
    adj = MATRICES[matrix](None)
    with pyg_accel.patched():
        LAYERS[name]().double()(features(), adj)
    rows = report_of()
    assert {row.formula for row in rows} == RUNS[name, matrix]
    assert {row.reason for row in rows} == {""}


@pytest.mark.parametrize("matrix", ["SparseTensor", "csr"])
@pytest.mark.parametrize("name", ["gcn", "gat", "sage", "sage-many"])
def test_a_matrix_becomes_a_graph_once_and_is_not_kept_alive(name, matrix, monkeypatch):
    built = []
    for method in ("_from_coo", "from_csr"):
        right = getattr(pyg_accel.Graph, method)
        monkeypatch.setattr(
            pyg_accel.Graph, method,
            lambda *a, right=right, **k: (built.append(1), right(*a, **k))[1],
        )  # fmt: skip
    adj = MATRICES[matrix](None)
    layer = LAYERS[name]().double()
    owner = adj if isinstance(adj, Tensor) else adj.storage.col()
    alive, before = weakref.ref(owner), len(derived.values())
    with pyg_accel.patched():
        for _ in range(3):
            layer(features(), adj)
        assert len(built) == 1
        del adj, owner
        gc.collect()
        assert alive() is None
        assert len(derived.values()) <= before


@pytest.mark.parametrize("model", [GCN, GraphSAGE], ids=["gcn", "sage"])
def test_training_steps_on_a_matrix_equal_stock(model):
    def train() -> list[Tensor]:
        torch.manual_seed(3)
        net, x = model(F, 8, 3).double(), torch.randn(N, F, dtype=torch.float64)
        optimizer, adj = torch.optim.Adam(net.parameters(), 0.05), torch_sparse_tensor(None)
        for _ in range(5):
            optimizer.zero_grad()
            net(x, adj).pow(2).mean().backward()
            optimizer.step()
        return list(net.parameters())

    expected = train()
    with pyg_accel.patched():
        actual = train()
    torch.testing.assert_close(actual, expected)


def test_values_that_change_in_place_are_seen():
    values = torch.rand(E, dtype=torch.float64)
    for matrix in ("csr", "SparseTensor"):
        adj = MATRICES[matrix](values.clone())
        layer, x = LAYERS["graph"]().double(), features()
        with pyg_accel.patched():
            layer(x, adj)
            (adj.values() if isinstance(adj, Tensor) else adj.storage.value()).mul_(3)
            actual = layer(x, adj)
        torch.testing.assert_close(actual, layer(x, adj))


def test_a_matrix_with_columns_beyond_its_size_is_left_to_pyg(report_of):
    rowptr, col = torch.tensor([0, 1, 2]), torch.tensor([0, 7])
    adj = torch.sparse_csr_tensor(rowptr, col, torch.ones(2), (2, 2), check_invariants=False)
    running.products = []
    try:
        out = sparse.spmm(lambda *_: None, adj, torch.ones(2, 3))
        assert out is None and not running.products
    finally:
        running.products = None


@pytest.mark.parametrize("verified", [False, True])
def test_attention_weights_come_back_as_a_matrix(verified):
    x, edge_index = torch.randn(30, 8), torch.randint(30, (2, 90)).unique(dim=1)
    adj = to_torch_csc_tensor(edge_index, size=(30, 30)).t()
    layer = pyg.GATConv(8, 32, heads=2)
    right, (_, right_weights) = layer(x, edge_index, return_attention_weights=True)
    settings.verify = verified
    with pyg_accel.patched():
        actual, (matrix, weights) = layer(x, adj, return_attention_weights=True)
    assert weights.shape == right_weights.shape
    torch.testing.assert_close(weights.sum(), right_weights.sum())
    assert matrix.layout == adj.layout
    torch.testing.assert_close(actual, right)
