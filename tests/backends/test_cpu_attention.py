"""Attention in one pass on the CPU: hubs, threads, instruction sets, and how formulas are split."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import OpSpec, get_backend
from pyg_accel.backends.cpu.stages import compile_stages, stages_reasons
from pyg_accel.backends.dispatch import forget_decisions, is_fast
from pyg_accel.formula import parse
from pyg_accel.runtime.native import cpu_library, cpu_unavailable_reasons

pytestmark = pytest.mark.skipif(
    bool(cpu_unavailable_reasons()), reason="; ".join(cpu_unavailable_reasons())
)

FORMS = {  # score, value, the operands' sides and shapes
    "gat": ("leaky_relu(add(u1,v2),0.2)", "mul(u0,e3)", ["uF", "uH", "vH", "eH"]),
    "gatv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", ["uF", "vF", "1F"]),
    "transformer": ("div(sum(mul(v0,u1)),8.0)", "u2", ["vF", "uF", "uF"]),
    "edges": ("sum(mul(v0,add(u1,e2)))", "mul(add(u3,e2),e4)", ["vF", "uF", "eF", "uF", "eH"]),
}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    ("score", "value", "widths"),
    [
        ("leaky_relu(add(u1,v2),0.2)", "u0", (8, 1, 1)),
        ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", (8,) * 3),
        ("div(sum(mul(v0,u1)),8.0)", "u2", (8,) * 3),
        ("div(sum(mul(v0,u1)),8.0)", "u1", (8,) * 2),
    ],
    ids=["gat", "gatv2", "transformer", "values-are-keys"],
)
def test_attention_runs_in_one_pass(score, value, widths, heads):
    shapes = tuple((heads, width) for width in widths)
    spec = OpSpec("attention", "cpu", torch.float32, 1, 1, 1, *shapes[0], value,
                  shapes=shapes, score=score)  # fmt: skip
    assert is_fast(spec)


def test_formulas_with_kernels_of_their_own_do_not_share_a_pass():
    def spec(*formulas: str) -> OpSpec:
        return OpSpec("gspmm_several", "cpu", torch.float32, 1, 1, 1, 4, 8,
                      reduces=("sum", "none"), shapes=((4, 8), (4, 8), (4, 1)),
                      formulas=formulas)  # fmt: skip

    assert not is_fast(spec("mul(u0,e2)", "sum(mul(u0,v1))"))
    assert is_fast(spec("mul(u0,e2)", "sum(mul(relu(u0),v1))"))


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever dispatch would choose."""
    kernels = get_backend("cpu").kernels
    for op in ("attention", "gspmm_several"):
        fused = replace(kernels[op], prefers_unfused=lambda spec: False)
        monkeypatch.setitem(kernels, op, fused)
    forget_decisions()


def hubs(*longest: int) -> Graph:
    """Unsorted edges, rows of 0 to 20 entries, and two longer than what one task takes at once."""
    torch.manual_seed(0)
    rows = 300
    degree = torch.randint(0, 20, (rows,))
    degree[[7, 200]] = torch.tensor(longest or (4097, 9000))
    row = torch.repeat_interleave(torch.arange(rows), degree)
    edges = torch.stack([torch.randint(0, 250, (row.numel(),)), row])
    return Graph.from_edge_index(edges[:, torch.randperm(row.numel())], (250, rows))


def make(graph: Graph, kinds: list[str], heads: int, width: int) -> list[Tensor]:
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges, "1": 1}
    torch.manual_seed(1)
    return [
        torch.randn(rows[side], heads, width if shape == "F" else 1, dtype=torch.float64)
        for side, shape in kinds
    ]


def run(graph: Graph, name: str, operands: list[Tensor], backend: str) -> list[Tensor]:
    score, value, _ = FORMS[name]
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    inputs = [t.expand(graph.num_rows, -1, -1) if t.size(0) == 1 else t for t in leaves]
    with use_backend(backend):
        out = ops.attention(graph, score, value, inputs, edge_order=True)
        torch.manual_seed(2)
        grad = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(
    name: str, heads: int, width: int, dtype: torch.dtype, tolerance: float, graph: Graph
) -> None:
    operands = make(graph, FORMS[name][2], heads, width)
    ours = run(graph, name, [t.to(dtype) for t in operands], "cpu")
    right = run(graph, name, [t.to(dtype).double() for t in operands], "reference")
    for mine, good in zip(ours, right, strict=True):
        assert mine.dtype == dtype
        error = float((mine.double() - good).abs().max() / good.abs().max())
        assert error <= tolerance, error


@pytest.mark.parametrize("name", FORMS)
def test_hubs_equal_the_truth(one_pass, name):
    compare(name, 3, 20, torch.float64, 1e-11, hubs())


@pytest.mark.one_of(2)
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
    ids=str,
)
def test_every_instruction_set_and_dtype(one_pass, isa, dtype, tolerance):
    facts = dict(item.split("=", 1) for item in cpu_library().info().split(";"))
    if isa not in facts["supported"].split(","):
        pytest.skip(f"this processor or build has no {isa}")
    cpu_library().configure(isa, 0, 0)
    for name in FORMS:
        compare(name, 2, 37, dtype, tolerance, hubs())


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (70, 3), (2, 300), (1, 513), (5, 1)])
def test_heads_and_widths_beyond_a_step(one_pass, heads, width):
    for name in ("gat", "gatv2"):
        compare(name, heads, width, torch.float64, 1e-11, hubs(30, 40))


@pytest.mark.parametrize("name", FORMS)
def test_any_number_of_threads_gives_the_same_bits(one_pass, name):
    graph = hubs()
    operands = [t.float() for t in make(graph, FORMS[name][2], 4, 24)]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(graph, name, operands, "cpu"))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_blocks_of_heads_give_the_same_bits(one_pass):
    graph = hubs()
    operands = [t.float() for t in make(graph, FORMS["transformer"][2], 5, 16)]
    whole = run(graph, "transformer", operands, "cpu")
    cpu_library().configure("", 32, 0)  # two heads at a time
    for mine, good in zip(run(graph, "transformer", operands, "cpu"), whole, strict=True):
        assert torch.equal(mine, good)


def test_infinite_scores_are_those_of_softmax(one_pass):
    graph = Graph.from_csr(torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0, 1, 0, 1]), num_cols=2)
    inf = float("inf")
    scores = torch.tensor([-inf, 1.0, -inf, -inf, float("nan"), 0.0]).view(-1, 1)
    x = torch.tensor([[[1.0]], [[2.0]]])
    with use_backend("cpu"):
        out = ops.attention(graph, "e0", "u1", [scores, x]).flatten()
    assert out[0] == 2.0
    assert out[1:].isnan().all()


def test_a_product_is_split_into_a_number_and_rows():
    shapes = ((2, 8), (2, 1), (2, 8))
    stages = compile_stages((parse("mul(mul(u0,exp(e1)),sum(mul(u0,v2)))"),), ("sum",), shapes)
    assert stages.code[0] == 1  # one sum over the width, and what multiplies u0 is one number
    assert stages.heads == 2
    assert stages.scores == -1


@pytest.mark.parametrize(
    ("formula", "reason"),
    [
        ("mul(u0,relu(sum(mul(v1,sigmoid(mul(u0,sum(mul(u0,v1))))))))", "inside another"),
        ("mul(u0,add(add(add(add(sum(u0),sum(relu(u0))),sum(exp(u0))),"
         "sum(abs(u0))),sum(mul(u0,v1))))", "sums over the width"),
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_do_is_said(formula, reason):
    assert reason in stages_reasons((parse(formula),), ("sum",), ((2, 8), (2, 8)))[0]
