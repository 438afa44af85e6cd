"""Whole models on several ranks: outputs, gradients and steps are those of one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import pyg_accel
from benchmarks.layers.modes import traces
from pyg_accel.runtime import report as call_report
from pyg_accel.settings import settings

MODELS = {
    "GCN": lambda: GCN(6, 8, num_layers=2, out_channels=3),
    "SAGE": lambda: GraphSAGE(6, 8, num_layers=3, out_channels=3),
    "GIN": lambda: GIN(6, 8, num_layers=2, out_channels=3),
    "GAT": lambda: GAT(6, 8, num_layers=2, out_channels=3, heads=2),
    "GATv2": lambda: GAT(6, 8, num_layers=2, out_channels=3, heads=2, v2=True),
    "JK": lambda: GCN(6, 8, num_layers=3, out_channels=3, jk="cat", norm="batch_norm"),
    "cached": lambda: GCN(6, 8, num_layers=2, out_channels=3, cached=True),
}


def graph(name: str = "random", nodes: int = 40, edges: int = 200) -> Data:
    """Directed, with duplicates, loops and isolated nodes."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(nodes - 3, (2, edges), generator=generator)
    if name == "hub":
        edge_index[1, : edges // 2] = 5
    elif name == "tiny":  # fewer nodes than ranks
        nodes, edge_index = 2, torch.tensor([[0, 1, 1], [1, 0, 1]])
    elif name == "no edges":
        edge_index = edge_index[:, :0]
    return Data(
        x=torch.randn(nodes, 6, generator=generator, dtype=torch.float64),
        y=torch.randint(3, (nodes,), generator=generator),
        train_mask=torch.rand(nodes, generator=generator) < (0.6 if nodes > 2 else 2),
        edge_index=edge_index,
    )


def loss_of(out: Tensor, data: Data) -> Tensor:
    picked = data.train_mask if bool(data.train_mask.any()) else slice(None)
    return torch.nn.functional.cross_entropy(out[picked], data.y[picked])


def trained(model: Any, data: Data, loss: Any, steps: int = 3) -> dict[str, Tensor]:
    """Outputs and gradients of the first step, parameters and outputs after some."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    result = {}
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        value = loss(out, data)
        value.backward()
        if step == 0:
            result |= {"output": out, "loss": value}
            for name, p in model.named_parameters():
                result[f"gradient of {name.removeprefix('module.')}"] = p.grad.clone()
        optimizer.step()
    for name, p in model.named_parameters():
        result[f"after {name.removeprefix('module.')}"] = p
    model.eval()
    with torch.no_grad():
        result["after output"] = model(data.x, data.edge_index)
    return {name: t.detach().cpu().clone() for name, t in result.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        limit = (1e-10 if name.startswith("after") else 1e-12) * max(largest, 1.0)
        torch.testing.assert_close(actual[name], wanted, rtol=0, atol=limit,
                                   msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip


def compare(device: torch.device, model: str, name: str, patched: bool, **options: Any) -> None:
    """Train on all ranks and on one, and compare."""
    torch.set_default_dtype(torch.float64)
    settings.always = True
    data = graph(name)
    alone = MODELS[model]().to(device)
    many = copy.deepcopy(alone)
    expected = trained(alone, data.to(device), loss_of)
    handle = pyg_accel.patch() if patched else None
    try:
        spread, share = pyg_accel.distribute(many, graph(name), **options)
        if options.get("rows") == "own":
            actual = trained(spread, share, own_loss)
            expected["output"] = expected["output"][share.n_id.cpu()]
            expected["after output"] = expected["after output"][share.n_id.cpu()]
        else:
            actual = trained(spread, share, loss_of)
    finally:
        if handle is not None:
            handle.remove()
        torch.set_default_dtype(torch.float32)
    assert_same(actual, expected)
    if name == "random" and not isinstance(options.get("partition"), Tensor):
        assert spread.wire.traffic["halo"].received > 0
    dist.barrier()


def own_loss(out: Tensor, data: Data) -> Tensor:
    each = torch.nn.functional.cross_entropy(
        out[data.train_mask], data.y[data.train_mask], reduction="none"
    )
    return pyg_accel.distributed.mean(each)


@pytest.mark.parametrize("patched", [False, True], ids=["PyG", "patched"])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_on_two_ranks_is_that_of_one_process(two, model, patched):
    two(compare, model=model, name="random", patched=patched)


@pytest.mark.parametrize("rows", ["all", "own"])
@pytest.mark.parametrize("name", ["hub", "tiny", "no edges"])
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_odd_graphs_on_any_number_of_ranks(ranks, world, name, rows):
    ranks(world)(compare, model="GCN", name=name, patched=True, rows=rows)


@pytest.mark.parametrize("model", ["SAGE", "GAT"])
def test_own_rows_and_their_mean_loss(two, model):
    two(compare, model=model, name="random", patched=True, rows="own")


@pytest.mark.parametrize(
    "partition", ["given", "degree", torch.arange(40) % 2, torch.ones(40, dtype=torch.int64)],
    ids=["given", "degree", "vector", "an empty rank"],
)  # fmt: skip
def test_any_partition(two, partition):
    two(compare, model="GAT", name="random", patched=True, partition=partition)


def at_defaults(device: torch.device, model: str, uneven: bool) -> bool:
    """A graph beyond the thresholds: is a call of this rank accelerated?"""
    settings.always = None
    nodes, edges = (4_000, 100_000) if device.type == "cpu" else (40_000, 2_000_000)
    data = graph("large", nodes, edges)
    data.x = torch.randn(nodes, 32, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    made = {"GCN": GCN, "GAT": GAT, "SAGE": GraphSAGE}[model]
    alone = made(32, 16, num_layers=2, out_channels=3).to(device)
    many = copy.deepcopy(alone)
    whole = data.clone().to(device)
    expected = alone(whole.x, whole.edge_index)
    parts = (torch.arange(nodes) % 2000 == 7).long() if uneven else "community"
    pyg_accel.reset_report()
    with pyg_accel.patched():
        spread, share = pyg_accel.distribute(many, data, partition=parts)
        actual = spread(share.x, share.edge_index)
        loss_of(actual, share).backward()
    loss_of(expected, whole).backward()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for p, q in zip(many.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    return all(row.formula for row in call_report.report().rows)


@pytest.mark.parametrize("model", ["GCN", "GAT", "SAGE"])
def test_at_default_settings_calls_of_all_ranks_are_accelerated(two, model):
    assert two(at_defaults, model=model, uneven=False) == [True, True]


def traced(device: torch.device, model: str) -> list[int]:
    """How many messages each of some steps traces, none of which is PyG's."""
    torch.manual_seed(1)
    counts = []
    with pyg_accel.patched():
        spread, share = pyg_accel.distribute(MODELS[model]().double().to(device), graph())
        for _ in range(4):
            with traces() as entered:
                loss_of(spread(share.x, share.edge_index), share).backward()
            counts.append(len(entered))
        pyg_accel.reset_report()
        spread(share.x, share.edge_index)
    assert all(row.formula for row in call_report.report().rows)
    return counts


@pytest.mark.parametrize("model", MODELS)
def test_calls_of_all_ranks_are_recorded(two, model):
    for counts in two(traced, model=model):
        assert counts[2:] == [0, 0]


@pytest.mark.parametrize("model", ["GCN", "GAT"])
def test_a_rank_may_have_next_to_no_edges(two, model):
    assert two(at_defaults, model=model, uneven=True)[0]
