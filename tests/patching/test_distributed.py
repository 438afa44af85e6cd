"""Several processes, several threads, batches of a loader: the ways models are really trained."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB

import pyg_accel
from pyg_accel.runtime import report as call_report

SAMPLERS = WITH_PYG_LIB or importlib.util.find_spec("torch_sparse") is not None


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    monkeypatch.setenv("PYG_ACCEL_ALWAYS", "1")
    pyg_accel.reset_report()


def graph(nodes: int = 60, edges: int = 400, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 12, generator=generator),
        edge_index=torch.randint(nodes, (2, edges), generator=generator),
    )


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return GraphSAGE(12, 16, num_layers=2, out_channels=3)


def gradients(net: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters()]


def _train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    pyg_accel.patch()
    net = torch.nn.parallel.DistributedDataParallel(model())
    data = graph(seed=rank)
    net(data.x, data.edge_index).square().mean().backward()
    assert all(row.formula for row in call_report.report().rows)
    torch.save(gradients(net), folder / f"gradients-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_distributed_data_parallel_averages_the_gradients_of_patched_models(tmp_path):
    mp.spawn(_train, (tmp_path,), nprocs=2)
    expected = []
    for seed in range(2):
        net, data = model(), graph(seed=seed)
        net(data.x, data.edge_index).square().mean().backward()
        expected.append(gradients(net))
    for rank in range(2):
        actual = torch.load(tmp_path / f"gradients-{rank}.pt", weights_only=True)
        for ours, first, second in zip(actual, *expected, strict=True):
            torch.testing.assert_close(ours, (first + second) / 2)


def test_threads_that_share_a_graph_get_the_same_answers():
    net, data = model().eval(), graph()
    expected = net(data.x, data.edge_index)
    with pyg_accel.patched(), ThreadPoolExecutor(8) as pool, torch.no_grad():
        for out in pool.map(lambda _: net(data.x, data.edge_index), range(64)):
            torch.testing.assert_close(out, expected)


@pytest.mark.skipif(not SAMPLERS, reason="NeighborLoader needs pyg-lib or torch-sparse")
def test_every_batch_of_a_neighbour_loader_is_accelerated():
    data = graph(500, 6000)
    torch.manual_seed(1)
    net = GCN(12, 16, num_layers=2, out_channels=3)
    loader = NeighborLoader(data, num_neighbors=[5, 3], batch_size=50)
    for batch in loader:
        net.zero_grad()
        expected = net(batch.x, batch.edge_index)
        expected.sum().backward()
        wanted = [grad.clone() for grad in gradients(net)]
        net.zero_grad()
        with pyg_accel.patched():
            out = net(batch.x, batch.edge_index)
        out.sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients(net), wanted, rtol=1e-4, atol=1e-4)
    (row,) = call_report.report().rows
    assert row.formula and row.calls == 2 * len(loader)


@pytest.mark.skipif(not WITH_PYG_LIB, reason="only pyg-lib counts the nodes of every hop")
def test_trimmed_batches_are_accelerated():
    """BasicGNN cuts every layer's graph to what later layers need: the layers are bipartite."""
    data = graph(500, 6000)
    net = model()
    batch = next(iter(NeighborLoader(data, num_neighbors=[5, 3], batch_size=50)))
    sizes = {
        "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
        "num_sampled_edges_per_hop": batch.num_sampled_edges,
    }
    expected = net(batch.x, batch.edge_index, **sizes)[: batch.batch_size]
    with pyg_accel.patched():
        out = net(batch.x, batch.edge_index, **sizes)[: batch.batch_size]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert all(row.formula for row in call_report.report().rows)
