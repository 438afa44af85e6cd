"""Elementary functions, rounding, NaN and determinism of the CPU kernels."""

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import get_backend
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons

pytestmark = pytest.mark.skipif(
    bool(cpu_unavailable_reasons()), reason="; ".join(cpu_unavailable_reasons())
)

ISAS = ["portable", "avx2", "avx512"]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def on_the_cpu_backend() -> Iterator[None]:
    with use_backend("cpu"):
        yield


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    facts = dict(item.split("=", 1) for item in cpu_library().info().split(";"))
    if request.param not in facts["supported"].split(","):
        pytest.skip(f"this processor or build has no {request.param}")
    cpu_library().configure(request.param, 0, 0)
    return request.param


def each_edge(formula: str, x: Tensor) -> Tensor:
    """A function of every element, computed by the register machine."""
    graph = Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0]), num_cols=1)
    return ops.gspmm(graph, formula, [x.view(1, -1)], reduce="none").view(-1)


def all_over_float32() -> Tensor:
    """Every exponent of float32, both signs, zeros, denormals, infinities and NaN."""
    bits = torch.arange(0, 2**31 - 2**23, 9973, dtype=torch.int32)
    positive = bits.view(torch.float32)
    fine = torch.linspace(-110, 110, 20001)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, INF, -INF, NAN])
    return torch.cat([positive, -positive, fine, fine / 50, 1 + fine / 1e4, special])


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp(e0)": torch.exp,
    "log(e0)": torch.log,
    "tanh(e0)": torch.tanh,
    "sigmoid(e0)": torch.sigmoid,
    "softplus(e0)": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "sqrt(e0)": torch.sqrt,
    "neg(e0)": torch.neg,
    "abs(e0)": torch.abs,
    "relu(e0)": torch.relu,
    "leaky_relu(e0,0.25)": lambda x: torch.nn.functional.leaky_relu(x, 0.25),
    "pow(e0,3.0)": lambda x: x.pow(3),
    "sign(e0)": torch.sign,
    "step(e0)": lambda x: (x > 0).to(x.dtype),
    "iszero(e0)": lambda x: (x == 0).to(x.dtype),
    "nonzero(e0)": lambda x: torch.where(x == 0, 1.0, x),
}


@pytest.mark.each
@pytest.mark.parametrize("formula", FUNCTIONS)
def test_functions_are_accurate_over_all_of_float32(isa, formula):
    x = all_over_float32()
    exact = FUNCTIONS[formula](x.double())
    actual, expected = each_edge(formula, x), exact.float()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())
    finite = expected.isfinite()
    error = (actual.double() - exact)[finite].abs()
    # 4 units in the last place, or one of the smallest normal number (denormals may be flushed).
    allowed = 4 * 2**-23 * exact[finite].abs() + 1.2e-38
    worst = (error / allowed).argmax()
    assert bool((error <= allowed).all()), f"at {x[finite][worst]}: {actual[finite][worst]}"


@pytest.mark.each
@pytest.mark.parametrize("formula", FUNCTIONS)
def test_functions_are_accurate_in_float64(isa, formula):
    special = torch.tensor([0.0, -0.0, 5e-324, 1e308, -1e308, INF, -INF, NAN], dtype=torch.float64)
    x = torch.cat([torch.linspace(-740, 740, 4001, dtype=torch.float64),
                   torch.linspace(-2, 2, 4001, dtype=torch.float64), special])  # fmt: skip
    torch.testing.assert_close(
        each_edge(formula, x), FUNCTIONS[formula](x), rtol=1e-14, atol=1e-300, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_all_65536_half_values_survive_a_copy(isa, dtype):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = bits.view(dtype)
    graph = Graph.from_csr(torch.tensor([0, 1]), torch.tensor([0]), num_cols=1)
    for actual in (
        ops.spmm(graph, x.view(1, -1)).view(-1),
        ops.spmm(graph, x.view(1, -1), reduce="max").view(-1),
        each_edge("neg(neg(e0))", x),
    ):
        assert torch.equal(actual.isnan(), x.isnan())
        zero = x == 0  # -0 may come back as 0
        assert torch.equal(actual[~x.isnan() & ~zero], x[~x.isnan() & ~zero])
        assert bool((actual[zero] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_16_bit_results_are_rounded_to_the_nearest_even(isa, dtype):
    """The sum of two values is exact in float32, so that one rounding makes the result."""
    graph = Graph.from_csr(torch.tensor([0, 2]), torch.tensor([0, 1]), num_cols=2)
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    high = bits.view(dtype)
    high = high[high.isfinite()]
    for shift in (-9, -8, -11, -12):
        low = (high.float() * 2.0**shift).to(dtype)
        exact = high.double() + low.double()
        assert torch.equal(exact.float().double(), exact) or dtype == torch.bfloat16
        actual = ops.spmm(graph, torch.stack([high, low]))[0]
        assert torch.equal(actual, exact.float().to(dtype))


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_nan_wins_every_maximum_and_minimum(isa, reduce, dtype):
    generator = torch.Generator().manual_seed(0)
    for place in (0, 1, 16, 39):
        for width in (1, 7, 40):
            x = torch.randn(40, width, generator=generator).to(dtype)
            x[place, :: 2 if width > 1 else 1] = NAN
            graph = Graph.from_csr(torch.tensor([0, 40]), torch.arange(40), num_cols=40)
            expected = getattr(x, reduce)(0).values
            weight = torch.ones(40, dtype=dtype)
            for actual in (
                ops.spmm(graph, x, reduce=reduce),
                ops.spmm(graph, x, weight, reduce=reduce),
                ops.gspmm(graph, "add(u0,e1)", [x, 0 * weight.unsqueeze(1)], reduce=reduce),
            ):
                assert torch.equal(actual[0].isnan(), expected.isnan())
                assert torch.equal(actual[0].nan_to_num(), expected.nan_to_num())


def test_the_gradient_of_a_nan_maximum_goes_to_the_nan():
    x = torch.tensor([[1.0], [NAN], [3.0]], requires_grad=True)
    graph = Graph.from_csr(torch.tensor([0, 3]), torch.arange(3), num_cols=3)
    (grad,) = torch.autograd.grad(ops.spmm(graph, x, reduce="max").sum(), x)
    assert grad.tolist() == [[0.0], [1.0], [0.0]]


@pytest.mark.parametrize(("reduce", "value"), [("max", -INF), ("min", INF)])
def test_a_row_of_infinities_keeps_them_and_finds_a_winner(isa, reduce, value):
    x = torch.full((3, 20), value, requires_grad=True)
    graph = Graph.from_csr(torch.tensor([0, 3, 3]), torch.arange(3), num_cols=3)
    out = ops.spmm(graph, x, reduce=reduce)
    assert torch.equal(out[0], torch.full((20,), value))
    assert torch.equal(out[1], torch.zeros(20))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.tolist() == [[1.0] * 20, [0.0] * 20, [0.0] * 20]
    e = torch.full((3, 20), value, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.gspmm(graph, "add(u0,e1)", [x, e], reduce=reduce).sum(), e)
    assert grad.sum() == 20


@pytest.mark.parametrize("winner", [0, 255, 256, 699])
@pytest.mark.parametrize("width", [1, 33])
def test_a_long_row_is_reduced_in_parts_and_has_the_first_winner(isa, width, winner):
    """Of several reductions at once, which run in steps of at most 256 entries."""
    graph = Graph.from_csr(torch.tensor([0, 700, 700]), torch.arange(700), num_cols=700)
    x, y = torch.randn(700, width, dtype=torch.float64).sub(9), torch.zeros(2, width).double()
    x[winner:] = x[winner:].clamp(max=3)
    x[[winner, 699]] = 5.0  # the first of two equal ones
    x.requires_grad_()
    reduces = ["max", "sum", "min", "sqsum", "mean"]
    outs = ops.gspmm(graph, "add(u0,v1)", [x, y], reduce=reduces)
    truth = [x.amax(0), x.sum(0), x.amin(0), x.square().sum(0), x.mean(0)]
    for out, right in zip(outs, truth, strict=True):
        torch.testing.assert_close(out[0], right)
        assert not out[1].any()
    (grad,) = torch.autograd.grad(outs[0].sum(), x)
    assert grad[winner].tolist() == [1.0] * width
    assert grad.sum() == width


def test_a_zero_makes_the_product_of_a_long_row_zero(isa):
    graph = Graph.from_csr(torch.tensor([0, 1000]), torch.arange(1000), num_cols=1000)
    x = torch.full((1000, 3), 1e3)
    x[0] = 0.0
    for formula in ("u0", "relu(u0)"):
        assert ops.gspmm(graph, formula, [x], reduce="prod").tolist() == [[0.0] * 3]


def test_infinities_in_sums_are_those_of_torch(isa):
    graph = Graph.from_csr(torch.tensor([0, 3]), torch.arange(3), num_cols=3)
    rows = [(1.0, INF, 2.0), (INF, -INF, 1.0), (-INF, 1.0, 1.0), (NAN, INF, 1.0), (3e38, 3e38, 0.0)]
    x = torch.tensor(rows).t().contiguous()
    actual = ops.spmm(graph, x)[0]
    torch.testing.assert_close(actual, x.sum(0), equal_nan=True)


@pytest.mark.parametrize("big", [80.0, 1000.0, 3e38])
def test_softmax_survives_large_scores(isa, big):
    graph = Graph.from_csr(torch.tensor([0, 4, 4, 5]), torch.zeros(5, dtype=torch.long), num_cols=1)
    scores = torch.tensor([[big], [big], [-big], [0.0], [big]])
    actual = ops.edge_softmax(graph, scores)
    torch.testing.assert_close(actual.view(-1), torch.tensor([0.5, 0.5, 0.0, 0.0, 1.0]))


# -- determinism ----------------------------------------------------------------------------------


def hub_graph() -> Graph:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (2, 6000), generator=generator)
    star = torch.stack([torch.arange(40_000) % 300, torch.full((40_000,), 7)])
    edges = torch.cat([ids, star], 1)
    return Graph.from_edge_index(edges[:, torch.randperm(edges.size(1), generator=generator)])


def everything(graph: Graph) -> list[Tensor]:
    """Results and gradients of every kind of kernel."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 17, generator=generator, requires_grad=True)
    e = torch.randn(graph.num_edges, 1, generator=generator, requires_grad=True)
    scores = torch.randn(graph.num_edges, 3, generator=generator, requires_grad=True)
    outs = [ops.spmm(graph, x, reduce=reduce, edge_order=True) for reduce in ("sum", "mean", "max")]
    outs += [ops.spmm(graph, x, e.squeeze(1), reduce=r, edge_order=True) for r in ("sum", "min")]
    outs += ops.gspmm(graph, "relu(add(u0,e1))", [x, e], reduce=["sum", "max", "sqsum"],
                      edge_order=True)  # fmt: skip
    outs += [ops.sddmm(graph, x, x), ops.edge_softmax(graph, scores)]
    loss = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outs)
    return [*outs, *torch.autograd.grad(loss, [x, e, scores])]


@pytest.mark.each
@pytest.mark.parametrize("width", [1, 3, 16, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_has_the_same_bits_among_short_rows_and_alone(isa, dtype, width):
    torch.manual_seed(0)
    degrees = torch.tensor([0, 1, 3, 2, 0, 0, 17, 4, 1, 300, 2, 0])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)])
    edges, rows = int(rowptr[-1]), degrees.numel()
    col = torch.randint(9, (edges,))
    target, source = (torch.randn(n, 2, width).to(dtype) for n in (rows, 9))
    weight = torch.randn(edges, 2, 1).to(dtype)
    formula = "mul(exp(sub(v0,u1)),add(e2,sigmoid(v0)))"
    for reduce in ("sum", "mean", "max", "min", "prod"):
        graph = Graph.from_csr(rowptr, col, num_cols=9)
        actual = ops.gspmm(graph, formula, [target, source, weight], reduce=reduce)
        for row in range(rows):
            part = slice(int(rowptr[row]), int(rowptr[row + 1]))
            alone = Graph.from_csr(torch.tensor([0, int(degrees[row])]), col[part], num_cols=9)
            operands = [target[row : row + 1], source, weight[part]]
            assert torch.equal(ops.gspmm(alone, formula, operands, reduce=reduce)[0], actual[row])


def test_results_are_bit_equal_for_any_number_of_threads_and_every_run():
    graph = hub_graph()
    torch.set_num_threads(1)
    first = everything(graph)
    for threads, runs in ((1, 2), (2, 10), (4, 8)):
        torch.set_num_threads(threads)
        for _ in range(runs):
            assert all(torch.equal(a, b) for a, b in zip(first, everything(graph), strict=True))


def test_graphs_are_bit_equal_for_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 500, (2, 200_000), generator=generator)
    arrays = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        graph = Graph.from_edge_index(edges)
        arrays.append([graph.rowptr, graph.col, graph.perm, *graph.transposed()[:3]])
    for other in arrays[1:]:
        assert all(torch.equal(a, b) for a, b in zip(arrays[0], other, strict=True))


def test_calls_from_several_python_threads_do_not_disturb_one_another():
    graph = hub_graph()
    expected = everything(graph)
    wrong, errors = [], []

    def work() -> None:
        try:
            with use_backend("cpu"):
                for _ in range(3):
                    actual = everything(graph)
                    wrong.extend(
                        i for i, (a, b) in enumerate(zip(actual, expected, strict=True))
                        if not torch.equal(a, b)
                    )  # fmt: skip
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert wrong == []


@pytest.mark.parametrize("edges", [1000, 16_384, 100_000])
def test_long_sums_in_float32_stay_within_the_backends_tolerance(edges):
    """Equal terms, where adding one by one into one register drifts the most."""
    graph = Graph.from_csr(
        torch.tensor([0, edges]), torch.zeros(edges, dtype=torch.long), num_cols=1
    )
    actual = ops.spmm(graph, torch.full((1, 1), 0.1)).item()
    relative, _ = get_backend("cpu").tolerance(torch.float32)
    assert math.isclose(actual, edges * float(torch.tensor(0.1)), rel_tol=relative)


def test_all_256_bytes_are_widened_exactly(isa):
    """In whole vectors and, with 5 columns, in parts of one."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    for columns in (1, 5, 32, 256):
        x = every.repeat(5)[: 256 * columns // math.gcd(256, columns)].view(-1, columns)
        rowptr = torch.arange(x.size(0) + 1)
        graph = Graph.from_csr(rowptr, rowptr[:-1].clone(), num_cols=x.size(0))
        actual = ops.sampled_spmm(graph, ops.Quantized(x, torch.ones(1, columns)), width=4)
        torch.testing.assert_close(actual, x.float(), rtol=0, atol=0)
