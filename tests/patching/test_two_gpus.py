"""A second GPU: work goes where the tensors are, and processes with one each train together."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINEConv, SAGEConv, TransformerConv
from torch_geometric.nn.models import GraphSAGE

import pyg_accel
from pyg_accel import Graph, MaxK, MaxKSAGEConv, ops, use_backend
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices"),
]

NODES, EDGES, WIDTH = 1000, 12_000, 32
TOLERANCE = 2e-4  # of the largest value: float32 sums in another order
LAYERS = {
    "GCN": lambda: GCNConv(WIDTH, WIDTH),
    "SAGE-mean": lambda: SAGEConv(WIDTH, WIDTH),
    "SAGE-max": lambda: SAGEConv(WIDTH, WIDTH, aggr="max"),
    "GINE": lambda: GINEConv(torch.nn.Linear(WIDTH, WIDTH), edge_dim=5),
    "GAT": lambda: GATConv(WIDTH, 8, heads=4),
    "GATv2": lambda: GATv2Conv(WIDTH, 8, heads=4),
    "Transformer": lambda: TransformerConv(WIDTH, 8, heads=4),
}


@pytest.fixture(autouse=True)
def whatever_the_size() -> None:
    settings.always = True


def make_graph(seed: int = 0) -> Tensor:
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(seed))


def step(layer: Module, x: Tensor, *others: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x, *others)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def assert_near(ours: list[Tensor], right: list[Tensor]) -> None:
    for mine, good in zip(ours, right, strict=True):
        assert mine.device == good.device
        error = float((mine - good).abs().max() / good.abs().max().clamp(min=1.0))
        assert error <= TOLERANCE, error


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_where_their_tensors_are(name):
    torch.cuda.set_device(0)
    layer = LAYERS[name]().to("cuda:1")
    inputs = [torch.randn(NODES, WIDTH, device="cuda:1"), make_graph().to("cuda:1")]
    if name == "GINE":
        inputs.append(torch.randn(EDGES, 5, device="cuda:1"))
    right = step(layer, *inputs)
    with pyg_accel.patched():
        assert_near(step(layer, *inputs), right)
    assert torch.cuda.current_device() == 0


def test_maxk_runs_where_its_tensors_are():
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    ours, dense = MaxKSAGEConv(WIDTH, WIDTH, k=8), SAGEConv(WIDTH, WIDTH)
    dense.load_state_dict(ours.state_dict())
    x, edge_index = torch.randn(NODES, WIDTH, device="cuda:1"), make_graph().to("cuda:1")
    masked = torch.nn.Sequential(MaxK(8)).to("cuda:1")(x)
    right = dense.to("cuda:1")(masked, edge_index)
    assert_near([ours.to("cuda:1")(x, edge_index)], [right])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_both_devices_in_turns(backend):
    """What is kept of a graph, a kernel or a device belongs to one of them."""
    edge_index, x = make_graph(), torch.randn(NODES, WIDTH)
    right = ops.spmm(Graph.from_edge_index(edge_index, (NODES, NODES)), x)
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            graph = Graph.from_edge_index(edge_index.to(device), (NODES, NODES))
            with use_backend(backend):
                assert_near([ops.spmm(graph, x.to(device))], [right.to(device)])


def model() -> Module:
    torch.manual_seed(1)
    return GraphSAGE(WIDTH, 16, num_layers=2, out_channels=3)


def _train(rank: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    settings.always = True
    pyg_accel.patch()
    net = torch.nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[rank])
    torch.manual_seed(rank)
    x, edge_index = torch.randn(NODES, WIDTH), make_graph(rank)
    net(x.cuda(), edge_index.cuda()).square().mean().backward()
    assert all(row.formula for row in pyg_accel.report().rows)
    torch.save([p.grad.cpu() for p in net.parameters()], folder / f"gradients-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_averages_gradients_over_nccl(tmp_path):
    mp.spawn(_train, (tmp_path,), nprocs=2)
    expected = []
    for rank in range(2):
        net = model()
        torch.manual_seed(rank)
        net(torch.randn(NODES, WIDTH), make_graph(rank)).square().mean().backward()
        expected.append([p.grad for p in net.parameters()])
    for rank in range(2):
        actual = torch.load(tmp_path / f"gradients-{rank}.pt", weights_only=True)
        for ours, first, second in zip(actual, *expected, strict=True):
            torch.testing.assert_close(ours, (first + second) / 2, rtol=1e-3, atol=1e-5)
