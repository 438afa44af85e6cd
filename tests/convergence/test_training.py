"""Training under ``patch()`` goes where training without it goes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.utils import stochastic_blockmodel_graph

import pyg_accel

pytestmark = pytest.mark.usefixtures("always")

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gin": GIN, "gat": GAT}


def train(
    model: torch.nn.Module, x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor, steps: int
) -> dict[str, Any]:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, edge_index)[mask], y[mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = (model(x, edge_index).argmax(1) == y)[~mask].double().mean().item()
    return {"losses": losses, "accuracy": right, "parameters": list(model.parameters())}


def communities() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    sizes = torch.tensor([40, 40, 40])
    edges = stochastic_blockmodel_graph(sizes, torch.eye(3) * 0.2 + 0.01)
    y = torch.arange(3).repeat_interleave(sizes)
    x = torch.nn.functional.one_hot(y, 3) + 1.5 * torch.randn(120, 3)
    return x, edges, y, torch.arange(120) % 2 == 0


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_in_float64_follow_stock(name):
    """Only the order of additions differs: rounding of 1e-16 that Adam and 30 steps amplify."""
    x, edges, y, mask = communities()
    torch.manual_seed(2)
    model = MODELS[name](3, 16, 2, 3, dropout=0.2).double()
    stock = train(model, x.double(), edges, y, mask, 30)
    with pyg_accel.patched():
        ours = train(model, x.double(), edges, y, mask, 30)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours["parameters"], stock["parameters"], rtol=1e-6, atol=1e-6)
    assert ours["accuracy"] == stock["accuracy"]
    assert stock["losses"][-1] < 0.8 * stock["losses"][0], "nothing was learnt"


@pytest.mark.one_of(2, 1)
@pytest.mark.parametrize("name", MODELS)
def test_thirty_steps_in_float32_end_where_stock_ends(name):
    """Adam divides by the size of gradients, so that rounding of small ones moves parameters."""
    x, edges, y, mask = communities()
    torch.manual_seed(2)
    model = MODELS[name](3, 16, 2, 3)
    stock = train(model, x, edges, y, mask, 30)
    with pyg_accel.patched():
        ours = train(model, x, edges, y, mask, 30)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-3, atol=1e-3)
    assert abs(ours["accuracy"] - stock["accuracy"]) <= 1 / 60


@pytest.mark.full
@pytest.mark.parametrize("name", ["gcn", "sage"])
@pytest.mark.parametrize("data", ["Cora", "facebook-pages"])
def test_real_graphs_are_learnt_as_by_stock(name, data, data_root, report_of, monkeypatch):
    datasets = pytest.importorskip("benchmarks.tools.datasets")
    graph = datasets.load_task(data, data_root)
    torch.set_num_threads(2)
    torch.manual_seed(2)
    model = MODELS[name](graph.x.size(1), 16, 2, int(graph.y.max()) + 1)
    inputs = graph.x, graph.edge_index, graph.y, graph.train_mask, 20
    stock = train(model, *inputs)
    with pyg_accel.patched():
        ours = train(model, *inputs)
    torch.testing.assert_close(ours["losses"], stock["losses"], rtol=1e-3, atol=1e-3)
    assert abs(ours["accuracy"] - stock["accuracy"]) < 0.005
    assert all(row.formula for row in report_of())
