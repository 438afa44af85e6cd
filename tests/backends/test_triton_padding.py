"""Rows that fill no loads are copied to rows that do. Kernels run interpreted."""

import pytest
import torch

from pyg_accel import ops, use_backend
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.formula import operands_of, parse
from tests.backends.interpreted import INTERPRETED, REASONS, make_graph

pytestmark = INTERPRETED
if not REASONS:
    from pyg_accel.backends.triton import attention, padding, rows, sampled


@pytest.fixture
def copies(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the features that are padded; graphs of any size are worth it."""
    made, pad = [], padding.padded

    def padded(t: torch.Tensor, *size: int) -> torch.Tensor:
        made.append(tuple(t.shape))
        return pad(t, *size)

    monkeypatch.setattr(padding, "LEAST", 0)
    monkeypatch.setattr(padding, "ENTRIES_A_ROW", 0)
    for name in ("_SPARSE", "_DENSE"):
        monkeypatch.setattr(attention, name, 0)
    for module in (padding, sampled):
        monkeypatch.setattr(module, "padded", padded)
    return made


@pytest.mark.each
@pytest.mark.parametrize(  # in half precision several are the largest, and each may win
    ("reduce", "dtype"), [("sum", torch.float32), ("max", torch.float32), ("sum", torch.bfloat16)]
)
@pytest.mark.parametrize(("heads", "width"), [(1, 41), (2, 19), (1, 18)])
@pytest.mark.parametrize("text", ["u0", "mul(u0,e1)", "relu(add(u0,v1))", "div(v0,u1)"])
def test_rows_that_fill_no_loads_are_copied_to_rows_that_do(
    text, reduce, heads, width, dtype, copies
):
    graph = make_graph((0, 3, 40, 1, 7), num_cols=5)
    generator = torch.Generator().manual_seed(1)
    shapes = {"u": (5, heads, width), "v": (5, heads, width), "e": (graph.num_edges, heads, 1)}
    values = [torch.randn(shapes[o.side], generator=generator).to(dtype)
              for o in sorted(operands_of(parse(text)), key=lambda o: o.index)]  # fmt: skip
    actual = []
    for backend in ("triton", "reference"):
        operands = [t.clone().requires_grad_() for t in values]
        with use_backend(backend):
            out = ops.gspmm(graph, text, operands, reduce=reduce)
            out.square().sum().backward()
        actual.append([out.detach(), *(t.grad for t in operands if t.grad is not None)])
        assert out.is_contiguous()
    assert copies
    near = 2e-5 if dtype is torch.float32 else 4e-2
    for ours, right in zip(*actual, strict=True):
        torch.testing.assert_close(ours, right, rtol=near, atol=near * float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_winners_are_padded_to_the_width_of_their_gradients(dtype, copies, monkeypatch):
    graph = make_graph((3, 40, 7), num_cols=5)
    x = torch.stack([torch.randperm(5) for _ in range(41)], 1).to(dtype).requires_grad_()
    make, met = rows.make_plan, []

    def make_plan(outputs, operands, *args, **options):
        met.append({t.shape[2] for t in operands})
        return make(outputs, operands, *args, **options)

    monkeypatch.setattr(rows, "make_plan", make_plan)
    with use_backend("triton"):
        ops.gspmm(graph, "mul(u0,u0)", [x], reduce="max").sum().backward()
    assert (3, 1, 41) in copies
    assert len(met) == 2
    assert all(len(widths) == 1 for widths in met)


def test_rows_are_copied_only_where_loads_are_narrow_and_many(copies, monkeypatch):
    def made(x: torch.Tensor, text: str = "u0", reduce: str = "sum") -> int:
        copies.clear()
        graph = make_graph((4, 40), num_cols=x.size(0))
        with use_backend("triton"):
            ops.gspmm(graph, text, [x], reduce=reduce)
        return len(copies)

    assert made(torch.randn(5, 41)) > 0
    assert made(torch.randn(5, 41)[:, :40]) > 0  # rows begin anywhere
    assert made(torch.randn(5, 40)) == 0
    assert made(torch.randn(5, 7)) > 0
    assert made(torch.randn(5, 1)) == 0  # a weight
    assert made(torch.randn(5, 301)) == 0  # long rows, which are summed as they are
    assert made(torch.randn(5, 301), "relu(u0)") > 0
    assert made(torch.randn(44, 41), "e0") == 0
    assert made(torch.randn(5, 41), reduce="none") == 0
    monkeypatch.setattr(padding, "ENTRIES_A_ROW", 20)
    assert made(torch.randn(5, 43)) == 0


@pytest.mark.each
@pytest.mark.parametrize(
    ("heads", "width", "dtype"), [(1, 41, torch.float64), (2, 11, torch.float32)]
)
@pytest.mark.parametrize(
    ("score", "value", "sides", "copied"),
    [
        ("leaky_relu(add(u1,v2),0.2)", "u0", ["uF", "uH", "vH"], True),
        ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", ["uF", "vF", "vF"], True),
        ("div(sum(mul(v0,u1)),8.0)", "u2", ["vF", "uF", "uF"], True),
        ("sum(mul(v0,add(u1,e2)))", "add(u3,e2)", ["vF", "uF", "eF", "uF"], False),
        # A sum over further columns of zeros would be another one.
        ("sum(exp(mul(v0,u1)))", "u2", ["vF", "uF", "uF"], False),
        ("e1", "mul(u0,e2)", ["uF", "eH", "eH"], True),
    ],
)
def test_attention_over_rows_that_fill_no_loads(
    score, value, sides, copied, heads, width, dtype, copies
):
    graph = make_graph((0, 3, 40, 1, 7), num_cols=5)
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.num_edges}
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(rows[side], heads, width if kind == "F" else 1, generator=generator) / 4
              for side, kind in sides]  # fmt: skip
    actual = []
    for backend in ("triton", "reference"):
        operands = [t.to(dtype, copy=True).requires_grad_() for t in values]
        with use_backend(backend):
            out = ops.attention(graph, score, value, operands)
            out.square().sum().backward()
        assert out.is_contiguous()
        actual.append([out.detach(), *(t.grad for t in operands)])
    near = 2e-5 if dtype is torch.float32 else 1e-12
    for ours, right in zip(*actual, strict=True):
        torch.testing.assert_close(ours, right, rtol=near, atol=near * float(right.abs().max()))
    formulas = [parse(score), parse(value)]
    assert bool(padding.rows_to_pad(formulas, operands, 51, 5)) == copied
    assert copies or not copied


def test_attention_copies_rows_that_many_edges_read(copies, monkeypatch):
    monkeypatch.setattr(attention, "_SPARSE", 4)
    monkeypatch.setattr(attention, "_DENSE", 9)
    graph = make_graph((40, 11), num_cols=5)  # 51 edges, 7 rows: more than 4 of them, less than 9
    x, narrow = torch.randn(5, 1, 41), torch.randn(2, 1, 1)

    def made(score: str, operands: list[torch.Tensor]) -> int:
        copies.clear()
        forget_decisions()
        with use_backend("triton"):
            ops.attention(graph, score, "u0", operands)
        return len(copies)

    assert made("v1", [x, narrow]) > 0
    assert made("v1", [torch.randn(5, 1, 301), narrow]) == 0  # long rows
    assert made("sum(mul(v1,u0))", [x, torch.randn(2, 1, 41)]) == 0  # both sides are copied
    monkeypatch.setattr(attention, "_DENSE", 4)
    assert made("sum(mul(v1,u0))", [x, torch.randn(2, 1, 41)]) > 0


@pytest.mark.parametrize("width", [3, 64])
def test_sums_of_samples_are_taken_of_copied_rows(width, copies):
    graph = make_graph((0, 3, 40, 1, 7))
    x, weight = torch.randn(13, 41), torch.rand(graph.num_edges)
    actual = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            actual.append(ops.sampled_spmm(graph, x, weight, width=width))
    torch.testing.assert_close(*actual)
    assert copies == [(13, 1, 41)]
