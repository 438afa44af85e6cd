"""SpMM of the CPU library: layouts, arguments that do not fit, threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons

pytestmark = pytest.mark.skipif(
    bool(cpu_unavailable_reasons()), reason="the native library is not built"
)
N, M, E = 12, 9, 50


def make_graph() -> Graph:
    edges = torch.stack([torch.randint(M, (E,)), torch.randint(N, (E,))])
    return Graph.from_edge_index(edges, (M, N))


@pytest.fixture
def graph() -> Graph:
    return make_graph()


def truth(graph: Graph, x: Tensor, weight: Tensor | None = None) -> Tensor:
    row = torch.repeat_interleave(torch.arange(graph.num_rows), graph.degree.long())
    message = x.double()[graph.col.long()]
    if weight is not None:
        weight = weight.double()
        message = message * weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim()))
    return torch.zeros(graph.num_rows, *x.shape[1:], dtype=torch.float64).index_add(0, row, message)


def variants(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Features of one shape, differently in memory."""
    wide = torch.randn(shape[0], 2, *shape[1:], 3)
    return {
        "contiguous": torch.randn(shape),
        "rows apart": torch.randn(shape[0], *shape[1:-1], shape[-1] * 2)[..., : shape[-1]],
        "every other": wide[:, 1, ..., 0],
        "turned": torch.randn(*reversed(shape)).permute(*reversed(range(len(shape)))),
        "one number": torch.randn(()).expand(shape),
        "one row": torch.randn(1, *shape[1:]).expand(shape),
        "one column": torch.randn(*shape[:-1], 1).expand(shape),
        "from behind": torch.randn(2, *shape)[1],
    }


@pytest.mark.each
@pytest.mark.parametrize("name", variants((1, 1)))
@pytest.mark.parametrize("trailing", [(5,), (2, 3), (2, 3, 4), (1, 7), (0,), (3, 0)])
def test_features_of_any_layout_are_reduced(graph, name, trailing):
    x = variants((M, *trailing))[name]
    out = ops.spmm(graph, x)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), truth(graph, x), rtol=1e-5, atol=1e-5)


@pytest.mark.each
@pytest.mark.parametrize("name", variants((1, 1)))
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("weights", [None, (E,), (E, 2)])
def test_gradients_of_any_layout_are_taken(graph, name, reduce, weights):
    x = torch.randn(M, 2, 3, requires_grad=True)
    weight = None if weights is None else torch.randn(weights, requires_grad=True)
    leaves = [x] if weight is None else [x, weight]
    out = ops.spmm(graph, x, weight, reduce=reduce)
    grad = variants((N, 2, 3))[name]
    plain = torch.autograd.grad(out, leaves, grad.contiguous(), retain_graph=True)
    for mine, right in zip(torch.autograd.grad(out, leaves, grad), plain, strict=True):
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right)
    if reduce == "sum":  # the gradient of a sum is an expanded number
        (mine,) = torch.autograd.grad(out.sum(), x) if weight is None else (None,)
        if mine is not None:
            ends = torch.bincount(graph.col.long(), minlength=M).float()
            torch.testing.assert_close(mine, ends[:, None, None].expand_as(x))


@pytest.mark.parametrize("weights", [(E,), (E, 2), (E, 2, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_weights_of_any_layout_are_multiplied_with(graph, weights, turned):
    x, weight = torch.randn(M, 2, 3), torch.randn(*weights, 2)[..., 0]
    if turned:
        weight = torch.randn(*reversed(weights)).permute(*reversed(range(len(weights))))
    actual = ops.spmm(graph, x, weight)
    torch.testing.assert_close(actual.double(), truth(graph, x, weight), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_told(graph):
    matrix = (graph.rowptr, graph.col, None, M, True, 1 << 8)  # a sum with one head
    for wrong in (torch.randn(M + 1, 3), torch.randn(()), torch.ones(M, 3).int()):
        with pytest.raises(RuntimeError, match="expected"):
            cpu_library().spmm(*matrix, wrong)
    for weight in (torch.randn(E + 1), torch.randn(E).double()):
        with pytest.raises(RuntimeError, match="expected"):
            cpu_library().spmm(*matrix, torch.randn(M, 4), weight)


def test_arrays_that_change_in_place_are_read_anew(graph):
    x = torch.randn(M, 4)
    ops.spmm(graph, x)
    graph.col.copy_(graph.col.flip(0))
    for _ in range(2):
        torch.testing.assert_close(
            ops.spmm(graph, x).double(), truth(graph, x), rtol=1e-5, atol=1e-5
        )


def test_threads_plan_and_run_at_the_same_time():
    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(M, 4, generator=generator)
        for _ in range(30):
            edges = torch.stack([torch.randint(size, (E,), generator=generator) for size in (M, N)])
            graph = Graph.from_edge_index(edges, (M, N))
            if not torch.allclose(ops.spmm(graph, x).double(), truth(graph, x), atol=1e-4):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.parametrize("reduce", ["sum", "none"])
def test_a_million_heads(reduce):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [0, 0]]), (2, 1))
    x, weight = torch.randn(2, 2**20, 1), torch.randn(2, 2**20, 1)
    if reduce == "none":
        actual = ops.gspmm(graph, "sum(mul(u0,v1))", [x, x[:1]], reduce="none")
        torch.testing.assert_close(actual, (x * x[:1]).sum(-1))
    else:
        actual = ops.spmm(graph, x, weight)
        torch.testing.assert_close(actual, (x * weight).sum(0, keepdim=True))
