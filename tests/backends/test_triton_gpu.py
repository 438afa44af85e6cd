"""The Triton backend on a GPU: values, gradients, and how it behaves in a stream."""

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.graph.facts import expect_to_stay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

FORMULAS = {
    "copy": ("u0", "u"),
    "weight": ("mul(u0,e1)", "ue"),
    "gine": ("relu(add(u0,e1))", "ue"),
    "gated": ("mul(sigmoid(add(v0,u1)),u2)", "vuu"),
    "everything": ("div(softplus(tanh(u0)),exp(pow(leaky_relu(v1,0.2),2.0)))", "uv"),
    "dot": ("sum(mul(u0,v1))", "uv"),
    "weighted-by-a-dot": ("mul(sum(mul(u0,v1)),u2)", "uvu"),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def make_graph(kind: str, index_dtype: torch.dtype = torch.int32) -> Graph:
    """Random columns; row lengths of the kind that is asked for."""
    torch.manual_seed(0)
    rows = 3000
    degree = {
        "tiny": torch.randint(0, 5, (rows,)),
        "short": torch.randint(0, 40, (rows,)),
        "long": torch.randint(30, 90, (rows,)),
        "hubs": torch.randint(0, 20, (rows,)),
    }[kind]
    if kind == "hubs":
        degree[torch.randperm(rows)[:30]] = torch.randint(100, 20_000, (30,))
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    row = torch.repeat_interleave(torch.arange(rows), degree)
    col = torch.randint(0, 2000, (int(rowptr[-1]),))
    col = col[torch.argsort(row * 2000 + col)]
    return Graph.from_csr(rowptr.to("cuda", index_dtype), col.to("cuda", index_dtype),
                          num_cols=2000)  # fmt: skip


def make_operands(graph: Graph, sides: str, width: int, dtype: torch.dtype) -> list[Tensor]:
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
    return [torch.randn(rows[side], width, device="cuda").to(dtype) for side in sides]


def both(
    graph: Graph, text: str, operands: list[Tensor], reduce: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients by the Triton backend, and in float64 by the reference.

    Kernels are compiled in a first call, and launched by the CUDA library from then on.
    """
    answers = []
    for backend, factor in (*[("triton", f) for f in (3.0, -2.0, 1.0)], ("reference", 1.0)):
        wide = [t.double() if backend == "reference" else t * factor for t in operands]
        leaves = [t.detach().clone().requires_grad_() for t in wide]
        with use_backend(backend):
            out = ops.gspmm(graph, text, leaves, reduce=reduce)
            torch.manual_seed(1)
            grad = torch.randn(out.shape, device="cuda").to(operands[0].dtype)
            grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
        answers.append([out.detach(), *[g for g in grads if g is not None]])
    return answers[-2], answers[-1]


def check(ours: list[Tensor], right: list[Tensor], dtype: torch.dtype, terms: float) -> None:
    assert len(ours) == len(right)
    for mine, good in zip(ours, right, strict=True):
        assert mine.dtype == dtype
        scale = good.abs().max().clamp(min=1.0) * max(terms, 1.0)
        error = (mine.double() - good).abs().max() / scale
        assert float(error) <= TOLERANCE[dtype], float(error)


def test_a_call_may_bring_operands_at_any_address():
    graph, (text, _) = make_graph("hubs"), FORMULAS["gine"]
    rows, edges, width = graph.num_cols, graph.num_edges, 16
    memory = torch.randn(rows * width + 4, device="cuda"), torch.randn(edges, width, device="cuda")
    for offset in (0, 0, 0, 1, 4, 0):
        x = memory[0][offset : offset + rows * width].view(rows, width)
        with use_backend("triton"):
            ours = ops.gspmm(graph, text, [x, memory[1]])
        with use_backend("reference"):
            right = ops.gspmm(graph, text, [x.double(), memory[1].double()])
        check([ours], [right], torch.float32, 1)


def test_later_calls_are_launched_by_the_library():
    graph, (text, sides) = make_graph("hubs"), FORMULAS["gine"]
    operands = make_operands(graph, sides, 64, torch.float32)
    with use_backend("triton"), expect_to_stay():
        for _ in range(3):
            ops.gspmm(graph, text, operands)
        with torch.profiler.profile() as profile:
            ops.gspmm(graph, text, operands)
    assert any("run_sequence" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("kind", ["tiny", "short", "long", "hubs"])
@pytest.mark.parametrize("name", ["weight", "gated", "dot"])
def test_every_division_of_rows_equals_the_truth(kind, name):
    graph, (text, sides) = make_graph(kind), FORMULAS[name]
    for width in (33, 64):
        operands = make_operands(graph, sides, width, torch.float32)
        reduce = "none" if name == "dot" else "sum"
        check(*both(graph, text, operands, reduce), torch.float32, 1)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_equals_the_truth(name, dtype):
    graph, (text, sides) = make_graph("short"), FORMULAS[name]
    operands = make_operands(graph, sides, 40, dtype)
    reduce = "none" if name == "dot" else "sum"
    check(*both(graph, text, operands, reduce), dtype, 4 if dtype.itemsize == 2 else 1)


@pytest.mark.parametrize("reduce", ["mean", "max", "min", "prod", "sqsum", "none"])
@pytest.mark.parametrize("kind", ["tiny", "hubs"])
def test_every_reduction_equals_the_truth(reduce, kind):
    if reduce == "prod" and kind == "hubs":
        pytest.skip("a product of thousands of numbers is 0 or infinite")
    graph = make_graph(kind)
    for text, sides in (FORMULAS["copy"], FORMULAS["weight"]):
        operands = make_operands(graph, sides, 20, torch.float64)
        check(*both(graph, text, operands, reduce), torch.float64, 1)


@pytest.mark.parametrize("width", [1, 7, 100, 257, 602])
def test_every_width_equals_the_truth(width):
    graph = make_graph("short")
    for name in ("weight", "dot"):
        text, sides = FORMULAS[name]
        operands = make_operands(graph, sides, width, torch.float32)
        check(*both(graph, text, operands, "none" if name == "dot" else "sum"), torch.float32, 1)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_heads_equal_the_truth(heads):
    graph = make_graph("hubs", torch.int64)
    x = torch.randn(2000, heads, 16, device="cuda")
    weight = torch.randn(graph.num_edges, heads, 1, device="cuda")
    check(*both(graph, "mul(u0,e1)", [x, weight], "sum"), torch.float32, 1)
    y = torch.randn(3000, heads, 16, device="cuda")
    check(*both(graph, "sum(mul(u0,v1))", [x, y], "none"), torch.float32, 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_edge_softmax_equals_the_truth(dtype):
    for kind, heads in (("tiny", 1), ("hubs", 3)):
        graph = make_graph(kind)
        scores = (torch.randn(graph.num_edges, heads, device="cuda") * 5).to(dtype)
        seed = (torch.arange(scores.numel(), device="cuda") % 3).view_as(scores)
        answers = []
        for backend in ("triton", "reference"):
            leaf = (scores.double() if backend == "reference" else scores).clone().requires_grad_()
            with use_backend(backend):
                out = ops.edge_softmax(graph, leaf)
                grad = torch.autograd.grad(out, leaf, seed.to(out.dtype))[0]
            answers.append([out.detach(), grad])
        check(*answers, dtype, 1)


def test_several_reductions_and_winners_in_one_pass():
    graph = make_graph("hubs")
    x = torch.randn(2000, 50, device="cuda", requires_grad=True)
    reduces = ["mean", "max", "min", "sqsum"]
    with use_backend("triton"):
        together = ops.spmm(graph, x, reduce=reduces)
        alone = [ops.spmm(graph, x, reduce=reduce) for reduce in reduces]
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a, b)
        grads = [torch.autograd.grad(sum(o.pow(2).sum() for o in outs), x)[0]
                 for outs in (together, alone)]  # fmt: skip
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-3)


def test_results_are_the_same_in_every_run(monkeypatch):
    """From the first run on; without the mode, rows of a graph are cut when it is used again."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    graph = make_graph("hubs")
    x = torch.randn(2000, 64, device="cuda", requires_grad=True)
    weight = torch.randn(graph.num_edges, device="cuda", requires_grad=True)
    runs = []
    for _ in range(3):
        with use_backend("triton"):
            out = ops.spmm(graph, x, weight)
            best = ops.spmm(graph, x, reduce="max")
            grads = torch.autograd.grad((out * best).sum(), [x, weight])
        runs.append([out, best, *grads])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_warm_calls_wait_for_nothing_and_can_be_captured():
    graph = make_graph("hubs")
    x = torch.randn(2000, 64, device="cuda")
    weight = torch.randn(graph.num_edges, device="cuda")

    def run() -> list[Tensor]:
        with use_backend("triton"):
            return [
                ops.spmm(graph, x, weight),
                ops.spmm(graph, x, reduce="max"),
                ops.sddmm(graph, x[:1].expand(3000, 64), x),
                ops.edge_softmax(graph, weight),
            ]

    expected = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph_of_calls = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph_of_calls):
        captured = run()
    x.mul_(2.0)
    graph_of_calls.replay()
    again = run()
    assert not torch.equal(again[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(captured, again, strict=True))


def test_strided_operands_are_read_where_they_lie():
    graph = make_graph("short")
    wide = torch.randn(2000, 101, device="cuda")
    for x in (wide[:, 1:65], wide[:, ::2], wide[:1].expand(2000, 101), wide[:, 3:40].t().t()):
        with use_backend("triton"):
            out, plain = (ops.spmm(graph, t) for t in (x, x.contiguous()))
        torch.testing.assert_close(out, plain)


def test_offsets_beyond_32_bits():
    rows, width = 600_000, 64
    degree = 60
    rowptr = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * degree
    col = torch.randint(0, 1000, (rows * degree,), device="cuda", dtype=torch.int32)
    graph = Graph.from_csr(rowptr, col.view(rows, degree).sort(1).values.flatten(), num_cols=1000)
    x = torch.randn(1000, width, device="cuda", dtype=torch.bfloat16)
    with use_backend("triton"):
        messages = ops.gspmm(graph, "u0", [x], reduce="none")
        assert messages.numel() > 2**31
        tail = graph.col[-1000:].long()
        assert torch.equal(messages[-1000:], x[tail])
        back = ops.gspmm(graph, "e0", [messages], reduce="sum")
    right = x[graph.col[-degree:].long()]
    torch.testing.assert_close(back[-1].float(), right.float().sum(0), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("reduce", "dtype"), [("sum", torch.float32), ("max", torch.float32),
                                              ("mean", torch.bfloat16)])  # fmt: skip
def test_features_that_fill_no_loads_are_copied(reduce, dtype, monkeypatch):
    from pyg_accel.backends.triton import padding

    copies, padded = [], padding.padded
    monkeypatch.setattr(padding, "padded", lambda *t: copies.append(t) or padded(*t))
    generator = torch.Generator("cuda").manual_seed(0)
    edge_index = torch.randint(5000, (2, 1_000_000), device="cuda", generator=generator)
    graph = Graph.from_edge_index(edge_index, (5000, 5000)).build()
    (x,) = make_operands(graph, "u", 41, dtype)
    with use_backend("triton"):
        actual = ops.gspmm(graph, "u0", [x], reduce=reduce)
    assert copies
    right = torch.zeros(5000, 41, dtype=torch.float64, device="cuda")
    target = edge_index[1].unsqueeze(1).expand(-1, 41)
    right.scatter_reduce_(0, target, x.double()[edge_index[0]],
                          {"max": "amax"}.get(reduce, reduce), include_self=False)  # fmt: skip
    torch.testing.assert_close(actual.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
