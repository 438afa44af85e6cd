"""The operator behind all others: shapes, gradients of gradients, modes of torch, bad input."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_accel import BackendNotSupported, Graph, ops, use_backend
from pyg_accel.formula import parse
from pyg_accel.ops.gspmm_backward import plan_gradients
from pyg_accel.testing import GraphCase, truth

EDGES = torch.tensor([[0, 1, 2, 2, 0, 3, 3, 3], [1, 0, 1, 1, 3, 3, 0, 0]])


@pytest.fixture
def graph() -> Graph:
    return Graph.from_edge_index(EDGES, (4, 5))


def operand(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes, dtype=dtype, requires_grad=True)


FORMULAS = {
    "copy": ("u0", ((4, 3),)),
    "weighted": ("mul(u0,e1)", ((4, 3), (8, 1))),
    "gine": ("relu(add(u0,e1))", ((4, 3), (8, 3))),
    "gated": ("mul(sigmoid(add(v0,u1)),u2)", ((5, 3), (4, 3), (4, 3))),
    "quotient": ("div(u0,add(exp(v1),1.5))", ((4, 3), (5, 3))),
    "powers": ("pow(softplus(mul(u0,v1)),1.5)", ((4, 3), (5, 1))),
    "both-ends": ("mul(u0,mul(tanh(add(u1,v2)),e3))", ((4, 3), (4, 1), (5, 1), (8, 1))),
    "ends-of-heads": ("mul(u0,exp(sub(u1,v2)))", ((4, 2, 3), (4, 2, 1), (5, 2, 1))),
    "ends-of-one-head": ("mul(u0,mul(u1,v2))", ((4, 2, 3), (4, 1, 1), (5, 2, 1))),
    "rows-and-numbers": (
        "div(neg(mul(u0,v1)),add(2.0,exp(mul(v2,e3))))",
        ((4, 3), (5, 3), (5, 1), (8, 1)),
    ),
    "tanh-log": ("log(add(abs(tanh(sub(u0,v1))),0.5))", ((4, 3), (5, 3))),
}


def reduced(graph: Graph, text: str, reduce: str) -> Callable[..., tuple[Tensor, ...]]:
    """By one reduction, or by several."""
    return lambda *given: tuple(
        ops.gspmm(graph, text, given, reduce=reduce.split(), edge_order=True)
    )


@pytest.mark.each
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod", "sqsum", "none"])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck(graph, name, reduce):
    text, shapes = FORMULAS[name]
    operands = [operand(*shape) for shape in shapes]
    assert torch.autograd.gradcheck(reduced(graph, text, reduce), operands)


@pytest.mark.each
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "none", "sqsum", "prod", "sum max mean"])
@pytest.mark.parametrize("name", [*FORMULAS, "dot"])
def test_gradgradcheck(graph, name, reduce):
    text, shapes = (FORMULAS | {"dot": ("sum(mul(u0,v1))", ((4, 3), (5, 3)))})[name]
    operands = [operand(*shape) for shape in shapes]
    assert torch.autograd.gradgradcheck(reduced(graph, text, reduce), operands)


def test_a_sum_that_both_ends_of_an_edge_need_is_computed_once():
    text, kinds = "mul(u0,mul(tanh(add(u1,v2)),e3))", ((1, 2), (1, 1), (1, 1), (1, 1))
    needs = (True, True, True, False)
    steps = plan_gradients(text, ("sum",), needs, (True,), kinds)
    tanh = "tanh(add(u1,v2))"
    assert [(step.operand, step.side, str(step.formula)) for step in steps] == [
        (6, "e", f"mul(mul(e3,sub(1.0,mul({tanh},{tanh}))),sum(mul(v4,u0)))"),
        (0, "u", f"mul(v4,mul({tanh},e3))"),
        (1, "u", "e6"),
        (2, "v", "e6"),
    ]


@pytest.mark.parametrize("zeros", [0, 1, 2], ids=["no-zero", "one-zero", "two-zeros"])
def test_the_gradient_of_a_product_with_zeros_equals_autograd(zeros):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 0]]))
    x = torch.tensor([[2.0], [3.0], [5.0]], dtype=torch.float64)
    x[:zeros] = 0
    x.requires_grad_()
    (actual,) = torch.autograd.grad(ops.spmm(graph, x, reduce="prod").sum(), x)
    (right,) = torch.autograd.grad(x.prod(), x)
    torch.testing.assert_close(actual, right)


SHAPES = {
    "features": ((4, 3), (8, 3)),
    "one-number-an-edge": ((4, 3), (8, 1)),
    "vector-an-edge-is-a-feature": ((4, 3), (8,)),
    "heads": ((4, 2, 3), (8, 2, 1)),
    "heads-share-weights": ((4, 2, 3), (8, 1, 3)),
    "features-given-to-heads": ((4, 2, 3), (8, 3)),
    "edges-wider-than-nodes": ((4, 1), (8, 3)),
    "three-levels": ((4, 2, 3, 5), (8, 2, 1, 5)),
    "middle-broadcast": ((4, 2, 1, 5), (8, 1, 3, 1)),
    "no-features": ((4,), (8,)),
    "zero-width": ((4, 0), (8, 1)),
    "zero-heads": ((4, 0, 3), (8, 1, 1)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_trailing_dimensions_broadcast_from_the_right(graph, shape):
    x, e = (operand(*sizes) for sizes in SHAPES[shape])
    if e.dim() == 1 and x.dim() > 1:
        with pytest.raises((ValueError, RuntimeError)):
            torch.broadcast_shapes(x.shape, e.shape)
        e = e.detach().unsqueeze(1).requires_grad_()
    trailing = torch.broadcast_shapes(x.shape[1:], e.shape[1:])
    rank = len(trailing)

    def full(t: Tensor) -> Tensor:
        own = t.shape[1:]
        return t.reshape(t.size(0), *(1,) * (rank - len(own)), *own).expand(-1, *trailing)

    message = full(x)[EDGES[0]] * full(e)
    expected = torch.zeros(5, *trailing, dtype=torch.float64).index_add(0, EDGES[1], message)
    actual = ops.gspmm(graph, "mul(u0,e1)", [x, e], edge_order=True)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected)
    ours = torch.autograd.grad(actual.sin().sum(), [x, e])
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sin().sum(), [x, e]))


def test_edge_order_and_csr_order_differ_by_the_permutation(graph):
    e = operand(8, 2)
    by_edge = ops.gspmm(graph, "e0", [e], reduce="none", edge_order=True)
    assert torch.equal(by_edge, e)
    stored = e[graph.perm.long()]
    torch.testing.assert_close(
        ops.gspmm(graph, "e0", [e], edge_order=True), ops.gspmm(graph, "e0", [stored])
    )
    x = operand(4, 2)
    torch.testing.assert_close(
        ops.gspmm(graph, "u0", [x], reduce="none"), x[EDGES[0]][graph.perm.long()]
    )


def test_a_formula_may_be_text_or_data(graph):
    x = operand(4, 2)
    text, data = (ops.gspmm(graph, f, [x]) for f in ("relu(u0)", parse("relu(u0)")))
    assert torch.equal(text, data)


def test_features_of_several_dtypes_are_promoted(graph):
    x, e = operand(4, 2, dtype=torch.float32), operand(8, 2, dtype=torch.float64)
    actual = ops.gspmm(graph, "mul(u0,e1)", [x, e], edge_order=True)
    assert actual.dtype == torch.float64
    grads = torch.autograd.grad(actual.sum(), [x, e])
    assert [g.dtype for g in grads] == [torch.float32, torch.float64]


def test_one_tensor_may_be_source_and_target_at_once():
    graph = Graph.from_edge_index(EDGES % 4)
    x, y = operand(4, 2), None
    case = GraphCase("square", EDGES % 4, 4, 4)
    actual = ops.gspmm(graph, "mul(u0,v1)", [x, x])
    y = truth(case, "mul(u0,v1)", [x.unsqueeze(1), x.unsqueeze(1)], "sum").squeeze(1)
    torch.testing.assert_close(actual, y)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sin().sum(), x), torch.autograd.grad(y.sin().sum(), x)
    )


def test_only_gradients_that_are_wanted_are_computed(graph):
    x, e = operand(4, 2), operand(8, 2).detach()
    out = ops.gspmm(graph, "mul(u0,e1)", [x, e])
    assert out.requires_grad
    out.sum().backward()
    assert x.grad is not None
    assert e.grad is None
    assert not ops.gspmm(graph, "mul(u0,e1)", [x.detach(), e]).requires_grad


def test_the_transpose_is_built_only_for_gradients_of_sources(graph):
    ops.gspmm(graph, "mul(u0,e1)", [operand(4, 2).detach(), operand(8, 2)]).sum().backward()
    ops.gspmm(graph, "v0", [operand(5, 2)]).sum().backward()
    with torch.no_grad():
        ops.gspmm(graph, "u0", [operand(4, 2)])
    assert graph._transposed is None
    ops.gspmm(graph, "u0", [operand(4, 2)]).sum().backward()
    assert graph._transposed is not None


def test_a_plain_sum_keeps_no_features_for_its_backward(graph):
    x = operand(4, 2)
    kept: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        if t.is_floating_point():
            kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ops.spmm(graph, x)
    assert kept == []


# -- modes of torch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no-grad", "inference"]
)
def test_without_gradients_the_results_are_the_same(graph, mode):
    x, e = operand(4, 2), operand(8, 2)
    expected = ops.gspmm(graph, "mul(u0,e1)", [x, e], reduce=["sum", "max"])
    with mode():
        actual = ops.gspmm(graph, "mul(u0,e1)", [x, e], reduce=["sum", "max"])
    assert not any(t.requires_grad for t in actual)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
def test_a_function_of_a_graph_compiles_without_a_break(graph):
    def run(x: Tensor, e: Tensor, scores: Tensor) -> Tensor:
        alpha = ops.edge_softmax(graph, scores)
        total, most = ops.gspmm(graph, "relu(add(u0,e1))", [x, e], reduce=["sum", "max"])
        dots = ops.sddmm(graph, total[:5], x, "dot")
        return (ops.spmm(graph, x, alpha) + total * most).sin().sum() + dots.sum()

    inputs = [operand(4, 3), operand(8, 3), operand(8)]
    expected = torch.autograd.grad(run(*inputs), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), run(*inputs))
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    torch._dynamo.reset()


def test_deterministic_algorithms_are_accepted(graph):
    x = operand(4, 3)
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("cpu", "reference"):
            with use_backend(name):
                torch.autograd.grad(ops.spmm(graph, x, reduce="max").sum(), x)
                torch.autograd.grad(ops.spmm(graph, x).sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_forward_mode_differentiation_is_refused_and_no_tangent_is_dropped(graph):
    import torch.autograd.forward_ad as forward_ad

    x = torch.randn(4, 3)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        ops.spmm(graph, forward_ad.make_dual(x, torch.ones_like(x)))


# -- bad input ------------------------------------------------------------------------------------

BAD = {
    "formula": (lambda g, x: ops.gspmm(g, "mul(u0", [x]), "expected a message formula"),
    "unknown-function": (lambda g, x: ops.gspmm(g, "cosh(u0)", [x]), "unknown function 'cosh'"),
    "reduction": (
        lambda g, x: ops.gspmm(g, "u0", [x], reduce="median"),
        "expected reductions of sum",
    ),
    "no-reduction": (lambda g, x: ops.gspmm(g, "u0", [x], reduce=[]), "expected reductions of sum"),
    "missing-operand": (lambda g, x: ops.gspmm(g, "mul(u0,e1)", [x]), "to use operands 0 to 0"),
    "unused-operand": (lambda g, x: ops.gspmm(g, "u0", [x, x]), "to use operands 0 to 1"),
    "rows": (lambda g, x: ops.gspmm(g, "u0", [x[:3]]), r"operand u0 to have 4 rows \(got"),
    "rows-of-targets": (lambda g, x: ops.gspmm(g, "v0", [x]), "operand v0 to have 5 rows"),
    "rows-of-edges": (lambda g, x: ops.gspmm(g, "e0", [x]), "operand e0 to have 8 rows"),
    "no-dimension": (lambda g, x: ops.gspmm(g, "u0", [x.sum()]), "operand u0 to have 4 rows"),
    "not-a-tensor": (
        lambda g, x: ops.gspmm(g, "u0", [[1, 2]]),
        "operand 0 to be a tensor .got list",
    ),
    "integers": (lambda g, x: ops.gspmm(g, "u0", [x.long()]), "floating-point features"),
    "device": (lambda g, x: ops.gspmm(g, "u0", [x.to("meta")]), "operand u0 on cpu .got meta"),
    "broadcast": (
        lambda g, x: ops.gspmm(g, "mul(u0,v1)", [x, torch.ones(5, 3)]),
        "do not broadcast",
    ),
    "spmm-x": (lambda g, x: ops.spmm(g, x[:, 0]), "expected 'x' to be a tensor"),
    "spmm-weight": (
        lambda g, x: ops.spmm(g, x, torch.ones(7)),
        "expected 'weight' to be a tensor with 8",
    ),
    "spmm-wide-weight": (
        lambda g, x: ops.spmm(g, x[:, :1], torch.ones(8, 2)),
        "no more features than 'x'",
    ),
    "sddmm-op": (
        lambda g, x: ops.sddmm(g, x, x, "pow"),
        "expected 'op' of dot, add, sub, mul, div",
    ),
    "softmax-shape": (
        lambda g, x: ops.edge_softmax(g, torch.ones(8, 2, 2)),
        r"'scores' .*\[E\] or \[E, H\]",
    ),
    "softmax-rows": (lambda g, x: ops.edge_softmax(g, torch.ones(7)), "'scores' .* 8 rows"),
    "softmax-integers": (
        lambda g, x: ops.edge_softmax(g, torch.ones(8).long()),
        "'scores' to be floating",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_value_error_that_names_the_argument(graph, case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call(graph, torch.randn(4, 2))


@pytest.mark.full
def test_integer_features_beside_floating_ones_are_refused_by_name():
    """In a process of its own: kernels that trust such an operand read beyond its end."""
    code = """
import torch
from pyg_accel import Graph, ops
graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]))
try:
    ops.gspmm(graph, "mul(u0,e1)", [torch.randn(2, 2), torch.ones(2, 2).long()])
except ValueError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "operand e1" in ran.stdout


def test_a_call_that_no_backend_can_run_names_every_reason(graph):
    with use_backend("cpu"), pytest.raises(BackendNotSupported, match="sum over the width inside"):
        operands = [torch.randn(4, 2), torch.randn(5, 2)]
        ops.gspmm(graph, "sum(sigmoid(mul(u0,sum(mul(u0,v1)))))", operands, reduce="max")


def test_a_sum_inside_a_message_equals_the_truth(graph):
    x, y = operand(4, 2), operand(5, 2)
    actual = ops.gspmm(graph, "mul(sum(mul(u0,v1)),u0)", [x, y])
    message = (x[EDGES[0]] * y[EDGES[1]]).sum(-1, keepdim=True) * x[EDGES[0]]
    expected = torch.zeros(5, 2, dtype=torch.float64).index_add(0, EDGES[1], message)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sin().sum(), [x, y]),
        torch.autograd.grad(expected.sin().sum(), [x, y]),
    )


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "prod", "none"])
@pytest.mark.parametrize("formula", ["mul(u0,relu(sum(mul(u0,v1))))", "add(u0,sum(mul(u0,v1)))"])
def test_messages_with_a_sum_inside_are_reduced_in_any_way(graph, formula, reduce):
    x, y = operand(4, 2), operand(5, 2)
    results = []
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            out = ops.gspmm(graph, formula, [x, y], reduce=reduce, edge_order=True)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, y])])
    torch.testing.assert_close(*results)


def test_an_operand_is_read_at_one_side():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), (2, 2))
    with pytest.raises(ValueError, match="each operand at one side"):
        ops.gspmm(graph, "sub(u0,v0)", [torch.randn(2, 3)])


SUMS = {
    "exp(sum(mul(u0,v1)))": lambda s, w: s.exp(),
    "mul(sum(mul(u0,v1)),u2)": lambda s, w: s.unsqueeze(-1) * w,
    "div(u2,add(mul(sum(mul(u0,v1)),0.01),9.5))": lambda s, w: w / (0.01 * s.unsqueeze(-1) + 9.5),
    "add(sum(mul(u0,v1)),sum(u2))": lambda s, w: s + w.sum(-1),
}


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("text", SUMS)
def test_sums_inside_of_a_formula_are_over_the_last_dimension(text, heads):
    torch.manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(10, (2, 40)), (10, 10))
    target = torch.repeat_interleave(torch.arange(10), graph.degree.long())
    operands = [torch.randn(10, *heads, 5, dtype=torch.double) for _ in range(3)]
    for t in operands:
        t.requires_grad_()
    u, v, w = operands
    dots = (u[graph.col.long()] * v[target]).sum(-1)
    messages = SUMS[text](dots, w[graph.col.long()])
    expected = messages.new_zeros(10, *messages.shape[1:]).index_add(0, target, messages)
    given = operands if "2" in text else operands[:2]
    got = ops.gspmm(graph, text, given)
    torch.testing.assert_close(got, expected)
    seed = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, given, seed), torch.autograd.grad(expected, given, seed)
    )


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "prod"])
def test_operands_of_constant_pieces_have_gradients_of_zeros(reduce):
    graph = Graph.from_edge_index(EDGES, (5, 5))
    x = torch.randn(5, 3, requires_grad=True)
    y = torch.randn(5, 3, requires_grad=True)
    out = ops.gspmm(graph, "add(sign(u0),v1)", [x, y], reduce=reduce)
    first, second = torch.autograd.grad(out.sum(), [x, y], retain_graph=True)
    assert first.shape == x.shape and not first.any() and second.any()
    out = ops.gspmm(graph, "sign(u0)", [x], reduce=reduce)
    assert not torch.autograd.grad(out.sum(), x)[0].any()
