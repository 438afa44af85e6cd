"""MaxK and CBSR products on a GPU: the same answers as in float64 on the CPU."""

import pytest
import torch

from pyg_accel import CBSR, Graph, ops, use_backend
from pyg_accel.backends import get_backend
from pyg_accel.backends.cuda import cbsr as launches
from pyg_accel.backends.cuda.cbsr import MAXK_WIDTH
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHAPES = [(2, 1), (7, 3), (33, 8), (100, 20), (256, 16), (256, 32), (256, 255), (257, 40), (512, 6),
          (1000, 64), (5000, 300)]  # fmt: skip
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ERRORS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-2}


@pytest.fixture(params=["cuda", "triton"])
def backend(request):
    if reasons := get_backend(request.param).unavailable_reasons():
        pytest.skip("; ".join(reasons))
    return request.param


def make_graph(rows: int = 700, cols: int = 500, dtype: torch.dtype = torch.int32) -> Graph:
    """With empty rows and hubs that are cut."""
    degree = torch.randint(0, 40, (rows,))
    degree[::7] = 0
    degree[:3] = torch.tensor([9000, 2049, 4096])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col = torch.randint(0, cols, (int(rowptr[-1]),))
    return Graph.from_csr(rowptr.to(dtype).cuda(), col.to(dtype).cuda(), num_cols=cols)


def adjacency(graph: Graph, weight: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """The dense matrix in float64 on the CPU; weight is [E]."""
    degree = graph.degree.cpu().long()
    row = torch.repeat_interleave(degree)
    share = weight / degree.clamp(min=1)[row] if mean else weight
    matrix = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    return matrix.index_put((row, graph.col.cpu().long()), share, accumulate=True)


def check_close(actual, right, dtype):
    for a, b in zip(actual, right, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a.double().cpu(), b, rtol=0, atol=ERRORS[dtype] * scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_selection_equals_that_of_the_reference(backend, width, k, dtype):
    if backend == "cuda" and (dtype == torch.float64 or width > MAXK_WIDTH):
        pytest.skip("not a case for the CUDA kernel")
    x = torch.randn(300, width).to(dtype)
    x[0, : width // 2], x[1], x[2, -1], x[3, 0] = 0.0, -0.0, torch.nan, -torch.inf
    x[4], x[5], x[6] = torch.inf, torch.nan, torch.randint(-1, 2, (width,))
    x[7, : width // 2 + 1], x[8] = torch.nan, torch.arange(width)
    with use_backend(backend):
        actual = ops.maxk(x.cuda(), k)
    values, indices = get_backend("reference").kernels["maxk"].run(x, k)
    assert torch.equal(actual.indices.long().cpu(), indices.long())
    torch.testing.assert_close(actual.values.cpu(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_selection_takes_few_rows_and_rows_that_begin_anywhere(backend, rows):
    whole = torch.randn(rows * 33 + 1, device="cuda")
    x = whole[1:].view(rows, 33)
    with use_backend(backend):
        actual = ops.maxk(x, 4)
    values, indices = get_backend("reference").kernels["maxk"].run(x.cpu(), 4)
    assert torch.equal(actual.values.cpu(), values)
    assert torch.equal(actual.indices.cpu(), indices)


@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "k"), [*SHAPES, (1, 1), (64, 64), (20_000, 130)])
def test_products_and_gradients_equal_the_truth(backend, width, k, dtype, atomics):
    if backend == "cuda" and dtype == torch.float64:
        pytest.skip("not a case for the CUDA kernels")
    settings.atomics = atomics
    graph = make_graph()
    cbsr = ops.maxk(torch.randn(500, width, device="cuda").to(dtype), k)
    leaves = [cbsr.values.detach().requires_grad_(),
              torch.rand(graph.num_edges, device="cuda").to(dtype).requires_grad_()]  # fmt: skip
    exact = [t.detach().double().cpu().requires_grad_() for t in leaves]
    with use_backend(backend):
        out = ops.cbsr_spmm(graph, CBSR(leaves[0], cbsr.indices, width), leaves[1], reduce="mean")
        grad = torch.randn_like(out)
        ours = (out, *torch.autograd.grad(out, leaves, grad))
    matrix = adjacency(graph, exact[1], mean=True)
    right = matrix @ CBSR(exact[0], cbsr.indices.cpu(), width).dense()
    expected = (right, *torch.autograd.grad(right, exact, grad.double().cpu()))
    check_close(ours, expected, dtype)


@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cols", [1, 90])
def test_sums_without_weights_over_wide_and_narrow_indices(backend, index, cols, atomics):
    settings.atomics = atomics
    graph = make_graph(60, cols, index)
    cbsr = ops.maxk(torch.randn(cols, 64, device="cuda"), 10)
    leaf = cbsr.values.clone().requires_grad_()
    with use_backend(backend):
        out = ops.cbsr_spmm(graph, CBSR(leaf, cbsr.indices, 64))
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    exact = leaf.detach().double().cpu().requires_grad_()
    matrix = adjacency(graph, torch.ones(graph.num_edges, dtype=torch.float64), mean=False)
    right = matrix @ CBSR(exact, cbsr.indices.cpu(), 64).dense()
    (right_grad,) = torch.autograd.grad(right.square().sum(), exact)
    check_close((out, grad), (right, right_grad), torch.float32)


@pytest.mark.parametrize("k", [8, 16, 32, 64])
def test_slots_that_are_taken_in_several_passes_come_back_in_order(k, monkeypatch):
    settings.atomics = True
    graph = make_graph()
    cbsr = ops.maxk(torch.randn(500, 200, device="cuda"), k)
    grads = []
    for most in (40 << 20, 500 * 8 * 4):
        monkeypatch.setattr(launches, "near_bytes", lambda device, most=most: most)
        leaf = cbsr.values.clone().requires_grad_()
        with use_backend("cuda"):
            out = ops.cbsr_spmm(graph, CBSR(leaf, cbsr.indices, 200))
            grads.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3 * float(grads[0].abs().max()))


@pytest.mark.parametrize("most", [500 * 32 * 4, 500 * 64 * 4, 40 << 20])
def test_gradients_gathered_slice_by_slice_are_the_same(most, monkeypatch):
    settings.atomics = False
    graph, x = make_graph(), torch.randn(500, 300, device="cuda")
    cbsr = ops.maxk(x, 70)
    leaf = cbsr.values.double().requires_grad_()
    right = ops.cbsr_spmm(graph, CBSR(leaf, cbsr.indices, 300))
    ours = cbsr.values.clone().requires_grad_()
    monkeypatch.setattr(launches, "near_bytes", lambda device, most=most: most)
    with use_backend("cuda"):
        out = ops.cbsr_spmm(graph, CBSR(ours, cbsr.indices, 300))
        actual = torch.autograd.grad(out.sum() + out[:, ::3].sum(), ours)
    expected = torch.autograd.grad(right.sum() + right[:, ::3].sum(), leaf)
    check_close(actual, [t.cpu() for t in expected], torch.float32)


@pytest.mark.parametrize("switch", ["setting", "torch"])
def test_the_same_bits_come_out_every_time(backend, switch):
    if switch == "setting":
        settings.atomics = False
    graph, x = make_graph(), torch.randn(500, 256, device="cuda")
    answers = []
    torch.use_deterministic_algorithms(switch == "torch", warn_only=True)
    try:
        for _ in range(3):
            cbsr = ops.maxk(x, 32)
            leaf = cbsr.values.clone().requires_grad_()
            with use_backend(backend):
                out = ops.cbsr_spmm(graph, cbsr._replace(values=leaf))
                answers.append((out, *torch.autograd.grad(out.pow(2).sum(), leaf)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in answers[1:]
               for a, b in zip(answers[0], other, strict=True))  # fmt: skip


def test_kernels_can_be_captured_in_a_cuda_graph():
    graph, x = make_graph(), torch.randn(500, 256, device="cuda")

    def step():
        leaf = x.clone().requires_grad_()
        out = ops.cbsr_spmm(graph, ops.maxk(leaf, 32))
        return (out, *torch.autograd.grad(out.sum(), leaf))

    with use_backend("cuda"):
        right = step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            actual = step()
        captured.replay()
    for a, b in zip(actual, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
