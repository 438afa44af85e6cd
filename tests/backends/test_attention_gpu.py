"""Attention and several formulas at once on a GPU, by the Triton backend against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import get_backend
from pyg_accel.backends.dispatch import forget_decisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

FORMS = {  # score, value, the operands' sides and shapes
    "gat": ("leaky_relu(add(u1,v2),0.2)", "u0", ["uF", "uH", "vH"]),
    "gatv2": ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", ["uF", "vF", "1F"]),
    "transformer": ("div(sum(mul(v0,u1)),8.0)", "u2", ["vF", "uF", "uF"]),
    "edges": ("sum(mul(v0,add(u1,e2)))", "mul(add(u3,e2),e4)", ["vF", "uF", "eF", "uF", "eH"]),
    "agnn": ("mul(v2,sum(mul(v0,u1)))", "u3", ["vF", "uF", "1H", "uF"]),
    "given-scores": ("e0", "mul(u1,v2)", ["eH", "uF", "vF"]),
    "wide-values": ("sum(mul(v0,u1))", "u2", ["vF", "uF", "uW"]),
    "narrow-values": ("sum(mul(v0,u1))", "u2", ["vF", "uF", "uH"]),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def make_graph(kind: str) -> Graph:
    """Unsorted edges; row lengths of the kind that is asked for."""
    torch.manual_seed(0)
    rows = 1500
    degree = {
        "tiny": torch.randint(0, 5, (rows,)),
        "short": torch.randint(0, 40, (rows,)),
        "long": torch.randint(30, 150, (rows,)),
        "hubs": torch.randint(0, 20, (rows,)),
    }[kind]
    if kind == "hubs":
        degree[torch.randperm(rows)[:10]] = torch.randint(1000, 20_000, (10,))
    row = torch.repeat_interleave(torch.arange(rows), degree)
    edges = torch.stack([torch.randint(0, 1100, (row.numel(),)), row])
    return Graph.from_edge_index(edges[:, torch.randperm(row.numel())].cuda(), (1100, rows))


def make_operands(graph: Graph, kinds: list[str], heads: int, width: int) -> list[Tensor]:
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges, "1": 1}
    return [
        torch.randn(rows[side], heads, {"F": width, "W": width + 3, "H": 1}[shape], device="cuda")
        / 2
        for side, shape in kinds
    ]


def run(graph: Graph, name: str, operands: list[Tensor], backend: str) -> list[Tensor]:
    score, value, _ = FORMS[name]
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    inputs = [t.expand(graph.num_rows, -1, -1) if t.size(0) == 1 else t for t in leaves]
    with use_backend(backend):
        out = ops.attention(graph, score, value, inputs, edge_order=True)
        torch.manual_seed(1)
        grad = torch.randn(out.shape, device="cuda", dtype=torch.float32).to(operands[0].dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.fixture(params=["fused", "parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kernels = get_backend("triton").kernels
    for op, kernel in kernels.items():
        unfused = request.param == "parts"
        monkeypatch.setitem(
            kernels, op, replace(kernel, prefers_unfused=lambda spec, unfused=unfused: unfused)
        )
    forget_decisions()
    return str(request.param)


def check(graph: Graph, name: str, heads: int, width: int, dtype: torch.dtype) -> None:
    operands = [t.to(dtype) for t in make_operands(graph, FORMS[name][2], heads, width)]
    for factor in (0.5, -1.0):  # the CUDA library launches from the second call on
        run(graph, name, [t * factor for t in operands], "triton")
    ours = run(graph, name, operands, "triton")
    right = run(graph, name, [t.double() for t in operands], "reference")
    for mine, good in zip(ours, right, strict=True):
        assert mine.dtype == dtype
        error = float((mine.double() - good).abs().max() / good.abs().max().clamp(min=1.0))
        assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("kind", ["tiny", "short", "long", "hubs"])
@pytest.mark.parametrize("name", FORMS)
def test_results_and_gradients_equal_the_truth(way, name, kind):
    check(make_graph(kind), name, 3, 16, torch.float32)


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (8, 7), (1, 33), (2, 257), (4, 64)])
def test_every_width_equals_the_truth(way, heads, width):
    check(make_graph("short"), "gatv2", heads, width, torch.float32)


@pytest.mark.parametrize("width", [10, 41])
@pytest.mark.parametrize("name", ["gat", "gatv2", "transformer", "edges"])
def test_features_that_fill_no_loads_are_copied(name, width, monkeypatch):
    from pyg_accel.backends.triton import attention, padding

    monkeypatch.setattr(padding, "LEAST", 0)
    monkeypatch.setattr(attention, "_DENSE", 0)
    monkeypatch.setattr(attention, "_SPARSE", 0)
    check(make_graph("hubs"), name, 3, width, torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_dtype_equals_the_truth(way, dtype):
    check(make_graph("hubs"), "gatv2", 2, 32, dtype)


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_the_same_bits_in_every_run(way, name):
    graph = make_graph("hubs").build()
    operands = make_operands(graph, FORMS[name][2], 4, 32)
    first, again = (run(graph, name, operands, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
