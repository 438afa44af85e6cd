"""Every row of the table of functions, forward and gradient, on every backend."""

import pytest
import torch

from pyg_accel import Graph, ops, use_backend
from pyg_accel.errors import HOW_TO_BUILD
from pyg_accel.formula import Binary, Operand, Unary
from pyg_accel.formula.functions import BINARY, FUNCTIONS, HEADER, OPS, UNARY, header
from pyg_accel.runtime import native

PARAMETERS = {"leaky_relu": 0.2, "pow": 3.0}
POINTS = torch.tensor([-7.0, -2.5, -1.0, -0.3, 0.0, 1e-3, 0.4, 1.0, 2.0, 9.0], dtype=torch.float64)


def formula_of(name):
    if name in BINARY:
        return str(Binary(name, Operand("u", 0), Operand("e", 1)))
    return str(Unary(name, Operand("u", 0), PARAMETERS.get(name, 0.0)))


def inputs_of(name):
    x = POINTS.abs() + 0.1 if name in ("log", "sqrt") else POINTS
    y = torch.tensor([3.0, 0.0, -1.0, 0.5], dtype=x.dtype)
    if name == "div":
        y = y + 4
    x = x.repeat_interleave(len(y)).unsqueeze(1)
    if name not in BINARY:
        return [x]
    return [x, y.repeat(len(POINTS)).unsqueeze(1)]


def outcome(function, inputs):
    inputs = [t.clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    if not out.requires_grad:  # constant almost everywhere
        return [out, *map(torch.zeros_like, inputs)]
    seed = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view_as(out)
    actual = torch.autograd.grad(out, inputs, seed, allow_unused=True)
    return [out, *(torch.zeros_like(t) if g is None else g
                   for t, g in zip(inputs, actual, strict=True))]  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "sel"])
def test_every_function_and_its_gradient_are_those_of_torch(name, backend, dtype):
    inputs = [t.to(dtype) for t in inputs_of(name)]
    rows = torch.arange(inputs[0].size(0))
    graph = Graph.from_edge_index(torch.stack([rows, rows]))
    function = FUNCTIONS[name]
    given = (PARAMETERS[name],) if function.parameter else ()
    expected = outcome(lambda *args: function.torch(*args, *given), inputs)
    with use_backend(backend):
        actual = outcome(lambda *args: ops.gspmm(graph, formula_of(name), [*args]), inputs)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("name", ["maximum", "minimum", "gelu", "silu", "erf"])
def test_what_is_not_a_number_stays_so(name, backend):
    nan, one = torch.tensor([[torch.nan], [1.0]]), torch.tensor([[1.0], [torch.nan]])
    inputs = [nan, one][: 1 + (name in BINARY)]
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [0, 1]]))
    with use_backend(backend):
        actual = ops.gspmm(graph, formula_of(name), inputs)
    torch.testing.assert_close(actual, FUNCTIONS[name].torch(*inputs), equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_where_takes_nothing_from_the_side_that_is_not_chosen(backend):
    a, b = torch.tensor([[torch.inf], [2.0]]), torch.tensor([[1.0], [torch.nan]])
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [0, 1]]))
    with use_backend(backend):
        actual = ops.gspmm(graph, "where(e2,u0,v1)", [a, b, torch.tensor([[0.0], [1.0]])])
    assert actual.flatten().tolist() == [1.0, 2.0]


def test_the_cpu_kernels_have_the_table():
    if not HEADER.exists():
        pytest.skip("an installed package has no sources")
    assert HEADER.read_text() == header(), "run python -m pyg_accel.formula.functions and build"
    assert len(set(OPS)) == len(OPS) == len(FUNCTIONS) + 1
    assert set(BINARY) | set(UNARY) == set(FUNCTIONS)


def test_a_library_of_another_table_is_not_used(monkeypatch):
    before = native.cpu_unavailable_reasons()
    try:
        with monkeypatch.context() as patched:  # undone here: other fixtures ask for the library
            patched.setattr(native, "numbers", lambda: "kAdd=7;")
            native._load_cpu.cache_clear()
            assert native.cpu_unavailable_reasons() == [
                f"extension was built from other sources: rebuild it with {HOW_TO_BUILD}"
            ]
    finally:
        native._load_cpu.cache_clear()
    assert native.cpu_unavailable_reasons() == before
