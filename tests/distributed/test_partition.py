"""Parts that METIS finds, where it is installed."""

import copy

import pytest
import torch
from torch_geometric import nn
from torch_geometric.data import Data

import pyg_accel
from pyg_accel.distributed import partitioners
from pyg_accel.distributed.partition import ROW, partition
from pyg_accel.errors import NotDistributable


def blocks(nodes: int = 400, edges: int = 6000) -> torch.Tensor:
    """Four communities, nodes in no order, with loops and duplicates; some edges lead anywhere."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(nodes, (edges,), generator=generator)
    second = (first + 4 * torch.randint(nodes // 4, (edges,), generator=generator)) % nodes
    away = torch.rand(edges, generator=generator) < 0.05
    second[away] = torch.randint(nodes, (int(away.sum()),), generator=generator)
    return torch.stack([first, second])


def test_it_finds_parts_of_equal_work():
    pytest.importorskip("pymetis")
    edges = blocks()
    actual = partition(edges, 400, 4, "metis")
    assert torch.equal(actual.order.sort().values, torch.arange(400))
    rank = torch.empty(400, dtype=torch.int64)
    rank[actual.order] = torch.repeat_interleave(torch.arange(4), actual.cuts.diff())
    work = torch.bincount(rank, torch.bincount(edges[1], minlength=400) + ROW, minlength=4)
    assert float(work.max() / work.mean()) < 1.1
    assert float((rank[edges[0]] != rank[edges[1]]).float().mean()) < 0.1


@pytest.mark.parametrize(("nodes", "edges", "ranks"), [(0, 0, 2), (3, 0, 2), (5, 9, 1), (2, 3, 4)])
def test_small_graphs_are_cut_too(nodes, edges, ranks):
    pytest.importorskip("pymetis")
    actual = partition(torch.zeros(2, edges, dtype=torch.int64), nodes, ranks, "metis")
    assert actual.order.numel() == nodes and actual.cuts.numel() == ranks + 1
    assert int(actual.cuts[-1]) == nodes


def trained(device: torch.device) -> None:
    data = Data(x=torch.randn(400, 8, dtype=torch.float64), edge_index=blocks()).to(device)
    model = nn.GCN(8, 8, 2, 3).double().to(device)
    expected = model(data.x, data.edge_index)
    spread, share = pyg_accel.distribute(copy.deepcopy(model), data, partition="metis")
    actual = spread(share.x, share.edge_index)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_all_ranks_use_its_parts(two):
    pytest.importorskip("pymetis")
    two(trained)


def test_a_folder_takes_no_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(partitioners, "find_spec", lambda name: True)
    data = Data(x=torch.randn(400, 8), edge_index=blocks())
    with pytest.raises(NotDistributable, match="serves any"):
        pyg_accel.distributed.save(data, tmp_path / "stored", partition="metis")
