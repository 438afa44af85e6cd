"""Models that several threads of a rank run at once: distributed ones, and one that is not."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.utils import degree, scatter

import pyg_accel


class Graphs(torch.nn.Module):
    """Norms and a readout over all nodes, a part of which runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(5, 6), nn.SAGEConv(6, 6)
        self.graph, self.batch, self.layer = nn.GraphNorm(6), nn.BatchNorm(6), nn.LayerNorm(6)
        self.pool, self.last = nn.global_mean_pool, torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            return self.layer(self.graph(h, batch).tanh(), batch)

        h = self.batch(self.first(x, edge_index))
        h = torch.utils.checkpoint.checkpoint(part, h, use_reentrant=False)
        return self.last(self.pool(self.second(h, edge_index), batch))


def graph() -> Data:
    generator = torch.Generator().manual_seed(4)
    return Data(
        x=torch.randn(30, 5, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(30, (2, 160), generator=generator),
        batch=torch.arange(30) // 11,
    )


def run(model: Any, data: Data) -> list[Tensor]:
    model.zero_grad()
    out = model(data.x, data.edge_index, data.batch)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        limit = 1e-12 * max(float(other.abs().max()), 1)
        torch.testing.assert_close(one, other, rtol=0, atol=limit)


def several(device: torch.device, patched: bool) -> None:
    """Two threads distribute and train models of their own; a third runs a plain one."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models, wanted = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(Graphs().double())
        wanted.append(run(copy.deepcopy(models[-1]), graph()))
    done: list[int] = []

    def distributed(place: int) -> None:
        try:
            for _ in range(3):
                many = copy.deepcopy(models[place])
                spread, share = pyg_accel.distribute(many, graph(), groups[place])
                for _ in range(4):
                    same(run(spread, share), wanted[place])
                    many.load_state_dict(models[place].state_dict())
                del spread, share, many
                gc.collect()
        finally:
            done.append(place)

    def plain() -> None:
        data, index = graph(), torch.tensor([0, 2, 2])
        rows = torch.ones(3, 2)
        while len(done) < 2:
            same(run(copy.deepcopy(models[2]), data), wanted[2])
            assert nn.global_add_pool(rows, None).tolist() == [[3, 3]]
            assert degree(index, 3).tolist() == [1, 0, 2]
            assert scatter(rows, index, 0, 3).tolist() == [[1, 1], [0, 0], [2, 2]]

    with ThreadPoolExecutor(3) as pool, pyg_accel.patched() if patched else torch.enable_grad():
        for future in [
            pool.submit(distributed, 0),
            pool.submit(distributed, 1),
            pool.submit(plain),
        ]:
            future.result()


@pytest.mark.heavy(False)
@pytest.mark.parametrize("patched", [False, True], ids=["PyG", "patched"])
def test_models_of_several_threads_do_not_meet(fresh, patched):
    fresh(2)(several, patched=patched)
