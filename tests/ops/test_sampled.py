"""Aggregation over sampled edges: which edges, what becomes of them, gradients, every backend."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, sampling_rates, use_backend
from pyg_accel.backends import Backend, backends, get_backend
from pyg_accel.backends.sampling import STRATEGIES, Sampling, steps_of
from pyg_accel.testing import zoo

SCALINGS = ({}, {"reduce": "mean"}, {"rescale": "row"})


HAVE_IT = [name for name, actual in backends().items() if "sampled_spmm" in actual.kernels]


@pytest.fixture(params=HAVE_IT)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    actual = get_backend(request.param)
    if reasons := actual.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    if actual.name == "triton" and torch.cuda.is_available():
        pytest.skip("test_sampled_gpu.py tests it compiled; here it is interpreted")
    with use_backend(actual.name):
        yield actual


def rows_of_length(*lengths: int, sources: int = 0, index_dtype=torch.int32) -> Graph:
    """A graph whose row i has `lengths[i]` entries, from all sources in turn."""
    degree = torch.tensor(lengths)
    sources = sources or max(lengths)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col = torch.cat([torch.arange(n) % sources for n in lengths])
    return Graph.from_csr(rowptr.to(index_dtype), col.to(index_dtype), num_cols=sources)


def positions(length: int, width: int, strategy: str) -> set[int]:
    """The sample of a row straight from the paper's text."""
    if length <= width:
        return set(range(length))
    if strategy == "bucket":
        return set(range(width))
    prime = 577 if length % 577 else 587 if length % 587 else 593
    return {i * prime % length for i in range(width)}


def chosen(graph: Graph, **how) -> Tensor:
    """[num_rows, num_cols] bool, which sources of every target have been taken.

    A source is a bit of a feature: the sums are exact and name the sources, in few features.
    """
    source, bits = torch.arange(graph.num_cols), 50
    x = torch.zeros(graph.num_cols, -(-graph.num_cols // bits), dtype=torch.float64)
    x[source, source // bits] = 2.0 ** (source % bits).double()
    sums = ops.sampled_spmm(graph, x, **how).long()
    return (sums[:, source // bits] >> (source % bits)) % 2 == 1


def truth(graph: Graph, x: Tensor, weight: Tensor | None, sampling: Sampling) -> Tensor:
    """Row by row in float64, by another way than the reference backend's."""
    step = steps_of(graph.degree.long(), sampling)
    degree = graph.degree.tolist()
    rows = []
    for row in range(graph.num_rows):
        d, begin = degree[row], int(graph.rowptr[row])
        taken = min(d, sampling.width)
        k = torch.tensor([begin + i * int(step[row]) % d for i in range(taken)])
        j = graph.col[k.long()].long()
        factor = torch.ones(taken, dtype=torch.float64)
        if sampling.rescale == "mean":
            factor /= max(taken, 1)
        elif sampling.rescale == "row":
            factor *= d / max(taken, 1)
        terms = (factor * x[j].double().movedim(0, -1)).movedim(-1, 0)
        if weight is not None:
            w = weight[k.long()].double()
            terms = terms * w.reshape(*w.shape, *(1,) * (terms.dim() - w.dim()))
        rows.append(terms.sum(0))
    return torch.stack(rows) if rows else x.double().new_zeros(0, *x.shape[1:])


@pytest.mark.each
@pytest.mark.heavy("triton", 1000)
@pytest.mark.parametrize("width", [1, 7, 64, 577, 1000])
@pytest.mark.parametrize("strategy", ["bucket", "fastrand"])
def test_the_edges_are_those_of_the_paper(backend, strategy, width):
    lengths = [0, 1, width - 1, width, width + 1, 2 * width + 3, 576, 577, 578, 1154, 1731]
    if backend.name == "triton":  # interpreted
        lengths = [0, 1, width + 1, 577, 1154]
    graph = rows_of_length(*lengths)
    actual = chosen(graph, width=width, strategy=strategy)
    for row, length in enumerate(lengths):
        expected = positions(length, width, strategy)
        assert set(actual[row].nonzero().flatten().tolist()) == expected, length
        assert len(expected) == min(length, width)  # no edge twice


def test_where_both_primes_divide_a_third_takes_their_place():
    length = 577 * 587
    sampling = Sampling(1000, "fastrand", "none")
    (step,) = steps_of(torch.tensor([length]), sampling)
    assert int(step) == 593
    assert len(positions(length, 1000, "fastrand")) == 1000


@pytest.mark.each
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(s.values()) or "sum")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_backend_equals_the_float64_truth(backend, strategy, scaling):
    rescale = "mean" if "reduce" in scaling else scaling.get("rescale", "none")
    for case in zoo(hub=300):
        graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
        x, weight = torch.randn(case.num_sources, 5), torch.randn(graph.num_edges)
        sampling = Sampling(4, strategy, rescale)
        for w in (None, weight):
            actual = ops.sampled_spmm(graph, x, w, width=4, strategy=strategy, **scaling)
            expected = truth(graph, x, w, sampling)
            size = truth(graph, x.abs(), None if w is None else w.abs(), sampling)
            assert actual.shape == expected.shape
            relative, absolute = backend.tolerance(torch.float32)
            assert bool(((actual - expected).abs() <= relative * size + absolute).all()), case.name


@pytest.mark.each
@pytest.mark.parametrize("features", [1, 7, 33, 257, (2, 3), (3, 16)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_features_of_any_shape_and_dtype(backend, dtype, features):
    shape = (features,) if isinstance(features, int) else features
    graph = rows_of_length(0, 3, 9, 30, sources=30)
    x = torch.randn(30, *shape).to(dtype)
    weight = torch.randn(42, shape[0] if len(shape) == 2 else 1).to(dtype)
    weight = weight if len(shape) == 2 else weight.flatten()
    actual = ops.sampled_spmm(graph, x, weight, width=8)
    sampling = Sampling(8, "fastrand", "none")
    wide = weight.double()
    expected = truth(graph, x.double(), wide, sampling)
    size = truth(graph, x.double().abs(), wide.abs(), sampling)
    relative, absolute = backend.tolerance(dtype)
    assert actual.dtype == dtype
    assert bool(((actual.double() - expected).abs() <= relative * size + absolute).all())


@pytest.mark.each
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_width_of_the_largest_degree_is_exact(backend, strategy, index_dtype):
    most = 13 if backend.name == "triton" else 41  # interpreted
    graph = rows_of_length(5, 0, most - 1, most, sources=most, index_dtype=index_dtype)
    x, weight = torch.randn(most, 19), torch.randn(2 * most + 4)
    for width in (most, 1000, 2**31):
        for scaling in SCALINGS:
            reduce = scaling.get("reduce", "sum")
            actual = ops.sampled_spmm(graph, x, weight, width=width, strategy=strategy, **scaling)
            expected = ops.spmm(graph, x, weight, reduce=reduce)
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_long_samples_of_a_hub(backend):
    """More entries than one run of additions, and than the lanes of a program."""
    graph = rows_of_length(3000, 3, sources=100)
    x, weight = torch.randn(100, 3), torch.randn(3003)
    sampling = Sampling(1100, "fastrand", "none")
    actual = ops.sampled_spmm(graph, x, weight, width=1100)
    torch.testing.assert_close(
        actual.double(), truth(graph, x, weight, sampling), rtol=1e-4, atol=1e-4
    )


def test_strided_features_and_edge_order(backend):
    edges = torch.randint(20, (2, 300))
    graph = Graph.from_edge_index(edges, (20, 20))
    x, weight = torch.randn(9, 20).t(), torch.randn(300)
    wide = torch.randn(20, 24)[:, 4:16]
    stored = weight[graph.perm.long()]
    for features in (x, wide):
        by_edge = ops.sampled_spmm(graph, features, weight, width=6, edge_order=True)
        expected = ops.sampled_spmm(graph, features.contiguous(), stored, width=6)
        torch.testing.assert_close(by_edge, expected)


@pytest.mark.each
@pytest.mark.parametrize("per", ["column", "row"])
@pytest.mark.parametrize("shape", [(16,), (7,), (2, 8)], ids=str)
def test_8_bit_features_are_taken_back_in_the_kernel(backend, shape, per):
    graph = rows_of_length(0, 3, 9, 30, sources=30)
    quantized = ops.quantize(torch.randn(30, *shape) * 3, per=per)
    weight = torch.randn(42, 2) if len(shape) == 2 else torch.randn(42)
    for w in (None, weight):
        actual = ops.sampled_spmm(graph, quantized, w, width=8)
        expected = ops.sampled_spmm(graph, quantized.dequantize(), w, width=8)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_quantization_keeps_to_its_bounds():
    x = torch.randn(50, 6) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1e6, 1.0])
    for per, dim in (("column", 0), ("row", 1)):
        most = x.abs().amax(dim, keepdim=True)
        off = (ops.quantize(x, per=per).dequantize() - x).abs()
        assert bool((off <= most / 254 * 1.001).all())
    assert ops.quantize(torch.empty(0, 3)).dequantize().shape == (0, 3)


def test_results_do_not_depend_on_threads():
    graph = Graph.from_edge_index(torch.randint(500, (2, 50_000)), (500, 500))
    x = torch.randn(500, 40)
    one = ops.sampled_spmm(graph, x, width=30)
    torch.set_num_threads(2)
    assert torch.equal(one, ops.sampled_spmm(graph, x, width=30))


def test_autocast_and_mixed_dtypes_promote():
    graph = rows_of_length(3, 9, sources=9)
    x, weight = torch.randn(9, 4), torch.randn(12)
    out = ops.sampled_spmm(graph, x.bfloat16(), weight, width=4)
    assert out.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.sampled_spmm(graph, torch.nn.Linear(4, 4)(x), width=4)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_backward_pass_says_that_there_is_none(backend, wanted):
    graph = rows_of_length(3, 9, sources=9)
    leaf = {"x": torch.randn(9, 4), "weight": torch.randn(12)}
    leaf[wanted].requires_grad_()
    out = ops.sampled_spmm(graph, leaf["x"], leaf["weight"], width=4)
    with pytest.raises(RuntimeError, match=r"no gradient.*torch\.no_grad\(\)"):
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_compiles_to_a_whole_graph(strategy):
    graph = rows_of_length(3, 9, 30, sources=30)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return ops.sampled_spmm(graph, x, weight, width=5, strategy=strategy).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x, weight = torch.randn(30, 4), torch.randn(42)
    torch.testing.assert_close(compiled(x, weight), run(x, weight))


def test_sampling_rates_are_those_of_the_degrees():
    degree = torch.tensor([0, 10, 20, 70])
    assert sampling_rates(degree, (10, 20, 100)) == {10: 0.3, 20: 0.5, 100: 1.0}
    assert sampling_rates(rows_of_length(0, 10, 20, 70), (10,)) == {10: 0.3}
    assert sampling_rates(torch.zeros(3, dtype=torch.int64), (16,)) == {16: 1.0}
    for wrong in (torch.zeros(2, 5, dtype=torch.int64), "Cora"):
        with pytest.raises(ValueError, match="from_edge_index"):
            sampling_rates(wrong)
    with pytest.raises(ValueError, match="at least 1"):
        sampling_rates(degree, (16, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 0}, "at least 1"),
        ({"strategy": "first"}, "bucket, fastrand"),
        ({"reduce": "max"}, "'sum' or 'mean'"),
        ({"rescale": "mean"}, "none or row"),
        ({"reduce": "mean", "rescale": "row"}, "takes no 'rescale'"),
        ({"x": torch.ones(4, 2)}, "30 rows"),
        ({"x": torch.ones(30, 2, dtype=torch.int8)}, "quantized"),
        ({"weight": torch.ones(42, 2)}, r"\[42\]"),
        ({"weight": torch.ones(42, dtype=torch.int64)}, "floating-point"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_does_not_fit_is_refused(change, words):
    graph = rows_of_length(3, 9, 30, sources=30)
    with pytest.raises(ValueError, match=words):
        ops.sampled_spmm(graph, **{"x": torch.randn(30, 2), "width": 4, **change})
