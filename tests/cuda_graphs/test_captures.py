"""Captures and their replays: of CUDA graphs on a GPU, of tapes (`conftest.py`) without one."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.utils import remove_self_loops

import pyg_accel
from pyg_accel.settings import settings
from tests.cuda_graphs.captured import CONVS, CUDA, DEVICE, NODES, Molecules, molecules, near, twins
from tests.cuda_graphs.models import close, module, outcome

pytestmark = [pytest.mark.gpu if CUDA else pytest.mark.usefixtures("taped"),
              pytest.mark.usefixtures("untimed")]  # fmt: skip


def random(seed: int, *sizes: int, below: int = 0) -> Tensor:
    """Numbers, or integers below a number."""
    numbers = torch.Generator().manual_seed(seed)
    if below:
        return torch.randint(below, sizes, generator=numbers).to(DEVICE)
    return torch.randn(*sizes, generator=numbers).to(DEVICE)


KINDS = [("a", "to", "b"), ("b", "to", "a")]
RELATIONS: dict[str, Callable[[], torch.nn.Module]] = {
    "RGCN": lambda: pyg.RGCNConv(16, 16, 2),
    "SAGE": lambda: pyg.HeteroConv({one: pyg.SAGEConv(16, 16) for one in KINDS}),
    "GAT": lambda: pyg.HeteroConv(
        {one: pyg.GATConv(16, 4, heads=4, add_self_loops=False) for one in KINDS}
    ),
}


def of_types(self: Any, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    half = edge_index.size(1) // 2
    edges = dict(zip(KINDS, (edge_index[:, :half], edge_index[:, half:]), strict=True))
    features = dict(zip("ab", x.chunk(2), strict=True))
    for conv in (self.first, self.second):
        features = {name: out.relu() for name, out in conv(features, edges).items()}
    return torch.cat([features["a"], features["b"]])


def of_relations(self: Any, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
    x = self.first(x, edge_index, edge_type).relu()
    return self.second(x, edge_index, edge_type).relu()


def same(net: torch.nn.Module, calls: Iterable[Any], tolerance: float = 1e-3, *,
         patched: bool = False, always: bool = True, **options: Any) -> Any:  # fmt: skip
    """Compare captured calls with eager ones, which stay PyG's where the others are patched."""
    eager, fast = twins(net, **options)
    if patched:
        settings.always = always
        pyg_accel.patch(fast._original)
    for call in calls:
        expected = outcome(eager, call)
        close(outcome(fast, call), expected, tolerance)
    return fast


@pytest.mark.each
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("kind", RELATIONS)
def test_relations_whose_edges_change_are_those_of_eager(kind, patched, replays, replayed):
    """Of HeteroConv, each half of the nodes has numbers of its own."""
    forward, nodes = (of_relations, 400) if kind == "RGCN" else (of_types, 200)
    net = module(forward, first=RELATIONS[kind](), second=RELATIONS[kind]())
    calls = [(random(i, 400, 16), random(i, 2, 3000, below=nodes), random(i, 3000, below=2))
             for i in range(10)]  # fmt: skip
    same(net, calls, patched=patched)
    if kind == "RGCN":  # which edges are of a relation is known after waiting
        assert replays() == 0
    else:
        replayed(7)


@pytest.mark.each
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["SAGE", "GIN", "GAT"])
def test_facts_of_a_graph_are_not_used_for_another_of_the_same_size(kind, mode, replays, reasons):
    """Neither for an argument that is taken as it is, beside others that are padded."""
    make = {
        "SAGE": lambda: pyg.SAGEConv(16, 8), "GIN": lambda: pyg.GINConv(Linear(16, 8)),
        "GAT": lambda: pyg.GATConv(16, 4, heads=2, add_self_loops=False),
    }[kind]  # fmt: skip
    two_graphs = module(
        lambda self, x, edge_index, table, joined: (
            self.conv(x, edge_index) + self.other(table, joined).mean(0)),
        conv=make(), other=make(),
    )  # fmt: skip
    eager, fast = twins(two_graphs, roles={"table": "fixed", "joined": "fixed"})
    settings.always = True
    pyg_accel.patch(fast._original)
    for step in range(12):
        nodes = 60 if step < 6 else 60 + step % 2
        args = [random(step, nodes, 16), random(step, 2, 4 * nodes, below=nodes),
                random(step, 30, 16), random(step, 2, 90, below=30)]  # fmt: skip
        with mode():
            outs = [run(*args) for run in (eager, fast)]
            close(outs[1:], outs[:1], 1e-3)
        if outs[1].requires_grad:
            outs[1].sum().backward()
    assert replays() >= 6, reasons()


@pytest.mark.one_of(5)
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("kind", CONVS)
def test_training_on_batches_of_changing_size_is_that_of_eager(kind, patched, replays, reasons):
    eager, fast = twins(Molecules(kind))
    if patched:
        settings.always = True
        pyg_accel.patch(fast._original)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (eager, fast)]
    for step in range(16):
        x, edge_index, edge_attr, batch, y = molecules(32 if step % 5 else 20, step)
        if kind == "PDN":  # of several weighted self-loops of a node, PyG keeps any one
            edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        losses = []
        for model, optimizer in zip((eager, fast), optimizers, strict=True):
            optimizer.zero_grad()
            out = model(x, edge_index, edge_attr, batch)
            assert out.shape == y.shape
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        near(losses[1], losses[0], 1e-2)
    assert not reasons(), reasons()
    assert replays() >= 10
    assert len(fast.captures) <= 4
    for name, value in eager.state_dict().items():
        near(fast.state_dict()[name], value, 2e-2)
    eager.eval(), fast.eval()
    with torch.no_grad():
        kept, expected = [], []
        for step in range(10):
            *inputs, _ = molecules(32, 100 + step)
            if kind == "PDN":
                inputs[1:3] = remove_self_loops(*inputs[1:3])
            kept.append(fast(*inputs))
            expected.append(eager(*inputs))
    for one, other in zip(kept, expected, strict=True):  # results stay what they were
        near(one, other, 2e-2)


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_a_fixed_graph_is_replayed_under_patch(name, replayed):
    x, y = torch.randn(500, 16, device=DEVICE), torch.randint(4, (500,), device=DEVICE)
    edge_index = torch.randint(500, (2, 3000), device=DEVICE)
    model = {"GCN": pyg.GCN, "GAT": pyg.GAT}[name](16, 32, 2, 4, dropout=0.5)
    eager, fast = twins(model)
    settings.always = True
    pyg_accel.patch()
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (eager, fast)]
    for step in range(12):
        for model, optimizer in zip((eager, fast), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, edge_index), y)
            loss.backward()
            optimizer.step()
        if step > 9:
            near(fast.state_dict()["convs.0.bias"], eager.state_dict()["convs.0.bias"], 2e-2)
    replayed(9)


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_padded_stock_gcn_and_gat_are_captured(name, replayed):
    """Sampled batches of one size, some with self-loops; weights of edges have gradients."""

    def forward(self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight).relu()
        return x

    convs = [pyg.GCNConv(8, 8), pyg.GCNConv(8, 4)]
    if name == "GAT":
        convs = [pyg.GATConv(8, 8, edge_dim=1, fill_value="mean") for _ in range(2)]
    calls = []
    for step in range(14):
        x, edge_index = torch.randn(200, 8), torch.randint(150, (2, 900))
        if step < 9:
            edge_index[1] += edge_index[0] == edge_index[1]
        if 5 <= step < 9:
            edge_index[:, 100:130] = torch.arange(170, 200)
        elif step >= 9:
            edge_index[1, ::2] = edge_index[0, ::2]
        # Of several self-loops of a node, PyG keeps any one: let them be alike.
        weight = torch.linspace(0.1, 1, 900) if step < 9 else torch.ones(900)
        calls.append([t.to(DEVICE) for t in (x, edge_index, weight)])
    same(module(forward, convs=torch.nn.ModuleList(convs)), calls, 1e-2, dynamic=True)
    replayed(11)


@pytest.mark.parametrize("kind", ["GCN", "GAT", "SAGE"])
def test_sampled_batches_of_any_size_run_our_kernels_in_captures(kind, replayed, report_of):
    """Eager calls are PyG's by their size; nothing compiles, loads or waits in a capture."""

    def forward(self: Any, x: Tensor, edge_index: Tensor, batch_size: int) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)[:batch_size]

    calls = []
    for step in range(14):
        nodes = NODES + NODES // 309 * (step % 7)
        edges = 3 * NODES + NODES // 96 * (step % 5)
        calls.append((random(step, nodes, 32), random(step, 2, edges, below=nodes), 1_000 + step))
    net = module(forward, first=CONVS[kind](32, 128), second=CONVS[kind](128, 16))
    fast = same(net, calls, 1e-2, patched=True, always=False)
    replayed(11)
    assert len(fast.captures) == 1
    layer = type(fast.first).__name__
    backends = {row.backend for row in report_of() if row.layer == layer}
    assert any(b.startswith(("triton", "cuda", "cpu")) for b in backends), backends


def test_batches_of_one_size_with_other_numbers_of_graphs(replays, reasons):
    """Without padding, results are of the size that the largest id in `batch` says."""
    eager, fast = twins(Molecules("GIN").eval(), dynamic=False)
    *rows, batch, _ = molecules(24, 0)
    for step in range(24):
        given = (*rows, batch.clamp(max=(23, 23, 11, 17)[step % 4]))
        near(fast(*given), eager(*given))
    assert len(fast.captures) == 3 and replays() == 24 - 9, reasons()


def test_views_of_the_same_graph_are_that_graph(replays, reasons):
    """A capture that holds a graph takes every view of all of it, and no other part."""
    eager, fast = twins(pyg.SAGEConv(8, 4))
    x, edge_index = torch.randn(40, 8, device=DEVICE), torch.randint(40, (2, 200), device=DEVICE)
    for step in range(12):
        edges = edge_index[:, 100:] if step == 9 else edge_index[:]
        near(fast(x + step, edges), eager(x + step, edges))
        with torch.no_grad():
            near(fast(x.view_as(x), edges), eager(x, edges))
    assert len(fast.captures) == 2 and replays() == 2 * (12 - 4), reasons()


def test_autocast_and_gradient_accumulation_with_gradients_set_to_zero(replayed):
    eager, fast = twins(Molecules("GIN"))
    for step in range(12):
        for model in (eager, fast):
            if step % 3 == 0:
                model.zero_grad(set_to_none=step % 2 == 0)
            *inputs, y = molecules(32, step)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.mse_loss(model(*inputs).float(), y)
            loss.backward()
        for (name, one), two in zip(eager.named_parameters(), fast.parameters(), strict=True):
            if "head" in name:
                near(two.grad, one.grad, 6e-2)
    replayed(9)


def test_two_calls_before_their_backward_passes(reasons):
    eager, fast = twins(Sequential(Linear(8, 64), ReLU(), Linear(64, 1)))
    x, z = torch.randn(100, 8, device=DEVICE), torch.randn(100, 8, device=DEVICE)
    for _ in range(6):
        for model in (eager, fast):
            model.zero_grad()
            one, two = model(x), model(z)
            (one.sum() - (two**2).sum()).backward()
        near(fast.get_parameter("0.weight").grad, eager.get_parameter("0.weight").grad)
    assert any("awaits its backward pass" in reason for reason in reasons())


def test_gradients_of_the_arguments():
    calls = [molecules(32, step)[:4] for step in range(8)]
    # Some gradients are sums of float32 that cancel to a thousandth of their addends.
    assert same(Molecules("GINE").eval(), calls, tolerance=5e-3).captures


def test_a_model_that_waits_for_the_device_stays_eager(replays, reasons):
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out if out.sum() > 0 else -out

    same(module(forward, linear=Linear(8, 8)), [(random(i, 10, 8),) for i in range(8)])
    assert replays() == 0 and reasons()


def test_python_numbers_become_tensors_without_a_wait(replayed):
    scales = module(
        lambda self, x: self.linear(x) / torch.tensor(2.0, dtype=x.dtype, device=x.device),
        linear=Linear(8, 8),
    )
    same(scales, [(random(i, 10, 8),) for i in range(8)])
    replayed(5)


def test_an_exception_of_the_user_is_the_users(replays):
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.bad:
            raise KeyError("mine")
        return self.linear(x)

    eager, fast = twins(module(forward, linear=Linear(8, 8), bad=False))
    x = torch.randn(10, 8, device=DEVICE)
    for _ in range(6):
        near(fast(x), eager(x))
    fast.bad = True
    for _ in range(6):
        with pytest.raises(KeyError, match="mine"):
            fast(x)
    fast.bad = False
    near(fast(x), eager(x))
    assert replays() >= 3
