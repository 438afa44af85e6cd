"""Captures and their replays: of CUDA graphs on a GPU, of tapes (`conftest.py`) without one."""

import copy
import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.utils import remove_self_loops

import pyg_accel
from pyg_accel.cuda_graphs.batch_norm import RealRows, masked_batch_norm
from pyg_accel.settings import settings
from tests.cuda_graphs.models import close, module, outcome

CUDA = torch.cuda.is_available()
DEVICE, NODES = ("cuda", 30_000) if CUDA else ("cpu", 2_000)
pytestmark = pytest.mark.gpu if CUDA else pytest.mark.usefixtures("taped")
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def network(one: int, two: int, edges: bool = False) -> Sequential:
    return Sequential(
        Linear(2 * one if edges else one, two), BatchNorm1d(two), ReLU(), Linear(two, two)
    )


CONVS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "GIN": lambda i, o: pyg.GINConv(network(i, o), train_eps=True),
    "GINE": lambda i, o: pyg.GINEConv(network(i, o), edge_dim=3),
    "SAGE": pyg.SAGEConv,
    "GCN": pyg.GCNConv,
    "GAT": lambda i, o: pyg.GATConv(i, o // 4, heads=4),
    "GATv2": lambda i, o: pyg.GATv2Conv(i, o // 4, heads=4, edge_dim=3),
    "Cheb": lambda i, o: pyg.ChebConv(i, o, 3),
    "PDN": lambda i, o: pyg.PDNConv(i, o, 3, 8),
    "Edge": lambda i, o: pyg.EdgeConv(network(i, o, edges=True)),
}


class Molecules(torch.nn.Module):
    """A network over batches of small graphs."""

    def __init__(self, kind: str = "GIN", hidden: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.convs = torch.nn.ModuleList([CONVS[kind](8, hidden), CONVS[kind](hidden, hidden)])
        self.norms = torch.nn.ModuleList([BatchNorm1d(hidden), pyg.GraphNorm(hidden)])
        self.head = Linear(hidden, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            more = (edge_attr,) if self.kind in ("GINE", "GATv2", "PDN") else ()
            x = conv(x, edge_index, *more)
            x = norm(x, batch) if isinstance(norm, pyg.GraphNorm) else norm(x)
            x = x.relu()
        return self.head(pyg.global_mean_pool(x, batch) + 0.1 * pyg.global_add_pool(x, batch))


def molecules(graphs: int, seed: int) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(seed)
    nodes = torch.randint(8, 24, (graphs,), generator=numbers)
    batch = torch.repeat_interleave(torch.arange(graphs), nodes)
    starts = nodes.cumsum(0) - nodes
    which = torch.randint(len(batch), (2 * len(batch),), generator=numbers)
    one = torch.rand(len(which), generator=numbers)
    source = starts[batch[which]] + (one * nodes[batch[which]]).long()
    edge_index = torch.stack([source, which])
    rows = [torch.randn(n, f, generator=numbers) for n, f in ((len(batch), 8), (len(which), 3))]
    y = torch.randn(graphs, 1, generator=numbers)
    return tuple(t.to(DEVICE) for t in (rows[0], edge_index, rows[1], batch, y))


def twins(model: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = model.to(DEVICE)
    return copy.deepcopy(model), pyg_accel.graphed(model, **options)


def near(one: Tensor, other: Tensor, tolerance: float = 1e-3) -> None:
    close([one], [other], tolerance)


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


@needs_gpu
def test_stock_gcn_cannot_be_captured_and_training_goes_on(replays, reasons):
    x, edge_index = torch.randn(50, 8, device=DEVICE), torch.randint(50, (2, 300), device=DEVICE)
    eager, fast = twins(pyg.GCN(8, 16, 2, 4, dropout=0.5))
    for step in range(8):
        for model in (eager, fast):
            torch.manual_seed(step)
            model.zero_grad()
            model(x, edge_index).sum().backward()
        near(fast.convs[0].bias.grad, eager.convs[0].bias.grad)
    assert replays() == 0
    assert len(reasons()) == 1, reasons()
    torch.nn.functional.dropout(x, 0.5)  # the random numbers still come
    torch.cuda.synchronize()
    other = pyg_accel.graphed(Sequential(Linear(8, 8), torch.nn.Dropout(0.5)).to(DEVICE))
    for _ in range(6):
        other(x).sum().backward()
    assert replays() > 0, reasons()


@needs_gpu
def test_replays_read_an_edge_list_whose_graph_was_built_since(replays, reasons):
    edge_index = torch.randint(NODES, (2, 8 * NODES), device=DEVICE)
    graph = pyg_accel.Graph.from_edge_index(edge_index.clone(), (NODES, NODES))
    x = torch.randn(NODES, 16, device=DEVICE)
    fast = pyg_accel.graphed(module(lambda self, x: pyg_accel.ops.spmm(graph, x)))
    for _ in range(6):
        fast(x)
    assert replays() > 0, reasons()
    assert not graph.built
    graph.build()
    junk = [torch.full_like(edge_index, -1) for _ in range(4)]  # in freed memory
    near(fast(x), torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]]), 1e-5)
    del junk


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


@needs_gpu  # without one: test_captures_that_pay_go_on_being_made
def test_shapes_in_rotation_are_not_captured_for_ever(replays):
    """Twelve sizes in turn and eight captures: what is captured stays, the others are eager."""
    fast = twins(Molecules("GIN"), dynamic=False)[1]
    batches = [molecules(20 + i, i) for i in range(12)]
    for step in range(600):
        *inputs, _ = batches[step % 12]
        out = fast(*inputs)
        out.sum().backward()
        if step == 480:
            made, before = len(fast.captures), replays()
    assert 0 < made <= len(fast.captures) <= 8
    assert replays() >= before + 9 * made


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


@needs_gpu
def test_dropout_draws_new_numbers_in_each_replay():
    fast = pyg_accel.graphed(Sequential(Linear(8, 64), torch.nn.Dropout(0.5)).to(DEVICE))
    x = torch.randn(100, 8, device=DEVICE)
    outs = [fast(x).detach() for _ in range(8) for _ in [fast(x).sum().backward()]]
    zeros = [out == 0 for out in outs]
    assert len(fast.captures) == 1
    assert all((one != other).any() for one, other in itertools.pairwise(zeros))


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


@needs_gpu
def test_a_whole_step_on_batches_of_changing_size(replays, reasons):
    eager = Molecules("GINE").to(DEVICE)
    fast = copy.deepcopy(eager)

    def stepper(model: torch.nn.Module) -> Callable[..., Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True)

        def step(
            x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, y: Tensor
        ) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, edge_index, edge_attr, batch), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    one, two = stepper(eager), pyg_accel.graphed_step(stepper(fast))
    for step in range(16):
        data = molecules(32 if step % 5 else 20, step)
        near(two(*data), one(*data), 2e-2)
    assert not reasons(), reasons()
    assert replays() >= 8
    for name, value in eager.state_dict().items():
        near(fast.state_dict()[name], value, 5e-2)


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


@needs_gpu
def test_memory_is_bounded_and_freed_with_the_wrapper():
    first = pyg_accel.graphed(Linear(8, 256).to(DEVICE))  # cuBLAS keeps memory for each stream
    for _ in range(6):
        first(torch.randn(1000, 8, device=DEVICE)).sum().backward()
    del first
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    fast = pyg_accel.graphed(Sequential(Linear(8, 256), Linear(256, 8)).to(DEVICE), max_captures=2)
    with torch.no_grad():
        for rows in (10, 20, 30, 40, 50):
            x = torch.randn(rows * 100, 8, device=DEVICE)
            for _ in range(6):
                fast(x)
    assert len(fast.captures) <= 2
    del fast, x
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**21


@needs_gpu
def test_no_memory_for_a_capture(replays):
    eager, fast = twins(Sequential(Linear(8, 64), ReLU(), Linear(64, 1)))
    x = torch.randn(4_000_000, 8, device=DEVICE)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.synchronize()
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        expected = eager(x)
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        # A capture needs what an eager call needs twice.
        torch.cuda.set_per_process_memory_fraction(min(1.5 * peak / total, 1.0))
        try:
            for _ in range(6):
                near(fast(x), expected)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        y = torch.randn(100, 8, device=DEVICE)
        for _ in range(6):
            near(fast(y), eager(y))
    assert replays() > 0


@needs_gpu
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [700, 699, 300, 5])
def test_batch_norm_of_the_real_rows(rows, dtype, affine):
    x = (torch.randn(700, 24, device=DEVICE) * 3 + 5).to(dtype)
    weight, bias = (
        [torch.randn(24, device=DEVICE, requires_grad=True) for _ in range(2)]
        if affine else (None, None)
    )  # fmt: skip
    stats = [torch.zeros(24, device=DEVICE), torch.ones(24, device=DEVICE)]
    ours = [s.clone() for s in stats]
    one, two = x[:rows].clone().requires_grad_(), x.clone().requires_grad_()
    expected = F.batch_norm(one, *stats, weight, bias, True, 0.1, 1e-5)
    real = RealRows(700, torch.tensor(rows, device=DEVICE))
    found = masked_batch_norm(two, real, *ours, weight, bias, 0.1, 1e-5)
    tolerance = 2e-4 if dtype == torch.float32 else 3e-2
    near(found[:rows], expected, tolerance)
    near(ours[0], stats[0], tolerance)
    near(ours[1], stats[1], tolerance)
    grad = torch.randn_like(expected)
    leaves = [t for t in (weight, bias) if t is not None]
    by = torch.zeros_like(found)
    by[:rows] = grad
    wanted = torch.autograd.grad(expected, [one, *leaves], grad)
    got = torch.autograd.grad(found, [two, *leaves], by)
    assert (got[0][rows:] == 0).all()
    scale = max(float(wanted[0].float().abs().max()), 1e-2)
    torch.testing.assert_close(got[0][:rows], wanted[0], rtol=0, atol=10 * tolerance * scale)
    for g, w in zip(got[1:], wanted[1:], strict=True):
        near(g, w, tolerance * 5)
