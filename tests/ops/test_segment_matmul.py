"""`segment_matmul`, on every backend that has it."""

import pytest
import torch

from pyg_accel import ops, use_backend
from pyg_accel.backends import backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] * torch.cuda.is_available()
BACKENDS = [b for b in backends().values() if "segment_matmul" in b.kernels]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    if reasons := request.param.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    with use_backend(request.param.name):
        yield request.param


@pytest.mark.parametrize(
    "sizes", [[3, 0, 5, 1], [0, 0], [7], [0], [0, 70, 0, 0, 1, 63, 200, 0]], ids=str
)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 16), (70, 65)], ids=str)
def test_every_segment_is_multiplied_by_its_matrix(backend, sizes, shape):
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    x = torch.randn(sum(sizes), shape[0], device=DEVICE, requires_grad=True)
    weight = torch.randn(len(sizes), *shape, device=DEVICE, requires_grad=True)
    actual = ops.segment_matmul(x, ptr, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    parts = zip(wide[0].split(sizes), wide[1], strict=True)
    expected = torch.cat([rows @ matrix for rows, matrix in parts])
    grad = torch.randn_like(actual)
    near(actual, expected)
    pairs = zip(torch.autograd.grad(actual, [x, weight], grad),
                torch.autograd.grad(expected, wide, grad.double()), strict=True)  # fmt: skip
    for one, truth in pairs:
        near(one, truth)


def near(actual, truth):
    torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_added_in_float32(backend, dtype):
    if backend.name == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("GPU: Triton's interpreter multiplies the bits of bfloat16")
    ptr = torch.tensor([0, 400, 400, 500])
    x, weight = (torch.randn(*s, device=DEVICE).to(dtype) for s in ((500, 300), (3, 300, 20)))
    actual = ops.segment_matmul(x.t().contiguous().t(), ptr, weight)
    assert actual.dtype == dtype
    truth = torch.cat([r @ w for r, w in zip(x.double().split([400, 0, 100]), weight.double(),
                                             strict=True)])  # fmt: skip
    torch.testing.assert_close(actual.double(), truth, rtol=2e-2, atol=0.1)


def test_rows_of_other_segments_do_not_meet_infinities(backend):
    weight = torch.ones(2, 3, 4, device=DEVICE)
    weight[1] = torch.inf
    actual = ops.segment_matmul(torch.ones(5, 3, device=DEVICE), torch.tensor([0, 2, 5]), weight)
    assert actual[:2].eq(3).all() and actual[2:].isinf().all()


def test_it_can_be_differentiated_twice():
    ptr = torch.tensor([0, 2, 2, 5])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x, w: ops.segment_matmul(x, ptr, w).square(), (x, weight))


def test_it_compiles_into_one_graph():
    ptr = torch.tensor([0, 2, 5])
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    compiled = torch.compile(ops.segment_matmul, fullgraph=True, backend="aot_eager")
    actual = compiled(x, ptr, weight)
    torch.testing.assert_close(actual, ops.segment_matmul(x, ptr, weight))
    actual.sum().backward()


@pytest.mark.parametrize(
    ("x", "ptr", "weight", "message"),
    [
        ((5, 3), [0, 5], (1, 4, 2), "'x' .N, K. and 'weight'"),
        ((5, 3), [0, 5], (2, 3, 2), "'ptr' to be int64 .3."),
        ((5, 3), [0, 4], (1, 3, 2), "ascend from 0 to 5"),
        ((5, 3), [0, 6, 5], (2, 3, 2), "ascend from 0 to 5"),
    ],
)
def test_misuse_is_explained(x, ptr, weight, message):
    with pytest.raises(ValueError, match=message):
        ops.segment_matmul(torch.randn(x), torch.tensor(ptr), torch.randn(weight))
