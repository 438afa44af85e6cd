"""Captures of CUDA graphs: what needs a device, its memory and its kernels."""

import copy
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential

import pyg_accel
from pyg_accel.cuda_graphs.batch_norm import RealRows, masked_batch_norm
from tests.cuda_graphs.captured import DEVICE, NODES, Molecules, molecules, near, needs_gpu, twins
from tests.cuda_graphs.models import module

pytestmark = [pytest.mark.gpu, needs_gpu]


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


def test_dropout_draws_new_numbers_in_each_replay():
    fast = pyg_accel.graphed(Sequential(Linear(8, 64), torch.nn.Dropout(0.5)).to(DEVICE))
    x = torch.randn(100, 8, device=DEVICE)
    outs = [fast(x).detach() for _ in range(8) for _ in [fast(x).sum().backward()]]
    zeros = [out == 0 for out in outs]
    assert len(fast.captures) == 1
    assert all((one != other).any() for one, other in itertools.pairwise(zeros))


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
    actual = masked_batch_norm(two, real, *ours, weight, bias, 0.1, 1e-5)
    tolerance = 2e-4 if dtype == torch.float32 else 3e-2
    near(actual[:rows], expected, tolerance)
    near(ours[0], stats[0], tolerance)
    near(ours[1], stats[1], tolerance)
    grad = torch.randn_like(expected)
    leaves = [t for t in (weight, bias) if t is not None]
    by = torch.zeros_like(actual)
    by[:rows] = grad
    wanted = torch.autograd.grad(expected, [one, *leaves], grad)
    got = torch.autograd.grad(actual, [two, *leaves], by)
    assert (got[0][rows:] == 0).all()
    scale = max(float(wanted[0].float().abs().max()), 1e-2)
    torch.testing.assert_close(got[0][:rows], wanted[0], rtol=0, atol=10 * tolerance * scale)
    for g, w in zip(got[1:], wanted[1:], strict=True):
        near(g, w, tolerance * 5)


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
