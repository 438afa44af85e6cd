"""One suite for every backend: each graph of the zoo, each formula and reduction, all gradients."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import Backend, backends, get_backend
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons
from pyg_accel.testing import GraphCase, truth
from tests.backends.contract import (
    CASES,
    FLOATS,
    FORMULAS,
    GRAPHS,
    HALF,
    MAIN,
    SMALL,
    check,
    graph_of,
    make_operands,
    reductions,
    sizes,
)

SUMS_ALONE = ("torch_sparse", "pyg_lib")  # see test_optional.py


EVERYWHERE = [name for name in backends() if name not in SUMS_ALONE]
# Where kernels are not interpreted. Above other parameters it makes the backend the one that
# changes first, so that all of them share a truth.
compiled = pytest.mark.parametrize(
    "backend", [name for name in EVERYWHERE if name != "triton"], indirect=True
)


@pytest.fixture(params=EVERYWHERE)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    actual = get_backend(request.param)
    if reasons := actual.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    if actual.name != "cpu":  # no other has threads that a row of 17000 is cut up for
        small = SMALL if actual.name == "triton" else {"hub": SMALL["hub"]}
        for name, case in small.items():
            monkeypatch.setitem(CASES, name, case)
            monkeypatch.setitem(GRAPHS, name, graph_of(case))
    if actual.name == "triton":
        from pyg_accel.backends.triton import plan

        choose = plan.choose_tile
        cut = lambda *call: replace(choose(*call), split=32, piece=16)  # noqa: E731
        monkeypatch.setattr(plan, "choose_tile", cut)
        plan.make_plan.cache_clear()
        request.addfinalizer(plan.make_plan.cache_clear)
    with use_backend(actual.name):
        yield actual


@pytest.mark.heavy("hub")
@pytest.mark.each("reference", "cuda")
@compiled
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("case", CASES)
def test_float64_results_and_gradients_equal_the_truth(backend, case, name):
    for size in sizes(case, torch.float64):
        for reduce in reductions(name, CASES[case]):
            check(backend, CASES[case], name, *size, torch.float64, reduce)


@pytest.mark.heavy("hub", torch.bfloat16)
@pytest.mark.heavy("hub", torch.float16)
@pytest.mark.pairs
@compiled
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("case", CASES)
def test_narrower_dtypes_stay_within_the_backends_tolerance(backend, case, name, dtype):
    for size in sizes(case, dtype):
        for reduce in reductions(name, CASES[case]):
            check(backend, CASES[case], name, *size, dtype, reduce)


def each_way(cases: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "name", "dtype", "size", "reduce"),
        [
            pytest.param(case, name, dtype, size, reduce,
                         id=f"{case}-{name}-{short}-{size[0]}x{size[1]}-{reduce}")
            for short, dtype in zip(("f64", "f32", "bf16", "f16"), FLOATS, strict=True)
            for case in cases
            for name in (FORMULAS if dtype == torch.float64 else MAIN)
            for size in sizes(case, dtype)
            for reduce in reductions(name, CASES[case])
        ],
    )  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@each_way([name for name, case in CASES.items() if case.edge_index.numel()])
def test_interpreted_kernels_equal_the_truth(backend, case, name, dtype, size, reduce):
    check(backend, CASES[case], name, *size, dtype, reduce)


@pytest.mark.each
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@each_way([name for name, case in CASES.items() if not case.edge_index.numel()])
def test_interpreted_kernels_take_graphs_without_edges(backend, case, name, dtype, size, reduce):
    check(backend, CASES[case], name, *size, dtype, reduce)


@pytest.mark.each
@pytest.mark.parametrize("width", [1, 7, 33, 64, 100, 257])
@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        (name, reduce)
        for name in (*MAIN, "weight-an-edge", "gated")
        for reduce in (("none",) if name == "dot" else ("sum", "max", "mean"))
    ],
)
def test_every_width_equals_the_truth(backend, name, reduce, width):
    check(backend, CASES["directed"], name, 1, width, torch.float32, reduce)


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
def test_several_reductions_in_one_pass_equal_each_alone(backend, case):
    _, (x, e) = make_operands(CASES[case], "gine", 1, 7, torch.float64)
    reduces = ["mean", "max", "min", "sqsum", "sum"]
    graph, together = GRAPHS[case], ops.gspmm
    outs = together(graph, "relu(add(u0,e1))", [x, e], reduce=reduces, edge_order=True)
    grads = [torch.full_like(out, 0.5 + i) for i, out in enumerate(outs)]
    actual = torch.autograd.grad(outs, [x, e], grads)
    expected = [torch.zeros_like(x), torch.zeros_like(e)]
    for reduce, out, grad in zip(reduces, outs, grads, strict=True):
        alone = ops.gspmm(graph, "relu(add(u0,e1))", [x, e], reduce=reduce, edge_order=True)
        torch.testing.assert_close(out, alone)
        for total, part in zip(expected, torch.autograd.grad(alone, [x, e], grad), strict=True):
            total += part
    torch.testing.assert_close(actual, tuple(expected))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_maxima_of_several_reductions_route_gradients_by_edge(backend, reduce):
    case = CASES["directed"]
    _, (x,) = make_operands(case, "copy", 1, 7, torch.float64)
    exact = x.detach().clone().requires_grad_()
    outs = ops.gspmm(GRAPHS["directed"], "u0", [x], reduce=["sum", reduce])
    right = [truth(case, "u0", [exact], r) for r in ("sum", reduce)]
    actual = torch.autograd.grad(outs[0].sum() + (outs[1] ** 2).sum(), x)
    expected = torch.autograd.grad(right[0].sum() + (right[1] ** 2).sum(), exact)
    torch.testing.assert_close(actual, expected)


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
def test_integers_in_float32_add_up_exactly(backend, case):
    """Whole numbers leave no room for rounding: no lost edge can hide in a tolerance."""
    graph, (rows, edges) = GRAPHS[case], (CASES[case].num_sources, CASES[case].edge_index.size(1))
    x = torch.randint(-3, 4, (rows, 1, 19)).float()
    weight = torch.randint(-3, 4, (edges, 1, 1)).float()
    for text, operands in (("u0", [x]), ("mul(u0,e1)", [x, weight]), ("add(u0,e1)", [x, weight])):
        actual = ops.gspmm(graph, text, operands, reduce="sum", edge_order=True)
        expected = truth(CASES[case], text, operands, "sum")
        assert torch.equal(actual.double(), expected.expand_as(actual)), text


@pytest.mark.pairs
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        (name, reduce)
        for name in ("copy", "weight-an-edge", "gine", "dot")
        for reduce in (("none",) if name == "dot" else ("sum", "mean", "max", "none"))
    ],
)
def test_int32_and_int64_indices_give_the_same_bits(backend, name, reduce, index_dtype):
    narrow = GRAPHS["directed"]
    graph = Graph.from_csr(
        narrow.rowptr.to(index_dtype), narrow.col.to(index_dtype), num_cols=narrow.num_cols
    )
    text, operands = make_operands(CASES["directed"], name, 2, 9, torch.float32)
    outs = [ops.gspmm(g, text, operands, reduce=reduce) for g in (graph, narrow)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.sum(), operands) for out in outs]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_int64_indices_of_winners_route_gradients(backend):
    case, narrow = CASES["directed"], GRAPHS["directed"]
    graph = Graph.from_csr(narrow.rowptr.long(), narrow.col.long(), num_cols=narrow.num_cols)
    _, (x,) = make_operands(case, "copy", 1, 7, torch.float64)
    exact = x.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(ops.gspmm(graph, "u0", [x], reduce="max").pow(2).sum(), x)
    (right,) = torch.autograd.grad(truth(case, "u0", [exact], "max").pow(2).sum(), exact)
    torch.testing.assert_close(actual, right)


def test_columns_that_are_not_sorted_are_reduced_all_the_same(backend):
    rowptr, col = torch.tensor([0, 3, 3, 6]), torch.tensor([2, 0, 1, 1, 2, 0])
    graph = Graph.from_csr(rowptr, col, num_cols=4)
    target = torch.tensor([0, 0, 0, 2, 2, 2])
    case = GraphCase("unsorted", torch.stack([col, target]), 4, 3)
    x = torch.randn(4, 1, 9, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, 1, 1, dtype=torch.float64, requires_grad=True)
    for reduce in ("sum", "mean", "max", "min", "prod"):
        actual = ops.gspmm(graph, "mul(u0,e1)", [x, w], reduce=reduce)
        expected = truth(case, "mul(u0,e1)", [x, w], reduce)
        torch.testing.assert_close(actual, expected)
        ours = torch.autograd.grad(actual.sum(), [x, w])
        torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), [x, w]))


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every-other-column": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "slice-of-columns": lambda t: torch.cat([t, t], 2)[:, :, : t.size(2)],
    "every-other-row": lambda t: t.repeat_interleave(2, 0)[::2],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "expanded-rows": lambda t: t[:1].expand_as(t),
}


GRADIENT_LAYOUTS = {
    "plain": lambda t: t,
    "one-row": lambda t: t[:1].expand_as(t),
    "one-number": lambda t: t.flatten()[0].expand_as(t),
    "heads-outermost": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed": lambda t: t.transpose(-1, 1).contiguous().transpose(-1, 1),
    "slice-of-columns": lambda t: torch.cat([t, t], -1)[..., : t.size(-1)],
}


@pytest.mark.each
@pytest.mark.parametrize("gradient", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "reduce"),
    [*((name, how) for name in ("copy", "weight-a-head", "gine") for how in ("sum", "max")),
     ("dot", "none")],
)  # fmt: skip
def test_memory_layout_of_operands_does_not_matter(backend, name, reduce, layout, gradient):
    text, operands = make_operands(CASES["directed"], name, 3, 8, torch.float32)
    odd = [LAYOUTS[layout](t.detach()).requires_grad_() for t in operands]
    plain = [t.detach().contiguous().requires_grad_() for t in odd]
    outs = [
        ops.gspmm(GRAPHS["directed"], text, inputs, reduce=reduce, edge_order=True)
        for inputs in (odd, plain)
    ]
    assert torch.equal(*outs)
    grad = GRADIENT_LAYOUTS[gradient](torch.randn(outs[0].shape))
    ours = torch.autograd.grad(outs[0], odd, grad)
    right = torch.autograd.grad(outs[1], plain, grad.contiguous())
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
def test_edge_softmax_equals_the_truth(backend, case):
    graph, (_, target) = GRAPHS[case], CASES[case].edge_index
    for heads, dtype in ((1, torch.float64), (5, torch.float64), (5, torch.float32)):
        relative, absolute = backend.tolerance(dtype)
        scores = (torch.randn(target.numel(), heads) * 10).to(dtype).requires_grad_()
        exact = scores.detach().double().requires_grad_()
        actual = ops.edge_softmax(graph, scores, edge_order=True)
        nodes, place = target.unique(return_inverse=True)
        shares = exact.exp()  # of numbers below 100
        total = torch.zeros(len(nodes), heads, dtype=torch.float64).index_add(0, place, shares)
        expected = shares / total[place]
        grad = torch.randn_like(actual)
        (ours,) = torch.autograd.grad(actual, scores, grad)
        (right,) = torch.autograd.grad(expected, exact, grad.double())
        torch.testing.assert_close(actual.double(), expected, rtol=10 * relative, atol=absolute)
        torch.testing.assert_close(ours.double(), right, rtol=10 * relative, atol=10 * absolute)


def test_a_maximum_gives_its_whole_gradient_to_one_of_several_equal_edges(backend):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 0]]))
    x = torch.ones(3, 4, requires_grad=True)
    e = torch.zeros(3, 4, requires_grad=True)
    for reduce in ("max", "min"):
        (grad,) = torch.autograd.grad(ops.spmm(graph, x, reduce=reduce).sum(), x)
        assert grad.tolist() == [[1.0] * 4, [0.0] * 4, [0.0] * 4]
        out = ops.gspmm(graph, "add(u0,e1)", [x, e], reduce=reduce, edge_order=True)
        (grad,) = torch.autograd.grad(out.sum(), e)
        assert grad.tolist() == [[1.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("dtype", HALF, ids=["bf16", "f16"])
def test_ties_in_16_bit_lose_no_gradient(backend, dtype):
    case = CASES["directed"]
    x = torch.randint(0, 4, (case.num_sources, 16)).to(dtype).requires_grad_()
    out = ops.spmm(GRAPHS["directed"], x, reduce="max")
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    targets = case.edge_index[1].unique().numel()
    assert grad.float().sum(0).tolist() == [float(targets)] * 16


# -- the CPU kernels, one by one ------------------------------------------------------------------

CPU_VARIANTS = {
    "portable": ("portable", 0, 0),
    "avx2": ("avx2", 0, 0),
    "avx512": ("avx512", 0, 0),
    "feature-blocks": ("", 16, 0),
    "ragged-feature-blocks": ("", 7, 0),
    "source-blocks": ("", 0, 9),
    "both-blocks": ("", 16, 9),
    "portable-blocks": ("portable", 16, 9),
}
# Above other parameters, as `compiled`.
each_cpu_variant = pytest.mark.parametrize("cpu_variant", CPU_VARIANTS, indirect=True)


@pytest.fixture
def cpu_variant(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if reasons := cpu_unavailable_reasons():
        pytest.skip("; ".join(reasons))
    isa, block_width, block_cols = CPU_VARIANTS[request.param]
    supported = get_backend("cpu").info()["supported"].split(",")
    if isa and isa not in supported:
        pytest.skip(f"this processor or build has no {isa}")
    library = cpu_library()
    library.configure(isa, block_width, block_cols)
    with use_backend("cpu"):
        yield get_backend("cpu")
    library.configure("", 0, 0)


@pytest.mark.pairs
@each_cpu_variant
@pytest.mark.parametrize("name", [*MAIN, "weight-an-edge", "quotient", "attention-score"])
@pytest.mark.parametrize("case", ["directed", "empty-rows", "bipartite", "duplicates", "hub"])
def test_every_cpu_kernel_equals_the_truth(cpu_variant, case, name):
    heads, width = (1, 33) if case == "hub" else (2, 41)
    for dtype in (torch.float32, torch.float64):
        for reduce in reductions(name, CASES[case]):
            if case == "hub" and (dtype == torch.float64 or reduce not in ("sum", "max", "none")):
                continue
            check(cpu_variant, CASES[case], name, heads, width, dtype, reduce)


@each_cpu_variant
@pytest.mark.parametrize("dtype", HALF, ids=["bf16", "f16"])
def test_every_cpu_kernel_handles_16_bit(cpu_variant, dtype):
    for name in ("copy", "weight-a-head", "gine", "dot"):
        for reduce in reductions(name, CASES["directed"]):
            check(cpu_variant, CASES["directed"], name, 2, 41, dtype, reduce)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_blocking_changes_no_bit_of_a_result_but_where_a_sum_is_cut(reduce):
    if reasons := cpu_unavailable_reasons():
        pytest.skip("; ".join(reasons))
    library, graph = cpu_library(), GRAPHS["directed"]
    _, (x, weight) = make_operands(CASES["directed"], "weight-an-edge", 1, 100, torch.float32)
    outs, grads = [], []
    for block_width, block_cols in ((0, 0), (16, 0), (7, 0), (0, 9), (16, 9), (1, 1)):
        library.configure("", block_width, block_cols)
        for operands in ([x], [x, weight]):
            out = ops.spmm(graph, *[t.squeeze(1) for t in operands], reduce=reduce, edge_order=True)
            outs.append(out)
            grads.append(torch.autograd.grad(out.sum(), x)[0])
    for actual in (outs, grads):
        for k in (0, 1):
            by_columns, by_sources = actual[k:6:2], actual[6 + k :: 2]
            assert all(torch.equal(actual[k], other) for other in by_columns)
            for other in by_sources:  # each block of sources adds up a sum of its own
                torch.testing.assert_close(other, actual[k], rtol=2e-5, atol=1e-5)
