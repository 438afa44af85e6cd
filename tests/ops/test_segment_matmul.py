"""`segment_matmul`, on every backend that has it."""

import pytest
import torch

from pyg_accel import ops, use_backend
from pyg_accel.backends import backends

BACKENDS = [b for b in backends().values() if "segment_matmul" in b.kernels]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    if reasons := request.param.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    with use_backend(request.param.name):
        yield request.param


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1], [0, 0], [7], [0]], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (64, 16)], ids=str)
def test_every_segment_is_multiplied_by_its_matrix(backend, sizes, shape):
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    x = torch.randn(sum(sizes), shape[0], requires_grad=True)
    weight = torch.randn(len(sizes), *shape, requires_grad=True)
    found = ops.segment_matmul(x, ptr, weight)
    parts = [rows @ matrix for rows, matrix in zip(x.split(sizes), weight, strict=True)]
    expected = torch.cat(parts)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, weight], grad),
        torch.autograd.grad(expected, [x, weight], grad),
    )


def test_it_can_be_differentiated_twice():
    ptr = torch.tensor([0, 2, 2, 5])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x, w: ops.segment_matmul(x, ptr, w).square(), (x, weight))


def test_it_compiles_into_one_graph():
    ptr = torch.tensor([0, 2, 5])
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    compiled = torch.compile(ops.segment_matmul, fullgraph=True, backend="aot_eager")
    found = compiled(x, ptr, weight)
    torch.testing.assert_close(found, ops.segment_matmul(x, ptr, weight))
    found.sum().backward()


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
