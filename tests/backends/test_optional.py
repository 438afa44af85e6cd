"""The optional backends: right where they are installed, and with reasons where they are not."""

import importlib.util

import pytest
import torch

from pyg_accel import BackendNotSupported, Graph, ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.settings import settings
from pyg_accel.testing import truth, zoo

CASES = {case.name: case for case in zoo(hub=17_000)}


def installed(name: str):
    backend = get_backend(name)
    if reasons := backend.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    return backend


def spec(formula: str, reduce: str, *shapes: tuple[int, int], dtype=torch.float32, op="gspmm"):
    heads, width = max(h for h, _ in shapes), max(f for _, f in shapes)
    return OpSpec(op, "cpu", dtype, 9, 9, 40, heads, width, formula, (reduce,),
                  shapes=shapes)  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["f64", "f32"])
def dtype(request):
    return request.param


@pytest.mark.parametrize("module", ["torch_sparse", "pyg_lib"])
def test_what_is_absent_says_so(module):
    reasons = get_backend(module).unavailable_reasons()
    assert (importlib.util.find_spec(module) is None) <= bool(reasons)
    if reasons:
        with pytest.raises(BackendNotSupported, match="not installed"), use_backend(module):
            choose(spec("u0", "sum", (1, 4)))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_torch_sparse_sums_like_the_truth(case, dtype, reduce, index_dtype):
    backend = installed("torch_sparse")
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    graph.rowptr, graph.col = graph.rowptr.to(index_dtype), graph.col.to(index_dtype)
    relative, absolute = backend.tolerance(dtype)
    for heads, width, weighted in ((1, 7, False), (3, 33, False), (1, 7, True), (3, 5, True)):
        x = torch.randn(case.num_sources, heads, width, dtype=dtype)[:, :, ::1]
        weight = torch.randn(case.edge_index.size(1), heads, 1, dtype=dtype)
        text, operands = ("mul(u0,e1)", [x, weight]) if weighted else ("u0", [x])
        with use_backend("torch_sparse"):
            actual = ops.gspmm(graph, text, operands, reduce=reduce, edge_order=True)
        expected = truth(case, text, operands, reduce)
        scale = truth(case, text, [t.abs() for t in operands], reduce)
        assert actual.dtype == dtype
        assert bool(((actual.double() - expected).abs() <= relative * scale + absolute).all())


def test_gradients_of_what_torch_sparse_computed_come_from_whoever_can():
    installed("torch_sparse")
    case = CASES["directed"]
    graph = Graph.from_edge_index(case.edge_index, (40, 40))
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(300, dtype=torch.float64, requires_grad=True)
    with use_backend("torch_sparse"):
        out = ops.spmm(graph, x, weight, edge_order=True)
    expected = ops.spmm(graph, x, weight, edge_order=True)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, [x, weight], grad),
        torch.autograd.grad(expected, [x, weight], grad),
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (spec("relu(u0)", "sum", (1, 4)), "the message is"),
        (spec("u0", "max", (1, 4)), "the reduction is"),
        (spec("mul(u0,e1)", "sum", (1, 4), (1, 4)), "weights differ between features"),
        (spec("u0", "sum", (1, 4), dtype=torch.bfloat16), "without more precision"),
    ],
    ids=["message", "reduction", "weight-a-feature", "bf16"],
)
def test_torch_sparse_declines_the_rest_with_reasons(asked, why):
    installed("torch_sparse")
    with pytest.raises(BackendNotSupported, match=why), use_backend("torch_sparse"):
        choose(asked)


@pytest.mark.parametrize("name", ["torch_sparse", "pyg_lib"])
def test_they_are_chosen_where_they_are_the_cheapest_of_those_that_can(name):
    installed(name)
    settings.disable = "cpu,triton"
    asked = (
        spec("u0", "sum", (1, 64))
        if name == "torch_sparse"
        else spec("", "", (2, 1), op="edge_softmax")
    )
    assert choose(asked).backend.name == name
    settings.disable = "triton"
    if not get_backend("cpu").unavailable_reasons():
        assert choose(asked).backend.name == "cpu"


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_pyg_lib_reduces_edge_data_like_the_truth(case, dtype, reduce):
    backend = installed("pyg_lib")
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    edges = torch.randn(case.edge_index.size(1), 2, 7, dtype=dtype)
    with use_backend("pyg_lib"):
        actual = ops.gspmm(graph, "e0", [edges], reduce=reduce, edge_order=True)
    relative, absolute = backend.tolerance(dtype)
    expected = truth(case, "e0", [edges], reduce)
    scale = truth(case, "e0", [edges.abs()], reduce)
    assert bool(((actual.double() - expected).abs() <= relative * scale + absolute).all())


@pytest.mark.parametrize("edge_order", [True, False])
def test_pyg_libs_softmax_and_its_gradient_equal_the_references(case, edge_order):
    installed("pyg_lib")
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    results = []
    scores = torch.randn(case.edge_index.size(1), 3, requires_grad=True)
    grad = torch.randn_like(scores)
    for name in ("pyg_lib", "reference"):
        with use_backend(name):
            out = ops.edge_softmax(graph, scores, edge_order=edge_order)
            results.append((out, *torch.autograd.grad(out, scores, grad)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-5, atol=2e-6)
