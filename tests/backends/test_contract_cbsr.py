"""MaxK and CBSR products on every backend: exact selection, and the zoo against float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import CBSR, Graph, ops, use_backend
from pyg_accel.backends import Backend, backends, get_backend
from pyg_accel.backends.base import atomics_allowed
from pyg_accel.graph.cbsr import index_dtype
from pyg_accel.settings import settings
from pyg_accel.testing import GraphCase, zoo

CASES = {case.name: case for case in zoo(hub=17_000)}
# For kernels that are interpreted, edge by edge.
SMALL = {
    case.name: case.part(3)
    for case in zoo(hub=120)
    if case.name in ("directed", "empty-rows", "bipartite", "hub")
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPS = ("maxk", "cbsr_spmm", "sspmm", "cbsr_dot")
IDS = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
# (F, k): tails of 32, of 256 and of 8; more than 255 kept; one and all but one.
SHAPES = [(1, 1), (7, 3), (32, 31), (33, 8), (100, 1), (256, 16), (256, 32), (256, 255), (257, 40),
          (300, 290), (600, 64)]  # fmt: skip


@pytest.fixture(params=list(backends()))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    actual = get_backend(request.param)
    if reasons := actual.unavailable_reasons() or [op for op in OPS if op not in actual.kernels]:
        pytest.skip("; ".join(reasons))
    if actual.name == "triton":  # interpreted: cut what is not that long
        from pyg_accel.backends.triton import cbsr

        monkeypatch.setattr(cbsr, "SPLIT", 32)
        monkeypatch.setattr(cbsr, "PIECE", 16)
    with use_backend(actual.name):
        yield actual


def case_for(backend: Backend, name: str) -> GraphCase:
    return SMALL.get(name, CASES[name]) if backend.name == "triton" else CASES[name]


def graph_of(case: GraphCase) -> Graph:
    return Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))


# -- maxk ------------------------------------------------------------------------------------------


def by_python(x: Tensor, k: int) -> list[list[int]]:
    """The k largest of each row by their definition: NaN first, then size, then column."""
    chosen = []
    for row in x.double().tolist():
        order = sorted(range(len(row)), key=lambda c: (row[c] == row[c], -row[c] if row[c] == row[c]
                                                       else 0.0, c))  # fmt: skip
        chosen.append(sorted(order[:k]))
    return chosen


def check_maxk(x: Tensor, k: int) -> None:
    actual = ops.maxk(x, k)
    assert actual.indices.dtype == index_dtype(x.size(1))
    assert actual.indices.long().tolist() == by_python(x, k)
    expected = x.gather(1, actual.indices.long())
    torch.testing.assert_close(actual.values, expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0  # of both signs; torch may drop the sign of a NaN
    assert torch.equal(actual.values.signbit()[zeros], expected.signbit()[zeros])


@pytest.mark.each
@pytest.mark.parametrize("dtype", FLOATS, ids=IDS.values())
@pytest.mark.parametrize(("width", "k"), SHAPES)
def test_the_largest_of_every_row_are_kept(backend, width, k, dtype):
    check_maxk(torch.randn(5, width).to(dtype), k)


@pytest.mark.each
@pytest.mark.parametrize("dtype", FLOATS, ids=IDS.values())
def test_among_equals_the_lowest_columns_are_kept(backend, dtype):
    check_maxk(torch.zeros(3, 40).to(dtype), 7)
    check_maxk(torch.randint(-1, 2, (9, 70)).to(dtype), 20)
    check_maxk(torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]]).to(dtype), 3)


@pytest.mark.each
@pytest.mark.parametrize("dtype", FLOATS, ids=IDS.values())
def test_strange_numbers_are_ordered_as_by_topk(backend, dtype):
    inf, nan = torch.inf, torch.nan
    tiny, most = torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max
    strange = torch.tensor(
        [
            [1.0, nan, inf, -inf, 0.0, -0.0, tiny, -tiny, most, -most, nan, 2.0],
            [-inf] * 12,
            [nan] * 12,
            [inf, -inf] * 6,
            [-1.0, -2.0, -inf, nan, -tiny, -0.0, 0.0, tiny, -3.0, -4.0, -most, -inf],
        ]
    ).to(dtype)
    strange[2, 3:] = -strange[2, 3:]  # NaN of both signs
    for k in range(1, 13):
        check_maxk(strange, k)


@pytest.mark.parametrize("bits", [torch.int16, torch.int32])
def test_any_bit_pattern_is_a_number(backend, bits):
    info = torch.iinfo(bits)
    raw = torch.randint(info.min, info.max, (6, 64), dtype=torch.int64).to(bits)
    for dtype in (torch.float32,) if bits == torch.int32 else (torch.bfloat16, torch.float16):
        check_maxk(raw.view(dtype), 13)


def test_rows_far_apart_in_size_are_exact(backend):
    x = torch.randn(8, 64) * torch.logspace(-30, 30, 8).unsqueeze(1)
    check_maxk(x, 5)
    check_maxk(1e30 + torch.randn(4, 64), 5)  # all the same number
    check_maxk(1 + torch.arange(64.0).flip(0).expand(2, -1) * 2.0**-23, 5)  # neighbours


@pytest.mark.parametrize("k", [8, 9, 100])
def test_where_nothing_is_left_out_maxk_is_the_identity(backend, k):
    x = torch.randn(3, 8)
    actual = ops.maxk(x, k)
    assert actual.indices.tolist() == [list(range(8))] * 3
    assert torch.equal(actual.values, x)


def test_rows_may_be_none_one_or_many(backend):
    for rows in (0, 1, 67 if backend.name == "triton" else 5000):
        check_maxk(torch.randn(rows, 33), 4)


def test_any_memory_layout_is_taken(backend):
    x = torch.randn(12, 6)
    for view in (x.t(), x[:, 1:], x[::2], x[:1].expand(4, -1)):
        check_maxk(view, 2)


def test_the_widest_row_is_taken(backend):
    x = torch.randn(1, 65_536)
    actual = ops.maxk(x, 300)
    right = x.topk(300).indices.sort().values
    assert actual.indices.dtype == torch.uint16
    assert torch.equal(actual.indices.long(), right)


def test_the_gradient_goes_to_what_was_kept(backend):
    x = torch.randn(4, 20, requires_grad=True)
    actual = ops.maxk(x, 6)
    grad = torch.randn(4, 6)
    (ours,) = torch.autograd.grad(actual.values, x, grad)
    assert torch.equal(ours, CBSR(grad, actual.indices, 20).dense())


# -- products --------------------------------------------------------------------------------------


def adjacency(case: GraphCase, weight: Tensor | None, reduce: str) -> Tensor:
    """[targets, sources] in float64, differentiable."""
    source, target = case.edge_index.long()
    if weight is None:
        weight = torch.ones(source.numel(), dtype=torch.float64)
    if reduce == "mean":
        weight = weight / target.bincount(minlength=case.num_targets)[target]
    zeros = torch.zeros(case.num_targets, case.num_sources, dtype=torch.float64)
    return zeros.index_put((target, source), weight, accumulate=True)


def check(
    backend: Backend, case: GraphCase, width: int, k: int, dtype: torch.dtype, reduce: str,
    weighted: bool,
) -> None:  # fmt: skip
    if case.name == "hub":
        torch.set_num_threads(2)
    cbsr = ops.maxk(torch.randn(case.num_sources, width).to(dtype), k)
    values = cbsr.values.detach().requires_grad_()
    weight = torch.randn(case.edge_index.size(1)).to(dtype) if weighted else None
    inputs = [values]
    if weight is not None:
        inputs.append(weight.requires_grad_())
    exact = [t.detach().double().requires_grad_() for t in inputs]

    sparse = CBSR(values, cbsr.indices, width)
    actual = ops.cbsr_spmm(graph_of(case), sparse, weight, reduce=reduce, edge_order=True)
    matrix = adjacency(case, exact[1] if weighted else None, reduce)
    features = CBSR(exact[0], cbsr.indices, width).dense()
    expected = matrix @ features
    grad = torch.randn(actual.shape).to(dtype)
    ours = torch.autograd.grad(actual, inputs, grad)
    right = torch.autograd.grad(expected, exact, grad.double())

    # What a tolerance is relative to: the sum of |terms|; values and weights are of order one.
    relative, absolute = backend.tolerance(dtype)
    size = [t.detach().abs() for t in exact]
    big = adjacency(case, size[1] + 1 if weighted else None, reduce).detach()
    dense = CBSR(size[0] + 1, cbsr.indices, width).dense()
    scale = [big @ dense, (big.t() @ grad.double().abs()).gather(1, cbsr.indices.long())]
    if weighted:
        source, target = case.edge_index.long()
        share = adjacency(case, None, reduce)[target, source].clamp(max=1)
        scale.append((dense[source] * grad.double().abs()[target]).sum(1) * share)

    pairs = zip((actual, *ours), (expected, *right), scale, strict=True)
    for what, (a, b, s) in zip(("result", "gradient of values", "of weights"), pairs, strict=False):
        assert a.dtype == dtype, what
        assert a.shape == b.shape, what
        error = (a.double() - b).abs() - relative * s - absolute
        assert not bool((~(error <= 0)).any()), f"{what} is off by {float(error.max()):.2e}"


@pytest.mark.each
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_the_truth(backend, case, reduce, weighted):
    for dtype in (torch.float32, torch.float64):
        check(backend, case_for(backend, case), 33, 8, dtype, reduce, weighted)


@pytest.mark.each
@pytest.mark.parametrize("dtype", FLOATS[2:], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", ["directed", "bipartite", "hub", "empty-rows"])
def test_narrower_dtypes_stay_within_the_backends_tolerance(backend, case, dtype):
    for reduce, weighted in (("sum", False), ("mean", True)):
        check(backend, case_for(backend, case), 40, 9, dtype, reduce, weighted)


@pytest.mark.each
@pytest.mark.parametrize(("width", "k"), [*SHAPES, (1030, 70), (5000, 300), (64, 64)])
def test_every_width_and_k_equals_the_truth(backend, width, k):
    check(backend, CASES["duplicates"], width, k, torch.float32, "sum", False)
    check(backend, case_for(backend, "bipartite"), width, k, torch.float32, "mean", True)


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
def test_whole_numbers_add_up_exactly(backend, case):
    """Nothing is rounded, so no lost edge can hide in a tolerance."""
    graph = case_for(backend, case)
    columns = torch.rand(19) < 0.4
    dense = torch.randint(1, 4, (graph.num_sources, 19)).float() * columns
    weight = torch.randint(-2, 3, graph.edge_index.shape[1:]).float()
    cbsr = ops.maxk(dense, max(int(columns.sum()), 1))
    actual = ops.cbsr_spmm(graph_of(graph), cbsr, weight, edge_order=True)
    expected = adjacency(graph, weight.double(), "sum") @ dense.double()
    assert torch.equal(actual.double(), expected)


def test_int64_indices_and_csr_order_give_the_same_bits(backend):
    narrow = graph_of(CASES["directed"])
    wide = Graph.from_csr(narrow.rowptr.long(), narrow.col.long(), num_cols=narrow.num_cols)
    cbsr = ops.maxk(torch.randn(40, 50), 12)
    weight = torch.randn(narrow.num_edges)
    answers = []
    for graph in (narrow, wide):
        values, w = cbsr.values.clone().requires_grad_(), weight.clone().requires_grad_()
        out = ops.cbsr_spmm(graph, CBSR(values, cbsr.indices, 50), w, reduce="mean")
        answers.append((out, *torch.autograd.grad(out.pow(2).sum(), [values, w])))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    unordered = torch.empty_like(weight)
    unordered[narrow.perm.long()] = weight
    out = ops.cbsr_spmm(narrow, cbsr, unordered, reduce="mean", edge_order=True)
    assert torch.equal(out, answers[0][0])


def test_columns_of_the_graph_need_not_ascend(backend):
    rowptr, col = torch.tensor([0, 3, 3, 6]), torch.tensor([2, 0, 1, 1, 2, 0])
    graph = Graph.from_csr(rowptr, col, num_cols=4)
    case = GraphCase("unsorted", torch.stack([col, torch.tensor([0, 0, 0, 2, 2, 2])]), 4, 3)
    cbsr = ops.maxk(torch.randn(4, 20, dtype=torch.float64), 5)
    values, weight = cbsr.values.requires_grad_(), torch.randn(6, dtype=torch.float64)
    exact = values.detach().clone().requires_grad_()
    actual = ops.cbsr_spmm(graph, CBSR(values, cbsr.indices, 20), weight)
    right = adjacency(case, weight, "sum") @ CBSR(exact, cbsr.indices, 20).dense()
    torch.testing.assert_close(actual, right)
    seed = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad(actual, values, seed), torch.autograd.grad(right, exact, seed)
    )


def test_infinities_reach_only_the_columns_that_hold_them(backend):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [2, 2]]), (2, 3))
    values = torch.tensor([[torch.inf, 1.0], [2.0, torch.nan]])
    indices = torch.tensor([[0, 4], [1, 20]], dtype=torch.uint8)
    out = ops.cbsr_spmm(graph, CBSR(values, indices, 33))
    expected = torch.zeros(3, 33)
    expected[2, [0, 4, 1, 20]] = torch.tensor([torch.inf, 1.0, 2.0, torch.nan])
    assert torch.equal(out.nan_to_num(-7.0, 1e9), expected.nan_to_num(-7.0, 1e9))


def test_every_gradient_can_be_differentiated_again(backend):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 1], [1, 0, 1, 3, 1]]), (3, 4))
    cbsr = ops.maxk(torch.randn(3, 12, dtype=torch.float64), 4)
    weight = torch.randn(graph.num_edges, dtype=torch.float64, requires_grad=True)
    values = cbsr.values.clone().requires_grad_()

    def run(values: Tensor, weight: Tensor) -> Tensor:
        return ops.cbsr_spmm(graph, CBSR(values, cbsr.indices, 12), weight, reduce="mean").tanh()

    assert torch.autograd.gradgradcheck(run, (values, weight), fast_mode=True)


def test_the_same_bits_come_out_every_time(backend):
    graph = graph_of(case_for(backend, "hub"))
    cbsr = ops.maxk(torch.randn(graph.num_cols, 64), 16)
    answers = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        values = cbsr.values.clone().requires_grad_()
        out = ops.cbsr_spmm(graph, CBSR(values, cbsr.indices, 64))
        answers.append((out, *torch.autograd.grad(out.pow(2).sum(), values)))
    assert all(torch.equal(a, b) for other in answers[1:] for a, b in zip(answers[0], other,
                                                                         strict=True))  # fmt: skip


@pytest.mark.heavy("triton")
def test_atomic_additions_equal_the_truth_where_they_are_allowed(backend):
    graph = graph_of(case_for(backend, "hub"))
    x, weight = torch.randn(graph.num_cols, 40), torch.randn(graph.num_edges)
    actual = []
    for dtype in (torch.float32, torch.bfloat16):
        for atomics in (False, True):
            settings.atomics = atomics
            values = ops.maxk(x.to(dtype), 9)
            leaf = values.values.detach().requires_grad_()
            out = ops.cbsr_spmm(graph, values._replace(values=leaf), weight.to(dtype))
            actual.append(torch.autograd.grad(out, leaf, torch.ones_like(out))[0])
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[2], actual[3], rtol=2e-2, atol=1e-1)


def test_deterministic_algorithms_outrank_atomics():
    settings.atomics = True
    assert atomics_allowed()
    torch.use_deterministic_algorithms(True)
    try:
        assert not atomics_allowed()
    finally:
        torch.use_deterministic_algorithms(False)
    settings.atomics = False
    assert not atomics_allowed()
