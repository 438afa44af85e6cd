"""The CUDA kernels of MaxK, run by a processor: the lanes of a warp are fibers that take turns.

What they compute is that of a GPU up to the order of atomic additions; what they need to be fast is
not tested here. `tests/cuda_on_cpu` stands in for CUDA.
"""

import shutil

import pytest
import torch

from pyg_accel import CBSR, Graph
from pyg_accel.backends import get_backend
from pyg_accel.backends.cuda import cbsr
from pyg_accel.settings import settings
from pyg_accel.testing import zoo

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested"),
]
CASES = {case.name: case for case in zoo(hub=300)}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHAPES = [(1, 1), (7, 3), (33, 8), (64, 64), (100, 20), (256, 16), (256, 32), (257, 40), (600, 130)]


@pytest.fixture(autouse=True)
def launches(cuda_on_cpu, monkeypatch):
    """Launch on a processor; cut rows early."""
    monkeypatch.setattr(cbsr, "cuda_library", lambda: cuda_on_cpu)
    monkeypatch.setattr(cbsr, "reordered", lambda weight, order, eid: weight[order.long()])
    monkeypatch.setattr(cbsr, "SPLIT", 64)
    monkeypatch.setattr(cbsr, "PIECE", 32)


def check_maxk(x: torch.Tensor, k: int) -> None:
    values, indices = cbsr.maxk(x, k)
    right, columns = get_backend("reference").kernels["maxk"].run(x, k)
    assert torch.equal(indices.long(), columns.long())
    torch.testing.assert_close(values, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("width", "k"), [(2, 1), (7, 3), (128, 127), (129, 64), (256, 32), (257, 40), (1024, 1000)]
)
def test_the_largest_of_hard_rows_are_found(width, k, dtype):
    x = torch.randn(20, width)
    x[0, : width // 2], x[1], x[2, -1], x[3, 0] = 0.0, -0.0, torch.nan, -torch.inf
    x[4], x[5], x[6] = torch.inf, torch.nan, torch.randint(-1, 2, (width,)).float()
    x[7, : width // 2 + 1], x[8] = torch.nan, torch.arange(width).float()
    x[9] = torch.empty(width).exponential_()
    x[10], x[11], x[12] = -x[9], x[9] * 1e-38, (x[12] > 1).float()
    x[13, :2], x[13, -1] = torch.inf, -torch.inf
    check_maxk(x.to(dtype), k)


def close(actual: torch.Tensor, right: torch.Tensor, scale: torch.Tensor) -> None:
    assert bool(((actual.double() - right).abs() <= ALLOWED[actual.dtype] * scale + 1e-6).all())


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("width", "k"), SHAPES)
@pytest.mark.parametrize("name", ["no-edges", "duplicates", "bipartite", "hub"])
def test_products_and_gradients_equal_the_truth(name, width, k, dtype, monkeypatch):
    case = CASES[name]
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    csr, transposed = graph.csr(edge_order=True), graph.transposed(edge_order=True)
    number = torch.arange(csr.col.numel()) if csr.eid is None else csr.eid.long()
    row, source = torch.repeat_interleave(csr.rowptr.diff().long()), csr.col.long()
    values = torch.randn(case.num_sources, k).to(dtype)
    indices = torch.rand(case.num_sources, width).argsort(1)[:, :k].sort(1).values
    indices = indices.to(torch.uint8 if width <= 256 else torch.uint16)
    y = torch.randn(case.num_targets, width).to(dtype)
    weight = (torch.rand(row.numel()) + 0.5).to(dtype)

    dense = CBSR(values.double(), indices, width).dense()
    matrix = torch.zeros(case.num_targets, case.num_sources, dtype=torch.float64)
    matrix = matrix.index_put((row, source), weight.double()[number], accumulate=True)
    share = matrix / csr.rowptr.diff().clamp(min=1)[:, None]
    for long in (1, 10**9):  # both layouts
        monkeypatch.setattr(cbsr, "LONG", long)
        actual = cbsr.spmm(csr, values, indices, width, weight, "mean")
        close(actual, share @ dense, share @ dense.abs())

    right = (matrix.t() @ y.double()).gather(1, indices.long())
    scale = (matrix.t() @ y.double().abs()).gather(1, indices.long())
    for atomics, cache in ((True, 1 << 30), (True, case.num_sources * 32),
                           (False, 1 << 30), (False, case.num_targets * 130)):  # fmt: skip
        settings.atomics = atomics
        # Passes and slices.
        monkeypatch.setattr(cbsr, "near_bytes", lambda device, near=cache: near)
        close(cbsr.sspmm(csr, transposed, y, indices, weight), right, scale)


def test_a_row_that_does_not_fit_is_taken_block_by_block():
    case = CASES["bipartite"]
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    indices = torch.rand(case.num_sources, 9000).argsort(1)[:, :50].sort(1).values
    values = torch.randn(case.num_sources, 50)
    actual = cbsr.spmm(graph.csr(), values, indices.to(torch.uint16), 9000, None, "sum")
    dense = CBSR(values.double(), indices.to(torch.uint16), 9000).dense()
    matrix = torch.zeros(case.num_targets, case.num_sources, dtype=torch.float64)
    row = torch.repeat_interleave(graph.degree.long())
    matrix = matrix.index_put((row, graph.col.long()), torch.ones(()).double(), accumulate=True)
    close(actual, matrix @ dense, matrix @ dense.abs())


@pytest.mark.parametrize("atomics", [False, True])
def test_an_infinite_weight_stays_where_it_belongs(atomics):
    settings.atomics = atomics
    rowptr, col = torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    graph = Graph.from_csr(rowptr, col, num_cols=2)
    indices = torch.arange(0, 9000, 180, dtype=torch.int16).view(torch.uint16).expand(2, -1)
    x, weight = torch.ones(1, 9000), torch.tensor([torch.inf])
    actual = cbsr.sspmm(graph.csr(), graph.transposed(), x, indices.contiguous(), weight)
    assert actual[0].eq(0).all()
    assert actual[1].eq(torch.inf).all()
