"""MaxK and CBSR products on a GPU: the same answers as in float64 on the CPU."""

import pytest
import torch

from pyg_accel import CBSR, Graph, ops
from pyg_accel.backends import get_backend
from pyg_accel.settings import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHAPES = [(7, 3), (33, 8), (256, 16), (256, 32), (256, 255), (257, 40), (1000, 64), (5000, 300)]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make_graph(rows: int = 700, cols: int = 500) -> Graph:
    """With empty rows and hubs that are cut."""
    degree = torch.randint(0, 40, (rows,))
    degree[::7] = 0
    degree[:3] = torch.tensor([9000, 2049, 4096])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col = torch.randint(0, cols, (int(rowptr[-1]),))
    return Graph.from_csr(rowptr.int().cuda(), col.int().cuda(), num_cols=cols)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_selection_equals_that_of_the_reference(width, k, dtype):
    x = torch.randn(300, width).to(dtype)
    x[0, : width // 2], x[1], x[2, -1], x[3, 0] = 0.0, -0.0, torch.nan, -torch.inf
    found = ops.maxk(x.cuda(), k)
    values, indices = get_backend("reference").maxk(x, k)
    assert torch.equal(found.indices.long().cpu(), indices.long())
    torch.testing.assert_close(found.values.cpu(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_products_and_gradients_equal_the_truth(width, k, dtype, atomics):
    settings.atomics = atomics
    graph = make_graph()
    cbsr = ops.maxk(torch.randn(500, width, device="cuda").to(dtype), k)
    leaves = [cbsr.values.detach().requires_grad_(),
              torch.rand(graph.num_edges, device="cuda").to(dtype).requires_grad_()]  # fmt: skip
    exact = [t.detach().double().cpu().requires_grad_() for t in leaves]
    out = ops.cbsr_spmm(graph, CBSR(leaves[0], cbsr.indices, width), leaves[1], reduce="mean")
    grad = torch.randn_like(out)
    ours = (out, *torch.autograd.grad(out, leaves, grad))

    dense = CBSR(exact[0], cbsr.indices.cpu(), width).dense()
    row = torch.repeat_interleave(graph.degree.cpu().long())
    share = exact[1] / graph.degree.cpu().clamp(min=1)[row]
    matrix = torch.zeros(700, 500, dtype=torch.float64)
    matrix = matrix.index_put((row, graph.col.cpu().long()), share, accumulate=True)
    right = matrix @ dense
    expected = (right, *torch.autograd.grad(right, exact, grad.double().cpu()))
    relative = {torch.float64: 1e-11, torch.float32: 1e-4}.get(dtype, 4e-2)
    for a, b in zip(ours, expected, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a.double().cpu(), b, rtol=0, atol=relative * scale)


def test_the_same_bits_come_out_every_time():
    graph, x = make_graph(), torch.randn(500, 256, device="cuda")
    answers = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        out = ops.cbsr_spmm(graph, ops.maxk(leaf, 32))
        answers.append((out, *torch.autograd.grad(out.pow(2).sum(), leaf)))
    assert all(torch.equal(a, b) for other in answers[1:]
               for a, b in zip(answers[0], other, strict=True))  # fmt: skip
