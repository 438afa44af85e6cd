"""`reorder`: nothing but names may change."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.edge_index import EdgeIndex
from torch_geometric.nn import GAT, GCN, GraphSAGE
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import pyg_accel
from pyg_accel import reordering
from pyg_accel.testing import GraphCase, zoo

METHODS = [name for name in reordering.METHODS if name != "rcm" or find_spec("scipy")]
CASES = [case for case in zoo(hub=500) if case.num_sources == case.num_targets]


def edge_set(edge_index: Tensor) -> list[list[int]]:
    return sorted(edge_index.t().tolist())


@pytest.fixture
def data() -> Data:
    nodes, edges = 60, 400
    return Data(
        x=torch.randn(nodes, 8),
        y=torch.arange(nodes),
        train_mask=torch.rand(nodes) < 0.5,
        edge_index=torch.randint(nodes - 5, (2, edges)),  # the last five are isolated
        edge_attr=torch.randn(edges, 3),
        edge_label_index=torch.randint(nodes, (2, 7)),
        nearest_index=torch.randint(-1, nodes, (nodes,)),
        names=[f"node {i}" for i in range(nodes)],
        table=np.arange(2 * nodes).reshape(nodes, 2),
        whole=torch.randn(1, 4),
        title="one of them",
    )


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_renames_the_nodes_of_every_graph(
    case: GraphCase, method: str, dtype: torch.dtype
) -> None:
    edge_index = case.edge_index.to(dtype)
    kept = edge_index.clone()
    result = pyg_accel.reorder(edge_index, method, num_nodes=case.num_sources)
    edges, inverse = result
    places = torch.arange(case.num_sources)
    assert torch.equal(result.order.sort().values, places)
    assert torch.equal(result.order[inverse], places)
    assert torch.equal(edge_index, kept)
    assert edges.dtype == dtype
    assert torch.equal(edges.long(), inverse[edge_index.long()[:, result.edge_order]])
    if edges.numel():
        assert edge_set(result.order[edges.long()]) == edge_set(edge_index)
    key = edges[1].long() * max(case.num_sources, 1) + edges[0].long()
    assert bool((key.diff() >= 0).all()), "sorted by target, then source"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", [GCN, GraphSAGE, GAT])
def test_a_models_output_is_the_same_in_the_old_order(data, layer, method):
    model = layer(8, 16, num_layers=2, out_channels=4, **({"edge_dim": 3} if layer is GAT else {}))
    extra = {} if layer is not GAT else {"edge_attr": data.edge_attr}
    expected = model(data.x, data.edge_index, **extra)
    new, inverse = pyg_accel.reorder(data, method)
    extra = {} if layer is not GAT else {"edge_attr": new.edge_attr}
    actual = model(new.x, new.edge_index, **extra)
    torch.testing.assert_close(actual[inverse], expected)
    torch.testing.assert_close(actual, expected[new.y])


def test_every_attribute_follows_its_nodes_or_edges(data):
    before = copy.deepcopy(data)
    result = pyg_accel.reorder(data)
    new, order = result.data, result.order
    for key in before.keys():  # noqa: SIM118 - a Data iterates over pairs
        value, original = data[key], before[key]
        assert (
            torch.equal(value, original)
            if isinstance(original, Tensor)
            else np.array_equal(value, original)
        )
    assert torch.equal(new.x, data.x[order])
    assert torch.equal(new.y, order)
    assert torch.equal(new.train_mask, data.train_mask[order])
    assert torch.equal(new.edge_attr, data.edge_attr[result.edge_order])
    assert torch.equal(order[new.edge_label_index], data.edge_label_index)
    assert np.array_equal(new.table, data.table[order.numpy()])
    assert new.names == [f"node {i}" for i in order.tolist()]
    nearest = torch.where(new.nearest_index < 0, -1, order[new.nearest_index.clamp(min=0)])
    assert torch.equal(nearest, data.nearest_index[order])
    assert new.whole is data.whole
    assert new.title == data.title
    assert new.num_nodes == 60


def test_isolated_nodes_come_last_and_are_kept(data):
    new, inverse = pyg_accel.reorder(data)
    assert sorted(inverse[-5:].tolist()) == [55, 56, 57, 58, 59]
    assert new.num_nodes == data.num_nodes


@pytest.mark.parametrize("convert", [to_torch_csr_tensor, to_torch_coo_tensor])
def test_a_sparse_matrix_is_renamed_in_rows_and_columns(convert):
    edge_index, value = torch.randint(9, (2, 40)).unique(dim=1), None
    value = torch.rand(edge_index.size(1))
    data = Data(x=torch.randn(9, 3), adj_t=convert(edge_index, value, size=9))
    new, inverse = pyg_accel.reorder(data)
    assert new.adj_t.layout == data.adj_t.layout
    dense = new.adj_t.to_dense()
    torch.testing.assert_close(dense[inverse][:, inverse], data.adj_t.to_dense())
    assert "edge_index" not in new


@pytest.mark.parametrize("with_value", [True, False])
def test_a_sparse_tensor_is_renamed_in_rows_and_columns(with_value):
    sparse = pytest.importorskip("torch_sparse", reason="torch-sparse is not installed")
    row, col = torch.randint(9, (2, 40)).unique(dim=1)
    value = torch.rand(row.numel()) if with_value else None
    adj_t = sparse.SparseTensor(row=row, col=col, value=value, sparse_sizes=(9, 9))
    new, inverse = pyg_accel.reorder(Data(x=torch.randn(9, 3), adj_t=adj_t))
    assert new.adj_t.has_value() == with_value
    torch.testing.assert_close(new.adj_t.to_dense()[inverse][:, inverse], adj_t.to_dense())


def test_an_edge_index_with_facts_keeps_them_up_to_date():
    plain = torch.tensor([[0, 1, 1, 3], [1, 0, 3, 1]])
    edges, _ = pyg_accel.reorder(EdgeIndex(plain, sparse_size=(5, 5), is_undirected=True))
    assert isinstance(edges, EdgeIndex)
    assert edges.sort_order == "col"
    assert edges.is_undirected
    edges.validate()


def test_a_users_order_is_applied(data):
    order = torch.randperm(60)
    result = pyg_accel.reorder(data, order)
    assert torch.equal(result.order, order)
    assert torch.equal(result.data.x, data.x[order])


def test_directed_graphs_stay_directed():
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    for method in METHODS:
        edges, inverse = pyg_accel.reorder(edge_index, method)
        assert edge_set(edges) == edge_set(inverse[edge_index])


@pytest.mark.parametrize("method", METHODS)
def test_the_same_graph_gives_the_same_order_for_any_number_of_threads(method):
    edge_index = torch.randint(3000, (2, 60_000))
    orders = []
    for threads in (1, 2, 5, 1):
        torch.set_num_threads(threads)
        orders.append(pyg_accel.reorder(edge_index, method).order)
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_the_result_prints_its_size_and_times(data):
    text = str(pyg_accel.reorder(data))
    assert text.startswith("community: 60 nodes, 400 edges, found in ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pyg_accel.reorder(torch.zeros(2, 3, dtype=torch.long), "best"),
            "no method 'best'",
        ),
        (lambda: pyg_accel.reorder(Batch.from_data_list([Data(x=torch.ones(1, 1))])), "batched"),
        (lambda: pyg_accel.reorder(HeteroData()), "one type of nodes"),
        (lambda: pyg_accel.reorder(Data(x=torch.ones(2, 1))), "'edge_index' or an 'adj_t'"),
        (lambda: pyg_accel.reorder([[0], [1]]), "got list"),
        (lambda: pyg_accel.reorder(torch.eye(3).to_sparse_csr()), "not a sparse matrix"),
        (lambda: pyg_accel.reorder(torch.zeros(2, 3)), "int32 or int64"),
        (lambda: pyg_accel.reorder(torch.zeros(2, 3).long(), torch.tensor([1])), "permutation of"),
        (
            lambda: pyg_accel.reorder(Data(edge_index=torch.zeros(2, 1).long()), num_nodes=4),
            "'num_nodes' is for an edge_index",
        ),
    ],
)
def test_misuse_is_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_ids_outside_of_the_graph_are_refused():
    with pytest.raises(IndexError, match="outside of"):
        pyg_accel.reorder(torch.tensor([[0, 9], [1, 2]]), num_nodes=5)
