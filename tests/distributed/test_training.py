"""Ways models are trained: autocast, accumulated gradients, compiled parts, dropout, wrappers."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric import nn
from torch_geometric.data import Data

import pyg_accel
from pyg_accel.settings import settings


def graph(device: torch.device, dtype: torch.dtype = torch.float64) -> Data:
    generator = torch.Generator().manual_seed(2)
    return Data(
        x=torch.randn(40, 6, generator=generator, dtype=dtype),
        y=torch.randint(3, (40,), generator=generator),
        edge_index=torch.randint(38, (2, 200), generator=generator),
    ).to(device)


def gradients(model: Any, data: Data, times: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    for _ in range(times):
        out = model(data.x, data.edge_index)
        torch.nn.functional.cross_entropy(out, data.y).backward()
    return {"output": out.detach()} | {
        name.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("module."): p.grad
        for name, p in model.named_parameters()
    }


def same(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = max(float(wanted.abs().max()), 1.0)
        torch.testing.assert_close(actual[name], wanted, rtol=0, atol=limit * scale)


def pair(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    settings.always = True
    torch.manual_seed(3)
    model = nn.GraphSAGE(6, 8, 2, 3).to(device, dtype)
    return model, copy.deepcopy(model)


def accumulated(device: torch.device) -> None:
    alone, many = pair(device)
    expected = gradients(alone, graph(device), times=3)
    spread, share = pyg_accel.distribute(many, graph(device))
    same(gradients(spread, share, times=3), expected)


def test_gradients_accumulate(two):
    two(accumulated)


def retained(device: torch.device) -> None:
    """Two backward passes through one forward pass, and a gradient of a gradient."""
    alone, many = pair(device)
    results = []
    spread, share = pyg_accel.distribute(many, graph(device))
    for model, data in ((alone, graph(device)), (spread, share)):
        with pyg_accel.patched() if model is spread else torch.enable_grad():
            out = model(data.x, data.edge_index)
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].sum().backward()
        results.append({n.removeprefix("module."): p.grad for n, p in model.named_parameters()})
    same(results[1], results[0])


def test_a_graph_is_kept_for_a_second_backward_pass(two):
    two(retained)


def wrapped(device: torch.device) -> None:
    alone, many = pair(device)
    expected = gradients(alone, graph(device))
    by_function = lambda model: DistributedDataParallel(model)  # noqa: E731
    spread, share = pyg_accel.distribute(many, graph(device), wrap=by_function)
    same(gradients(spread, share), expected)


def test_ddp_averages_in_our_place(two):
    two(wrapped)


def autocast(device: torch.device) -> None:
    alone, many = pair(device, torch.float32)
    data = graph(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        expected = alone(data.x, data.edge_index)
    spread, share = pyg_accel.distribute(many, data)
    with pyg_accel.patched(), torch.autocast(device.type, torch.bfloat16):
        actual = spread(share.x, share.edge_index)
        loss = torch.nn.functional.cross_entropy(actual.float(), share.y)
    loss.backward()
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in many.parameters())


def test_autocast(two):
    two(autocast)


def compiled(device: torch.device) -> None:
    alone, many = pair(device)
    expected = gradients(alone, graph(device))
    spread, share = pyg_accel.distribute(many, graph(device))
    fast = torch.compile(spread, backend="aot_eager")
    with pyg_accel.patched():
        same(gradients(fast, share), expected)


@pytest.mark.full
def test_a_compiled_model_breaks_its_graph_at_layers(two):
    two(compiled)


def dropped(device: torch.device) -> tuple[Tensor, float]:
    """The model is dropout alone: what it keeps, and a number drawn after it."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    data = graph(device)
    data.x = torch.ones(40, 64, dtype=torch.float64, device=device)
    spread, share = pyg_accel.distribute(model, data, rows="own", partition="given")
    masks = [spread(share.x) for _ in range(2)]
    assert not torch.equal(masks[0], masks[1])
    return masks[0][:8].cpu(), float(torch.rand(()))


def test_dropout_differs_between_ranks_and_repeats_between_runs(two):
    first, second = two(dropped), two(dropped)
    assert torch.equal(first[0][0], second[0][0]) and torch.equal(first[1][0], second[1][0])
    assert not torch.equal(first[0][0], first[1][0])
    assert first[0][1] == first[1][1]  # of everybody else's random numbers


class Reversed(torch.nn.Module):
    """Along the edges and against them, with a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.DirGNNConv(nn.GCNConv(6, 8)), torch.nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index).relu()
        return self.last(h - nn.global_mean_pool(h, None))


def inferred(device: torch.device, layer: str) -> None:
    """What is kept of an inference must not get into a training step after it."""
    torch.manual_seed(3)
    if layer == "DirGNN":
        alone = Reversed().to(device, torch.float64).eval()
    else:
        made = {"GCN": nn.GCN, "SAGE": nn.GraphSAGE, "GAT": nn.GAT}[layer]
        alone = made(6, 8, 2, 3).to(device, torch.float64).eval()
    many, data = copy.deepcopy(alone), graph(device)
    spread, share = pyg_accel.distribute(many, data)
    wanted = alone(data.x, data.edge_index)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode(), pyg_accel.patched():
            out = spread(share.x, share.edge_index)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    assert "gradients" not in spread.wire.traffic
    with pyg_accel.patched():
        same(gradients(spread, share), gradients(alone, data))
    dist.barrier()


@pytest.mark.parametrize("layer", ["GCN", "SAGE", "GAT", "DirGNN"])
def test_inference_and_training_after_it(two, layer):
    two(inferred, layer=layer)


class Checkpointed(torch.nn.Module):
    """Layers, norms and a pool that run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.film, self.gcn = nn.FiLMConv(6, 8, num_relations=2), nn.GCNConv(8, 8)
        self.norm, self.last = nn.GraphNorm(8), torch.nn.Linear(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        def part(h: Tensor) -> Tensor:
            kinds = torch.zeros(edge_index.size(1), dtype=torch.int64, device=h.device)
            h = self.norm(self.gcn(self.film(h, edge_index, kinds), edge_index))
            return self.last(h.tanh()) + nn.global_mean_pool(h, None)[:, :3]

        return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)


def checkpointed(device: torch.device) -> None:
    settings.always = True
    torch.manual_seed(3)
    alone = Checkpointed().to(device, torch.float64)
    many, data = copy.deepcopy(alone), graph(device)
    expected = gradients(alone, data)
    spread, share = pyg_accel.distribute(many, data)
    for _ in range(2):
        same(gradients(spread, share), expected)
    same(gradients(alone, data), expected)  # nothing of the backward pass is left behind


def test_checkpointed_activations(two):
    two(checkpointed)


def changed(device: torch.device) -> None:
    """Features that stay are exchanged once, and again when they changed."""
    alone, many = pair(device)
    data = graph(device)
    spread, share = pyg_accel.distribute(many, data)
    halo = spread.wire.traffic
    calls = []
    with torch.no_grad():
        for _ in range(3):
            spread(share.x, share.edge_index)
            calls.append(halo["halo"].calls)
        share.x.mul_(2)
        actual = spread(share.x, share.edge_index)
    assert calls == [2, 3, 4]  # the second layer's, and once the first's
    assert halo["halo"].calls == 6
    torch.testing.assert_close(actual, alone(data.x * 2, data.edge_index), rtol=0, atol=1e-12)


def test_features_that_stay_are_exchanged_once(two):
    two(changed)


def left(device: torch.device) -> bool:
    """PyG is as it was when the last distributed model is gone."""
    import gc

    from pyg_accel.patching import api, overrides

    spread, share = pyg_accel.distribute(pair(device)[1], graph(device))
    spread(share.x, share.edge_index).sum().backward()
    assert overrides.installed() and "halos" in api.installed
    del spread, share
    gc.collect()
    actual = overrides.installed() or bool(api.installed)
    x = torch.ones(3, 2)
    assert torch.equal(nn.global_add_pool(x, None), x.sum(0, keepdim=True))
    return actual


@pytest.mark.full
def test_hooks_are_removed_with_the_model(fresh):
    assert fresh(2)(left) == [False, False]


class Unrolled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.SAGEConv(6, 8), nn.SAGEConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x, edge_index)) * 2
        return torch.tanh(self.second(h, edge_index))


def graphs_made(device: torch.device) -> list[set[str]]:
    made: list[set[str]] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        made.append({n.name for n in module.graph.nodes if n.op.startswith("call")})
        return module.forward

    torch._dynamo.reset()
    data = graph(device, torch.float32)
    plain = Unrolled().to(device)
    expected = plain(data.x, data.edge_index)
    spread, share = pyg_accel.distribute(copy.deepcopy(plain), data)
    run = torch.compile(spread, backend=backend)
    for _ in range(3):
        out = run(share.x, share.edge_index)
        out.sum().backward()
        torch.testing.assert_close(out, expected)
    return made


def test_the_compiler_gets_the_code_between_layers_only(two):
    for made in two(graphs_made):
        assert made == [{"sigmoid", "h"}, {"tanh"}]
