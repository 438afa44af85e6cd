"""Calls on graphs that have no CSR form: the same values and gradients as on those that have."""

import gc

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends.edges import Output
from pyg_accel.formula import operands_of, parse
from pyg_accel.graph.csr import Edges
from pyg_accel.ops import by_edge
from pyg_accel.testing import GraphCase, truth, zoo

FULL, NUMBER, HEAD, FEATURE = "full", "number", "head", "feature"
FORMULAS = {
    "copy": ("u0", FULL),
    "weight-an-edge": ("mul(u0,e1)", FULL, NUMBER),
    "weight-a-head": ("mul(u0,e1)", FULL, HEAD),
    "weight-shared-by-heads": ("mul(u0,e1)", FULL, FEATURE),
    "edge-only": ("e0", FULL),
    "target-only": ("v0", FULL),
    "gine": ("relu(add(add(u0,v1),e2))", FULL, FULL, FULL),
    "gated": ("mul(sigmoid(add(v0,u1)),u2)", FULL, FULL, FULL),
    "quotient": ("div(sub(u0,v1),exp(e2))", FULL, FULL, FULL),
    "broadcast-features": ("mul(tanh(add(u0,v1)),u2)", HEAD, FEATURE, FULL),
    "dot": ("sum(mul(u0,v1))", FULL, FULL),
    "attention-score": ("sum(mul(leaky_relu(add(u0,v1),0.2),v2))", FULL, FULL, FEATURE),
}
REDUCES = ("sum", "mean", "max", "min", "sqsum", "none")
CASES = {case.name: case for case in zoo(hub=70)}
ATTENTION = {
    "gat": ("leaky_relu(add(u1,v2),0.2)", "mul(u0,e3)", "uuve", (FULL, HEAD, HEAD, HEAD)),
    "gatv2": ("sum(mul(leaky_relu(add(u0,v1),0.2),v2))", "u0", "uvv", (FULL, FULL, FULL)),
    "transformer": ("mul(sum(mul(v0,add(u1,e3))),0.5)", "add(u2,e3)", "vuue", (FULL,) * 4),
}


@pytest.fixture(autouse=True)
def never_built(monkeypatch):
    monkeypatch.setattr(by_edge, "BUILD_SECONDS", float("inf"))


@pytest.fixture(params=["reference", "triton"])
def backend(request):
    with use_backend(request.param):
        yield request.param


def small(case: GraphCase) -> GraphCase:
    return case if case.edge_index.size(1) < 100 else case.part(4)


def of_edges(case: GraphCase, dtype: torch.dtype = torch.int64) -> Graph:
    return Graph.of_edges(case.edge_index.to(dtype), 1, case.num_targets, case.num_sources)


def made(
    case: GraphCase, sides: str, kinds: tuple[str, ...], heads: int, width: int
) -> list[Tensor]:
    rows = {"u": case.num_sources, "v": case.num_targets, "e": case.edge_index.size(1)}
    shape = {FULL: (heads, width), NUMBER: (1, 1), HEAD: (heads, 1), FEATURE: (1, width)}
    return [torch.randn(rows[side], *shape[kind], dtype=torch.float64, requires_grad=True)
            for side, kind in zip(sides, kinds, strict=True)]  # fmt: skip


def sides_of(text: str) -> str:
    sides = {o.index: o.side for o in operands_of(parse(text))}
    return "".join(sides[i] for i in sorted(sides))


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-9)


@pytest.mark.pairs
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("size", [(1, 7), (3, 4)])
@pytest.mark.parametrize("graph_name", ["directed", "hub", "bipartite", "duplicates"])
def test_values_and_gradients_are_the_truth(name, reduce, size, graph_name, backend):
    case = small(CASES[graph_name])
    text, *kinds = FORMULAS[name]
    operands = made(case, sides_of(text), tuple(kinds), *size)
    unbuilt = of_edges(case, torch.int32)
    out = ops.gspmm(unbuilt, text, operands, reduce=reduce, edge_order=True)
    expected = truth(case, text, operands, reduce)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    actual = torch.autograd.grad(out, operands, grad.view(out.shape))
    assert not unbuilt.built
    exact = torch.autograd.grad(expected, operands, grad, allow_unused=True)
    assert_same([out.view(expected.shape), *actual], [expected, *exact])


@pytest.mark.parametrize("name", CASES)
def test_graphs_without_edges_and_nodes(name, backend):
    case = small(CASES[name])
    (x,) = made(case, "u", (FULL,), 1, 5)
    unbuilt, built = of_edges(case), of_edges(case).build()
    for reduce in ("sum", "mean", "max", ["mean", "max", "min", "sqsum"]):
        both = [ops.gspmm(g, "u0", [x], reduce=reduce) for g in (unbuilt, built)]
        both = [out if isinstance(out, list) else [out] for out in both]
        grads = [torch.autograd.grad(sum((t * (i + 1)).sum() for i, t in enumerate(out)), x)
                 for out in both]  # fmt: skip
        assert_same([*both[0], *grads[0]], [*both[1], *grads[1]])
    assert not unbuilt.built


@pytest.mark.each
@pytest.mark.parametrize("width", [1, 33, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widths_and_dtypes(width, dtype, backend):
    case = small(CASES["bipartite"])
    x, e = (t.detach().to(dtype) for t in made(case, "ue", (FULL, NUMBER), 1, width))
    exact = truth(case, "mul(u0,e1)", [x, e], "max"), truth(case, "mul(u0,e1)", [x, e], "sum")
    actual = ops.gspmm(of_edges(case), "mul(u0,e1)", [x, e], reduce=["max", "sum"], edge_order=True)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for a, b in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["copy", "gine", "weight-a-head", "dot"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_second_derivatives_are_those_of_a_built_graph(name, reduce):
    case = small(CASES["directed"])
    text, *kinds = FORMULAS[name]
    operands = made(case, sides_of(text), tuple(kinds), 3, 4)
    results = []
    for g in (of_edges(case), of_edges(case).build()):
        with use_backend("reference"):
            out = ops.gspmm(g, text, operands, reduce=reduce, edge_order=True)
            first = torch.autograd.grad(out.square().sum(), operands, create_graph=True)
            results.append(torch.autograd.grad(sum(t.square().sum() for t in first), operands))
    assert_same(*results)


@pytest.mark.parametrize("size", [(1, 7), (3, 4), (2, 1)])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, size, backend):
    case = small(CASES["empty-rows"])
    score, value, sides, kinds = ATTENTION[name]
    operands = made(case, sides, kinds, *size)
    results, unbuilt = [], of_edges(case)
    for g in (unbuilt, of_edges(case).build()):
        with use_backend(backend if g is unbuilt else "reference"):
            out = ops.attention(g, score, value, operands, edge_order=True)
            grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
            actual = torch.autograd.grad(out, operands, grad)
        assert g.built == (g is not unbuilt)
        with use_backend("reference"):
            out = ops.attention(g, score, value, operands, edge_order=True)
            first = torch.autograd.grad(out, operands, grad, create_graph=True)
            second = torch.autograd.grad(sum(t.square().sum() for t in first), operands,
                                         allow_unused=True)  # fmt: skip
        results.append([out, *actual, *(t for t in second if t is not None)])
    assert_same(*results)


def test_the_first_of_equal_maxima_gets_the_gradient(backend):
    edges = torch.tensor([[2, 1, 0, 1], [0, 0, 0, 0]])
    x, e = torch.ones(3, 2, requires_grad=True), torch.ones(4, 1, requires_grad=True)
    ops.gspmm(Graph.of_edges(edges, 1, 1, 3), "mul(u0,e1)", [x, e], reduce="max",
              edge_order=True).sum().backward()  # fmt: skip
    assert x.grad.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert e.grad.tolist() == [[0], [0], [2], [0]]


def test_a_graph_is_built_when_its_account_has_paid_for_it(monkeypatch):
    case = small(CASES["directed"])
    (x,) = made(case, "u", (FULL,), 1, 4)
    g, results = of_edges(case), []
    step = by_edge.EXTRA_SECONDS * case.edge_index.size(1) * 64 * 3
    monkeypatch.setattr(by_edge, "HOST_SECONDS", 0.0)
    monkeypatch.setattr(by_edge, "BUILD_SECONDS", 2.5 * step)
    monkeypatch.setattr(by_edge, "BUILD_SECONDS_AN_EDGE", 0.0)
    with use_backend("reference"):
        for _ in range(5):
            out = ops.gspmm(g, "u0", [x], reduce="mean")
            results.append((g.built, out, *torch.autograd.grad(out.square().sum(), x)))
    assert [built for built, *_ in results] == [False] * 3 + [True] * 2
    for result in results:
        assert_same(result[1:], results[0][1:])


def test_deterministic_algorithms_use_rows():
    case = small(CASES["directed"])
    (x,) = made(case, "u", (FULL,), 1, 4)
    g = of_edges(case)
    torch.use_deterministic_algorithms(True)
    try:
        with use_backend("reference"):
            ops.gspmm(g, "u0", [x])
    finally:
        torch.use_deterministic_algorithms(False)
    assert g.built


def test_an_edge_list_that_changes_before_the_gradient_is_an_error():
    edges = torch.tensor([[0, 1], [1, 0]])
    x = torch.ones(2, 3, requires_grad=True)
    with use_backend("reference"):
        out = ops.gspmm(Graph.of_edges(edges, 1, 2, 2), "u0", [x])
    edges += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_many_graphs_leave_nothing_behind():
    x = torch.ones(6, 3, requires_grad=True)

    def step() -> None:
        g = Graph.of_edges(torch.randint(6, (2, 20)), 1, 6, 6)
        with use_backend("reference"):
            ops.gspmm(g, "u0", [x], reduce="mean").sum().backward()

    step()
    gc.collect()
    before = len(by_edge._plans), sum(isinstance(t, Graph) for t in gc.get_objects())
    for _ in range(50):
        step()
    gc.collect()
    assert (len(by_edge._plans), sum(isinstance(t, Graph) for t in gc.get_objects())) == before


def test_a_graph_of_one_node_comes_first(backend):
    for case in (GraphCase("one", torch.tensor([[0], [0]]), 1, 1), small(CASES["directed"])):
        wide = made(case, "u", (FULL,), 1, 5)[0].flatten(1)
        operands = [wide[:, :1].sin(), wide[:, 1:2], wide[:, 1:]]
        actual = ops.gspmm(of_edges(case), "mul(u0,mul(u1,u2))", operands)
        right = ops.gspmm(of_edges(case).build(), "u0", [operands[0] * operands[1] * operands[2]])
        assert_same([actual], [right])


@pytest.mark.parametrize("loops", [None, 3])
def test_targets_in_the_first_row(loops, backend):
    edges, x = torch.randint(6, (2, 20)), torch.randn(6, 3, dtype=torch.float64)
    actual = [ops.gspmm(Graph.of_edges(e, t, 6, 6, loops=loops), "u0", [x], reduce="mean")
             for e, t in ((edges, 1), (edges.flip(0), 0), (edges, 0))]  # fmt: skip
    assert_same(actual[1:2], actual[:1])
    right = ops.gspmm(Graph.of_edges(edges, 0, 6, 6, loops=loops).build(), "u0", [x], reduce="mean")
    assert_same(actual[2:], [right])


def test_operands_without_elements(backend):
    case = small(CASES["directed"])
    operands = [torch.ones(case.num_sources, 1, 5), torch.ones(case.num_sources, 0, 5)]
    actual = ops.gspmm(of_edges(case), "mul(u0,u1)", operands)
    assert actual.shape == (case.num_targets, 0, 5)


def test_ids_out_of_range_write_nothing():
    """On a GPU they are an error of the device besides."""
    from pyg_accel.backends.triton.edges import run

    edges = Edges(torch.tensor([[0, 5, 1, -1], [1, 0, 9, 0]]), 1, 2, 2)
    x = torch.ones(2, 1, 3)
    sums = run(edges, ((Output(parse("u0"), "v", (1, 3)), Output(parse("u0"), "u", (1, 3))),), [x])
    assert [t[:, 0, 0].tolist() for t in sums] == [[0, 1], [1, 0]]
