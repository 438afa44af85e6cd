"""Attention as one operator: by every backend that has it, and by its parts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.dispatch import forget_decisions, is_fast
from pyg_accel.errors import BackendNotSupported
from pyg_accel.testing import GraphCase, truth, zoo

CASES = {case.name: case for case in zoo(hub=400)}
H, F = 2, 5
# Score, value, and shapes of the operands; `1` rows: the same for all targets; `-`: no gradient.
FORMS = {
    "gat": ("leaky_relu(add(u1,v2),0.2)", "u0", "u.HF u.H v.H"),
    "gatv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", "u.HF v.HF 1.HF"),
    "transformer": ("div(sum(mul(v0,u1)),2.0)", "u2", "v.HF u.HF u.HF"),
    "edges": ("sum(mul(v0,add(u1,e2)))", "mul(add(u3,e2),e4)", "v.HF u.HF e.HF u.HF -.H"),
    "agnn": ("mul(v2,sum(mul(v0,u1)))", "u3", "v.1F u.1F 1.11 u.1F"),
    "supergat": (
        "leaky_relu(mul(add(u0,v1),sigmoid(sum(mul(v2,u3)))),0.2)", "u3", "u.H v.H v.HF u.HF",
    ),
    "given-scores": ("e0", "mul(u1,v2)", "e.H u.HF v.HF"),
    "shared-values": ("add(u0,v1)", "u2", "u.H v.H u.1F"),
    "quotient": ("div(u0,exp(v1))", "div(u2,exp(v1))", "u.H v.H u.HF"),
    "wide-values": ("sum(mul(v0,u1))", "u2", "v.HF u.HF u.HW"),
    "narrow-values": ("sum(mul(v0,u1))", "u2", "v.HF u.HF u.H"),
    "softmax-aggregation": ("add(relu(u0),e1)", "add(relu(u0),e1)", "u.H e.H"),
    "scores-in-values": ("u0", "mul(u0,u1)", "u.H u.HF"),
}  # fmt: skip


@pytest.fixture(params=["reference", "cpu", "triton", "parts"])
def way(request, monkeypatch):
    """How attention is computed: by the operator or by its parts."""
    name = "reference" if request.param == "parts" else request.param
    if reasons := get_backend(name).unavailable_reasons():
        pytest.skip("; ".join(reasons))
    if name == "triton" and torch.cuda.is_available():
        pytest.skip("kernels run on the GPU: see tests/backends/test_attention_gpu.py")
    if name == "triton":  # interpreted, edge by edge
        for case in ("directed", "empty-rows", "bipartite"):
            monkeypatch.setitem(CASES, case, CASES[case].part(3))
    kernels = get_backend(name).kernels
    for op, kernel in kernels.items():
        unfused = request.param == "parts"
        monkeypatch.setitem(
            kernels, op, replace(kernel, prefers_unfused=lambda spec, unfused=unfused: unfused)
        )
    forget_decisions()
    with use_backend(name):
        yield request.param


def make(case: GraphCase, kinds: str, heads: int, width: int) -> list[Tensor]:
    rows = {"u": case.num_sources, "v": case.num_targets, "e": case.edge_index.size(1), "1": 1}
    rows["-"] = rows["e"]
    shapes = {"HF": (heads, width), "H": (heads,), "1F": (1, width), "11": (1, 1),
              "HW": (heads, width + 3)}  # fmt: skip
    return [
        torch.randn(rows[side], *shapes[shape], dtype=torch.float64).requires_grad_(side != "-")
        for side, shape in (kind.split(".") for kind in kinds.split())
    ]


def expanded(case: GraphCase, operands: list[Tensor], kinds: str) -> list[Tensor]:
    return [
        t.expand(case.num_targets, *t.shape[1:]) if kind[0] == "1" else t
        for t, kind in zip(operands, kinds.split(), strict=True)
    ]


def right(case: GraphCase, score: str, value: str, operands: list[Tensor]) -> Tensor:
    """Softmax by hand, target by target."""
    wide = [t.unsqueeze(-1) if t.dim() == 2 else t for t in operands]
    scores, values = (truth(case, text, wide, "none") for text in (score, value))
    heads = max(scores.size(1), values.size(1))
    rows = []
    for node in range(case.num_targets):
        mine = case.edge_index[1] == node
        weights = scores[mine].softmax(0) if bool(mine.any()) else scores[mine]
        rows.append((weights * values[mine]).sum(0).expand(heads, -1))
    return torch.stack(rows) if rows else values.new_zeros(0, heads, values.size(2))


def compare(case, name, heads=H, width=F, dtype=torch.float64, tolerance=1e-9, edge_order=True):
    score, value, kinds = FORMS[name]
    graph = Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))
    operands = make(case, kinds, heads, width)
    if not edge_order:  # what the graph stores is in another order than the edge list
        stored = GraphCase(case.name, case.edge_index[:, graph.perm.long()], *case_sizes(case))
    expected = right(case if edge_order else stored, score, value, expanded(case, operands, kinds))
    leaves = [t for t in operands if t.requires_grad]
    grad = torch.randn(expected.shape, dtype=torch.float64)
    theirs = [None] * len(leaves)  # of a graph without targets
    if expected.requires_grad:
        theirs = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    mine = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in operands]
    inputs = expanded(case, mine, kinds)
    out = ops.attention(graph, score, value, inputs, edge_order=edge_order)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    ours = torch.autograd.grad(out, [t for t in mine if t.requires_grad], grad.to(dtype))
    for actual, good in zip((out, *ours), (expected, *theirs), strict=True):
        good = torch.zeros_like(actual).double() if good is None else good
        scale = max(float(good.detach().abs().max()), 1.0) if good.numel() else 1.0
        torch.testing.assert_close(actual.double(), good, rtol=tolerance, atol=tolerance * scale)


def case_sizes(case: GraphCase) -> tuple[int, int]:
    return case.num_sources, case.num_targets


@pytest.mark.each
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer"])
def test_results_and_gradients_equal_the_truth_on_every_graph(way, name, case):
    compare(CASES[case], name)


@pytest.mark.each
@pytest.mark.parametrize("name", FORMS)
def test_every_form_equals_the_truth(way, name):
    for case in ("directed", "bipartite"):
        compare(CASES[case], name)


@pytest.mark.each
@pytest.mark.parametrize("name", ["gat", "edges", "given-scores"])
def test_operands_in_the_order_of_the_csr(way, name):
    compare(CASES["directed"], name, edge_order=False)


@pytest.mark.each
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (3, 7), (8, 33), (1, 257), (3, 64)])
def test_every_width_equals_the_truth(way, heads, width):
    for name in ("gatv2", "gat"):
        compare(CASES["bipartite"], name, heads, width)


@pytest.mark.each
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)],
    ids=str,
)
def test_narrower_dtypes_stay_close(way, dtype, tolerance):
    for name in ("gat", "gatv2"):
        compare(CASES["bipartite"], name, dtype=dtype, tolerance=tolerance)


def small() -> tuple[Graph, list[Tensor]]:
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 0], [0, 0, 1, 0, 1]]), (3, 3))
    shapes = [(3, 2, 2), (3, 2, 2), (3, 2, 2)]
    return graph, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.each
@pytest.mark.parametrize("name", ["gatv2", "transformer"])
def test_it_can_be_differentiated_twice(way, name):
    graph, operands = small()

    def second(backend: str) -> list[Tensor]:
        torch.manual_seed(3)
        with use_backend(backend):
            out = ops.attention(graph, *FORMS[name][:2], operands)
            first = torch.autograd.grad(out, operands, torch.randn_like(out), create_graph=True)
            total = sum((g * torch.randn_like(g)).sum() for g in first)
            return [out, *first, *torch.autograd.grad(total, operands)]

    ours = second("triton" if way == "triton" else "reference")
    torch.testing.assert_close(ours, second("reference"), rtol=1e-9, atol=1e-9)
    if way != "triton":  # interpreted, it would take a minute
        run = lambda *inputs: ops.attention(graph, *FORMS[name][:2], inputs)  # noqa: E731
        assert torch.autograd.gradcheck(run, operands)
        assert torch.autograd.gradgradcheck(run, operands)


def test_scores_without_any_finite_one_give_nan_as_softmax_does(way):
    graph, (x, *_) = small()
    scores = torch.full((5, 2), float("-inf"), dtype=torch.float64)
    out = ops.attention(graph, "e0", "u1", [scores, x])
    assert out[:2].isnan().all()
    assert (out[2] == 0).all()


def test_large_scores_do_not_overflow(way):
    graph, (x, *_) = small()
    out = ops.attention(graph, "e0", "u1", [torch.full((5, 2), 1e4, dtype=torch.float64), x])
    torch.testing.assert_close(out[0], x[[0, 1, 2]].mean(0))


def test_gradients_of_equal_large_scores_are_those_of_small_ones(way):
    """As of a target all of whose edges are masked: -1e9 + log(4) is -1e9 in float32."""
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]]), (4, 1))
    values, grad, actual = torch.randn(4, H, F), torch.randn(1, H, F), []
    for score in (0.0, -1e9, 1e9):
        operands = [torch.full((4, H), score).requires_grad_(), values.clone().requires_grad_()]
        out = ops.attention(graph, "e0", "u1", operands)
        actual.append((out, *torch.autograd.grad(out, operands, grad)))
    for large in actual[1:]:
        torch.testing.assert_close(large, actual[0])


def test_without_gradients_the_transposed_graph_is_not_made(way):
    graph, operands = small()
    with torch.no_grad():
        ops.attention(graph, *FORMS["gatv2"][:2], operands)
    assert graph._transposed is None


BAD = {
    "wide-score": (("mul(u0,v1)", "u2"), "one score per edge and head"),
    "summed-value": (("sum(mul(u0,v1))", "sum(u2)"), "without sums over the width"),
    "unused": (("u0", "u2"), "operands 0 to 2"),
    "both-sides": (("sum(mul(u0,v1))", "v0"), "one side"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_makes_no_sense_is_refused(name):
    (score, value), message = BAD[name]
    graph, operands = small()
    with pytest.raises(ValueError, match=message):
        ops.attention(graph, score, value, operands)


def test_heads_that_do_not_broadcast_are_refused():
    graph, (x, *_) = small()
    with pytest.raises(ValueError, match="do not broadcast"):
        ops.attention(graph, "u0", "u1", [torch.ones(3, 3, dtype=torch.float64), x])


def spec(op: str, width: int) -> OpSpec:
    shapes = ((2, width), (2, width))
    return OpSpec(op, "cpu", torch.float32, 1, 1, 1, 2, width, "u0",
                  score="sum(mul(u0,v1))", shapes=shapes)  # fmt: skip


def test_who_runs_it_is_a_matter_of_dispatch():
    fast = not get_backend("cpu").unavailable_reasons()
    assert choose(spec("attention", 8)).backend.name == ("cpu" if fast else "reference")
    assert is_fast(spec("attention", 8)) == fast
    with use_backend("triton"):
        wide = get_backend("triton").not_supported_reasons(spec("attention", 1000))
        assert any("1000 features" in reason for reason in wide)
        with pytest.raises(BackendNotSupported):
            choose(spec("attention", 1000))


def test_a_head_too_wide_for_one_program_is_computed_by_the_parts():
    if reasons := get_backend("triton").unavailable_reasons():
        pytest.skip("; ".join(reasons))
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU")
    with use_backend("triton"):
        compare(CASES["one-edge"], "gatv2", 1, 600)


@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "edges"])
def test_the_gradient_of_one_operand_is_that_beside_the_others(way, name):
    score, value, kinds = FORMS[name]
    case = CASES["directed"]
    graph = Graph.from_edge_index(case.edge_index, case_sizes(case))
    operands = [t.detach() for t in make(case, kinds, H, F)]

    def gradients(wanted):
        mine = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(operands)]
        out = ops.attention(graph, score, value, expanded(case, mine, kinds), edge_order=True)
        return torch.autograd.grad(out.square().sum(), [mine[i] for i in wanted])

    every = gradients(range(len(operands)))
    for i, expected in enumerate(every):
        torch.testing.assert_close(gradients([i])[0], expected)


def test_one_tensor_as_two_operands_and_as_the_origin_of_another():
    """With ``create_graph`` as without: the gradient of each operand is its own."""
    graph = Graph.from_edge_index(torch.randint(0, 9, (2, 40)), (9, 9))
    x = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)
    values = x.tanh()
    for operands in ([x, x, x], [x, x, values]):
        grads = [
            torch.autograd.grad(
                ops.attention(graph, "sum(mul(v0,u1))", "u2", operands).square().sum(),
                x, create_graph=create, retain_graph=True,
            )[0]
            for create in (False, True)
        ]  # fmt: skip
        torch.testing.assert_close(grads[1], grads[0])
