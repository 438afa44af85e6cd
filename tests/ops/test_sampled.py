"""Aggregation over sampled edges: which edges, what becomes of them, gradients, every backend."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, sampling_rates, use_backend
from pyg_accel.backends import Backend, backends, get_backend
from pyg_accel.backends.sampling import Sampling, philox, primes, starts_and_steps, take
from pyg_accel.ops import sampled_backward
from pyg_accel.testing import zoo

STRATEGIES = ("bucket", "fastrand", "random")
SCALINGS = ({}, {"reduce": "mean"}, {"rescale": "row"}, {"rescale": "gcn"})
SEED = 12


HAVE_IT = [name for name, found in backends().items() if "sampled_spmm" in found.kernels]


@pytest.fixture(params=HAVE_IT)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found = get_backend(request.param)
    if reasons := found.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    if found.name == "triton" and torch.cuda.is_available():
        pytest.skip("test_sampled_gpu.py tests it compiled; here it is interpreted")
    with use_backend(found.name):
        yield found


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


def truth(graph: Graph, x: Tensor, weight: Tensor | None, sampling: Sampling, seed) -> Tensor:
    """Row by row in float64, by another way than the reference backend's."""
    start, step = starts_and_steps(graph.degree.long(), sampling, seed)
    degree = graph.degree.tolist()
    rows = []
    for row in range(graph.num_rows):
        d, begin = degree[row], int(graph.rowptr[row])
        taken = min(d, sampling.width)
        k = torch.tensor([begin + (int(start[row]) + i * int(step[row])) % d for i in range(taken)])
        j = graph.col[k.long()].long()
        factor = torch.ones(taken, dtype=torch.float64)
        if sampling.rescale == "mean":
            factor /= max(taken, 1)
        elif sampling.rescale == "row":
            factor *= d / max(taken, 1)
        elif sampling.rescale == "gcn":
            theirs = [
                max(degree[i], 1) / max(min(degree[i], sampling.width), 1) for i in j.tolist()
            ]
            factor = (d / max(taken, 1) * torch.tensor(theirs, dtype=torch.float64)).sqrt()
        terms = (factor * x[j].double().movedim(0, -1)).movedim(-1, 0)
        if weight is not None:
            w = weight[k.long()].double()
            terms = terms * w.reshape(*w.shape, *(1,) * (terms.dim() - w.dim()))
        rows.append(terms.sum(0))
    return torch.stack(rows) if rows else x.double().new_zeros(0, *x.shape[1:])


@pytest.mark.heavy("triton", 1000)
@pytest.mark.each("triton")
@pytest.mark.parametrize("width", [1, 7, 64, 577, 1000])
@pytest.mark.parametrize("strategy", ["bucket", "fastrand"])
def test_the_edges_are_those_of_the_paper(backend, strategy, width):
    lengths = [0, 1, width - 1, width, width + 1, 2 * width + 3, 576, 577, 578, 1154, 1731]
    if backend.name == "triton":  # interpreted
        lengths = [0, 1, width + 1, 577, 1154]
    graph = rows_of_length(*lengths)
    found = chosen(graph, width=width, strategy=strategy)
    for row, length in enumerate(lengths):
        expected = positions(length, width, strategy)
        assert set(found[row].nonzero().flatten().tolist()) == expected, length
        assert len(expected) == min(length, width)  # no edge twice


def test_where_both_primes_divide_a_third_takes_their_place():
    length = 577 * 587
    sampling = Sampling(1000, "fastrand", "none")
    (_,), (step,) = starts_and_steps(torch.tensor([length]), sampling, None)
    assert int(step) == 593
    assert len(positions(length, 1000, "fastrand")) == 1000


@pytest.mark.parametrize("width", [1, 7, 64])
def test_random_takes_different_edges_of_a_row_and_the_same_ones_for_a_seed(backend, width):
    lengths = [0, 3, width, width + 1, 150, 577]
    graph = rows_of_length(*lengths)
    found = chosen(graph, width=width, strategy="random", seed=SEED)
    assert found.sum(1).tolist() == [min(n, width) for n in lengths]
    sample = take(graph.csr(), Sampling(width, "random", "none"), torch.tensor([SEED]))
    expected = torch.zeros_like(found)
    expected[sample.row, sample.col.long()] = True
    assert torch.equal(found, expected)
    again = chosen(graph, width=width, strategy="random", seed=torch.tensor([SEED]))
    assert torch.equal(found, again)
    assert not torch.equal(found, chosen(graph, width=width, strategy="random", seed=SEED + 1))


def test_without_a_seed_torch_draws_one():
    graph = rows_of_length(500)
    torch.manual_seed(3)
    first, second = (chosen(graph, width=5, strategy="random") for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(first, chosen(graph, width=5, strategy="random"))


def test_philox_is_the_published_one():
    # The vectors of Random123 (kat_vectors: philox4x32 10) with counters of one word.
    first, second = philox(torch.tensor([0]), torch.tensor([0]))
    assert (int(first), int(second)) == (0x6627E8D5, 0xE169C58D)
    assert primes(torch.device("cpu")).unique().numel() == 256


def test_random_takes_every_edge_with_the_same_chance_and_pairs_about_so():
    length, width, draws = 100, 10, 20_000
    sampling = Sampling(width, "random", "none")
    degree = torch.full((draws,), length)
    start, step = starts_and_steps(degree, sampling, torch.tensor([7]))
    taken = (start.unsqueeze(1) + torch.arange(width) * step.unsqueeze(1)) % length
    counts = torch.bincount(taken.flatten(), minlength=length).double()
    expected = draws * width / length
    assert float(((counts - expected) / expected**0.5).abs().max()) < 4.5
    once = torch.zeros(draws, length).scatter_(1, taken, 1.0)
    together = (once.t() @ once).fill_diagonal_(0).sum() / (length * (length - 1)) / draws
    assert abs(float(together) - 0.1 * 9 / 99) < 1e-4


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_random_is_unbiased(reduce):
    generator = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(60, (2, 3000), generator=generator), (60, 60))
    x, weight = torch.randn(60, 3, generator=generator), torch.rand(3000, generator=generator)
    exact = ops.spmm(graph, x, weight, reduce=reduce)
    draws = torch.stack([
        ops.sampled_spmm(graph, x, weight, width=8, strategy="random", seed=seed, reduce=reduce,
                         rescale="none" if reduce == "mean" else "row")
        for seed in range(2000)
    ])  # fmt: skip
    off = (draws.mean(0) - exact).abs() / (draws.std(0) / 2000**0.5 + 1e-6)
    assert float(off.max()) < 5  # standard errors, of 180 numbers


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(s.values()) or "sum")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_backend_equals_the_float64_truth(backend, strategy, scaling):
    seed = torch.tensor([SEED])
    rescale = "mean" if "reduce" in scaling else scaling.get("rescale", "none")
    for case in zoo(hub=300):
        if rescale == "gcn" and case.num_sources != case.num_targets:
            continue
        graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
        x, weight = torch.randn(case.num_sources, 5), torch.randn(graph.num_edges)
        sampling = Sampling(4, strategy, rescale)
        for w in (None, weight):
            found = ops.sampled_spmm(graph, x, w, width=4, strategy=strategy, seed=seed, **scaling)
            expected = truth(graph, x, w, sampling, seed)
            size = truth(graph, x.abs(), None if w is None else w.abs(), sampling, seed)
            assert found.shape == expected.shape
            relative, absolute = backend.tolerance(torch.float32)
            assert bool(((found - expected).abs() <= relative * size + absolute).all()), case.name


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
    found = ops.sampled_spmm(graph, x, weight, width=8)
    sampling = Sampling(8, "fastrand", "none")
    wide = weight.double()
    expected = truth(graph, x.double(), wide, sampling, None)
    size = truth(graph, x.double().abs(), wide.abs(), sampling, None)
    relative, absolute = backend.tolerance(dtype)
    assert found.dtype == dtype
    assert bool(((found.double() - expected).abs() <= relative * size + absolute).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_width_of_the_largest_degree_is_exact(backend, strategy, index_dtype):
    most = 13 if backend.name == "triton" else 41  # interpreted
    graph = rows_of_length(5, 0, most - 1, most, sources=most, index_dtype=index_dtype)
    x, weight = torch.randn(most, 19), torch.randn(2 * most + 4)
    for width in (most, 1000, 2**31):
        for scaling in SCALINGS[:3]:
            reduce = scaling.get("reduce", "sum")
            found = ops.sampled_spmm(graph, x, weight, width=width, strategy=strategy, **scaling)
            expected = ops.spmm(graph, x, weight, reduce=reduce)
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_long_samples_of_a_hub(backend):
    """More entries than one run of additions, and than the lanes of a program."""
    graph = rows_of_length(3000, 3, sources=100)
    x, weight = torch.randn(100, 3), torch.randn(3003)
    sampling = Sampling(1100, "fastrand", "none")
    found = ops.sampled_spmm(graph, x, weight, width=1100)
    torch.testing.assert_close(
        found.double(), truth(graph, x, weight, sampling, None), rtol=1e-4, atol=1e-4
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


@pytest.mark.parametrize("per", ["column", "row"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(16,), (7,), (2, 8)], ids=str)
def test_8_bit_features_are_taken_back_in_the_kernel(backend, shape, dtype, per):
    graph = rows_of_length(0, 3, 9, 30, sources=30)
    quantized = ops.quantize(torch.randn(30, *shape) * 3, dtype, per=per)
    weight = torch.randn(42, 2) if len(shape) == 2 else torch.randn(42)
    for w in (None, weight):
        found = ops.sampled_spmm(graph, quantized, w, width=8)
        expected = ops.sampled_spmm(graph, quantized.dequantize(), w, width=8)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_every_8_bit_float_is_decoded(backend):
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    graph = Graph.from_csr(torch.arange(257), torch.arange(256))
    quantized = ops.Quantized(values, torch.ones(1, 1))
    found = ops.sampled_spmm(graph, quantized, width=1)
    torch.testing.assert_close(found, values.float(), rtol=0, atol=0, equal_nan=True)


def test_quantization_keeps_to_its_bounds():
    x = torch.randn(50, 6) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1e6, 1.0])
    for per, dim in (("column", 0), ("row", 1)):
        most = x.abs().amax(dim, keepdim=True)
        off = (ops.quantize(x, per=per).dequantize() - x).abs()
        assert bool((off <= most / 254 * 1.001).all())
        off = (ops.quantize(x, torch.float8_e4m3fn, per=per).dequantize() - x).abs()
        assert bool((off <= x.abs() / 16 * 1.001 + most * 1e-5).all())
    assert ops.quantize(torch.empty(0, 3)).dequantize().shape == (0, 3)


# The interpreter is too slow for finite differences.
@pytest.mark.parametrize("backend", [b for b in HAVE_IT if b != "triton"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(s.values()) or "sum")
def test_gradients_of_the_drawn_sample(backend, strategy, scaling):
    graph = Graph.from_edge_index(torch.randint(5, (2, 25)), (5, 5))
    x = torch.randn(5, 2, 2, dtype=torch.float64, requires_grad=True)
    for shape, order in (((25, 2), True), ((25,), False)):
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        run = lambda x, w, order=order: ops.sampled_spmm(  # noqa: E731
            graph, x, w, width=4, strategy=strategy, seed=SEED, edge_order=order, **scaling
        )
        assert torch.autograd.gradcheck(run, (x, weight))
        assert torch.autograd.gradgradcheck(run, (x, weight), fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda x: ops.sampled_spmm(graph, x, width=4, strategy=strategy, seed=SEED, **scaling), x
    )


def test_gradients_agree_between_backends(backend):
    """The backward pass finds the subset that the kernel of the forward pass has drawn."""
    graph = Graph.from_edge_index(torch.randint(30, (2, 600)), (30, 20 + 10))
    leaf, weight = torch.randn(30, 5, requires_grad=True), torch.randn(600, requires_grad=True)
    torch.manual_seed(5)
    out = ops.sampled_spmm(graph, leaf, weight, width=6, strategy="random", rescale="row")
    grads = torch.autograd.grad(out.square().sum(), (leaf, weight))
    with use_backend("reference"):
        torch.manual_seed(5)
        right = ops.sampled_spmm(graph, leaf, weight, width=6, strategy="random", rescale="row")
        expected = torch.autograd.grad(right.square().sum(), (leaf, weight))
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(s.values()) or "sum")
@pytest.mark.parametrize("width", [1, 5, 40])
def test_room_for_more_edges_changes_no_gradient(strategy, scaling, width, monkeypatch):
    """On a GPU samples are written out with padding behind them."""
    lengths = torch.tensor([3, 0, 30, 5, 41, 1, 0, 9, 7, 0])  # the last row has no edges
    target = torch.arange(10).repeat_interleave(lengths)
    graph = Graph.from_edge_index(torch.stack([torch.randint(10, target.shape), target]), (10, 10))
    x = torch.randn(10, 2, 3, requires_grad=True)
    for shape in ((graph.num_edges, 2), (graph.num_edges,)):
        weight, found = torch.randn(shape, requires_grad=True), []
        for padded in (False, True):
            monkeypatch.setattr(sampled_backward, "_padded", lambda csr, padded=padded: padded)
            out = ops.sampled_spmm(graph, x, weight, width=width, strategy=strategy, seed=SEED,
                                   edge_order=True, **scaling)  # fmt: skip
            found.append(torch.autograd.grad(out.square().sum(), (x, weight)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_padding_comes_behind_the_sample():
    graph = rows_of_length(3, 9, 0, 30, 0, sources=30)
    for strategy in STRATEGIES:
        sampling, seed = Sampling(8, strategy, "none"), torch.tensor([SEED])
        exact = take(graph.csr(), sampling, seed)
        padded = take(graph.csr(), sampling, seed, padded=True)
        count = exact.col.numel()
        assert torch.equal(exact.rowptr, padded.rowptr)
        assert padded.col.numel() == min(5 * 8, 42) > count
        assert not exact.beyond().any() and int(padded.beyond().sum()) == 40 - count
        for whole, part in zip(padded[1:], exact[1:], strict=True):
            assert torch.equal(whole[:count], part)


def test_gradients_of_weights_beside_8_bit_features():
    graph = rows_of_length(3, 9, 30, sources=30)
    quantized = ops.quantize(torch.randn(30, 4))
    weight = torch.randn(42, requires_grad=True)
    found = ops.sampled_spmm(graph, quantized, weight, width=8).square().sum()
    right = ops.sampled_spmm(graph, quantized.dequantize(), weight, width=8).square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, weight), torch.autograd.grad(right, weight)
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_compiles_to_a_whole_graph(strategy):
    graph = rows_of_length(3, 9, 30, sources=30)

    def run(x: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        return ops.sampled_spmm(graph, x, weight, width=5, strategy=strategy, seed=seed).relu()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    seed = torch.tensor([SEED])
    x, weight = torch.randn(30, 4, requires_grad=True), torch.randn(42, requires_grad=True)
    torch.testing.assert_close(compiled(x, weight, seed), run(x, weight, seed))
    found, expected = (
        torch.autograd.grad(f(x, weight, seed).sum(), (x, weight)) for f in (compiled, run)
    )
    torch.testing.assert_close(found, expected)


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
        ({"strategy": "first"}, "bucket, fastrand, random"),
        ({"reduce": "max"}, "'sum' or 'mean'"),
        ({"rescale": "mean"}, "none, row or gcn"),
        ({"reduce": "mean", "rescale": "row"}, "takes no 'rescale'"),
        ({"x": torch.ones(4, 2)}, "30 rows"),
        ({"x": torch.ones(30, 2, dtype=torch.int8)}, "quantized"),
        ({"weight": torch.ones(42, 2)}, r"\[42\]"),
        ({"weight": torch.ones(42, dtype=torch.int64)}, "floating-point"),
        ({"rescale": "gcn"}, "as many targets as sources"),
        ({"strategy": "random", "seed": torch.tensor(1.0)}, "int64"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_does_not_fit_is_refused(change, words):
    graph = rows_of_length(3, 9, 30, sources=30)
    with pytest.raises(ValueError, match=words):
        ops.sampled_spmm(graph, **{"x": torch.randn(30, 2), "width": 4, **change})
