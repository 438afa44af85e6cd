"""What is the Triton backend's own: tiles, cut rows, schedules, source. Kernels run interpreted."""

import gc
import inspect
import linecache
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.backends.dispatch import forget_decisions
from pyg_accel.formula import Binary, Const, Operand, Sum, Unary, operands_of, parse
from pyg_accel.runtime.machine import Gpu

BACKEND = get_backend("triton")
REASONS = BACKEND.unavailable_reasons()
pytestmark = [
    pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS)),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not interpreted"),
]
if not REASONS:
    import triton
    import triton.language as tl

    from pyg_accel.backends import schedule
    from pyg_accel.backends.triton import attention, launch, padding, plan, rows, sampled
    from pyg_accel.backends.triton.expression import keeps_zero, per_target
    from pyg_accel.backends.triton.launch import Tile, choose_tile

    @triton.jit
    def product_kernel(out_ptr, number):
        tl.store(out_ptr, number * number)


H200 = ("NVIDIA H200", 60 * 2**20, 132)


def spec(**facts: object) -> OpSpec:
    common = {"op": "gspmm", "device": "cpu", "dtype": torch.float32,
              "num_rows": 10, "num_cols": 10, "num_edges": 50, "heads": 1, "width": 8,
              "formula": "u0", "reduces": ("sum",)}  # fmt: skip
    return OpSpec(**{**common, **facts})


def make_graph(degrees: Sequence[int], num_cols: int = 13) -> Graph:
    rowptr = torch.tensor([0, *degrees]).cumsum(0)
    generator = torch.Generator().manual_seed(0)
    col = torch.randint(num_cols, (int(rowptr[-1]),), generator=generator)
    return Graph.from_csr(rowptr.int(), col.int(), num_cols=num_cols)


def test_interpreted_kernels_are_for_those_who_ask():
    assert choose(spec()).backend.name != "triton"
    with use_backend("triton"):
        assert choose(spec()).backend is BACKEND
    assert BACKEND.not_supported_reasons(spec(device="cuda"))
    assert BACKEND.not_supported_reasons(spec(dtype=torch.complex64)) == [
        "features are torch.complex64"
    ]


def test_an_offset_that_overflows_and_memory_that_is_not_written_are_seen():
    assert torch.empty(3).isnan().all()
    out = torch.zeros(1, dtype=torch.int32)
    product_kernel[(1,)](out, 2**15)
    assert int(out) == 2**30
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow"):
        product_kernel[(1,)](out, 2**16)


TILES = {
    "a-row": (1, 1, 16, 1),
    "a-row-of-lanes": (1, 4, 16, 3),
    "rows": (8, 1, 8, 2),
    "rows-of-lanes": (4, 2, 32, 1),
    "slices": (2, 2, 4, 2),
}


@pytest.fixture(params=TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lanes, columns, unroll = TILES[request.param]
    chosen = Tile(rows, lanes, columns, unroll, split=6, piece=3)
    monkeypatch.setattr(plan, "choose_tile", lambda *_: chosen)
    plan.make_plan.cache_clear()
    yield
    plan.make_plan.cache_clear()


@pytest.mark.one_of(7)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod", "sqsum", "none"])
def test_every_tile_gives_the_same_results_and_gradients(tile, reduce):
    graph = make_graph([0, 1, 5, 6, 7, 0, 2])
    x = torch.randn(13, 2, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(graph.num_edges, 2, 1, dtype=torch.float64, requires_grad=True)
    answers = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            out = ops.gspmm(graph, "mul(u0,e1)", [x, weight], reduce=reduce)
            grads = torch.autograd.grad(out.pow(2).sum(), [x, weight])
            answers.append((out, *grads))
    torch.testing.assert_close(*answers)


@pytest.mark.one_of(11)
@pytest.mark.parametrize(("heads", "width"), [(1, 9), (3, 4), (1, 35), (2, 70)])
def test_every_tile_gives_the_same_dots(tile, heads, width):
    graph = make_graph([0, 1, 5, 6, 7, 0, 2])
    x = torch.randn(13, heads, width, dtype=torch.float64, requires_grad=True)
    y = torch.randn(7, heads, width, dtype=torch.float64, requires_grad=True)
    answers = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            out = ops.gspmm(graph, "sum(mul(u0,v1))", [x, y], reduce="none")
            answers.append((out, *torch.autograd.grad(out.pow(2).sum(), [x, y])))
    torch.testing.assert_close(*answers)


@pytest.mark.one_of(3, 1)
def test_nan_and_infinities_travel_like_the_reference(tile):
    graph = make_graph([1, 6, 10, 2])
    x = torch.randn(13, 1, 5)
    x[3, 0, 0], x[4, 0, 1], x[5, 0, 2], x[:, 0, 3] = float("nan"), torch.inf, -torch.inf, -torch.inf
    for reduce in ("sum", "mean", "max", "min"):
        answers = []
        for backend in ("triton", "reference"):
            leaf = x.clone().requires_grad_()
            with use_backend(backend):
                out = ops.spmm(graph, leaf, reduce=reduce)
                answers.append((out, torch.autograd.grad(out, leaf, torch.ones_like(out))[0]))
        torch.testing.assert_close(*answers, equal_nan=True)


def test_strange_gradients_reach_their_winners():
    grad = torch.tensor([[torch.inf, 1.0, torch.nan], [torch.inf, -torch.inf, 2.0],
                         [-3.0, torch.inf, 1e-30], [5.0, 5.0, 5.0]])  # fmt: skip
    arg = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [-1, -1, -1]], dtype=torch.int32)
    right = get_backend("reference").kernels["scatter_arg"].run(grad, arg, 3)
    found = BACKEND.kernels["scatter_arg"].run(grad, arg, 3)
    torch.testing.assert_close(found, right, equal_nan=True)


def test_scattered_gradients_keep_the_small_beside_the_large():
    grad = torch.tensor([[1.0], [1e-7], [1e-8], [1e-7]])
    arg = torch.tensor([[0], [1], [1], [1]])
    found = BACKEND.kernels["scatter_arg"].run(grad, arg, 2)
    torch.testing.assert_close(found, torch.tensor([[1.0], [2.1e-7]]), rtol=1e-6, atol=0)


SUMS = ["mul(sum(mul(u0,v1)),u0)", "sum(mul(sum(mul(u0,v1)),v1))", "mul(exp(sum(u0)),v1)"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("text", SUMS)
def test_sums_anywhere_in_a_formula(text):
    graph = make_graph([0, 1, 5, 12, 2])
    x = torch.randn(13, 2, 7, dtype=torch.float64).mul_(0.3).requires_grad_()
    y = torch.randn(5, 2, 7, dtype=torch.float64).mul_(0.3).requires_grad_()
    for reduce in ("sum", "max", "none"):
        answers = []
        for backend in ("triton", "reference"):
            with use_backend(backend):
                out = ops.gspmm(graph, text, [x, y], reduce=reduce)
                answers.append((out, *torch.autograd.grad(out.pow(2).sum(), [x, y])))
        torch.testing.assert_close(*answers)


UNARY = ["neg", "abs", "exp", "log", "sqrt", "relu", "sigmoid", "tanh", "softplus", "step", "sign",
         "iszero", "nonzero"]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_every_function_equals_torchs(dtype):
    positive = [0.0, 1e-6, 1e-3, 0.1, 0.126, 0.3, 1.0, 5.0, 30.0, torch.inf]
    values = torch.tensor([*positive, *(-v for v in positive), torch.nan], dtype=dtype)
    graph = Graph.from_csr(torch.arange(22), torch.arange(21), num_cols=21)
    exponents = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.7, 2.0, 3.0, 11.0, 12.0)
    powers = [f"pow(u0,{exponent})" for exponent in exponents]
    for text in [*(f"{op}(u0)" for op in UNARY), *powers, "leaky_relu(u0,0.2)", "div(1.0,u0)"]:
        answers = []
        for backend in ("triton", "reference"):
            with use_backend(backend):
                answers.append(ops.gspmm(graph, text, [values.unsqueeze(1)], reduce="none"))
        relative = 3e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            *answers, rtol=relative, atol=relative, equal_nan=True,
            msg=lambda message, text=text: f"{text}: {message}",
        )  # fmt: skip


def test_long_rows_are_cut_into_pieces_that_cover_them():
    graph = make_graph([3, 100, 0, 64, 65])
    cut = schedule.schedule_of(graph.csr(), 64, 32, ordered=False).pieces
    assert cut.rows.tolist() == [1, 4]
    assert cut.first.tolist() == [0, 4, 7]
    assert cut.row.tolist() == [1] * 4 + [4] * 3
    assert cut.begin.tolist() == [3, 35, 67, 99, 167, 199, 231]
    assert cut.end.tolist() == [35, 67, 99, 103, 199, 231, 232]
    whole = schedule.schedule_of(graph.csr(), 100, 32, ordered=False)
    assert whole.pieces is None


def test_rows_of_like_length_meet_in_a_tile():
    graph = make_graph([1, 30, 1, 30, 0, 2, 2, 1, 1, 1])
    order = schedule.schedule_of(graph.csr(), 64, 32, ordered=True).order
    lengths = graph.degree[order.long()]
    assert sorted(order.tolist()) == list(range(10))
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)


def test_a_schedule_lives_as_long_as_its_graph():
    graph = make_graph([1, 2, 3])
    first = schedule.schedule_of(graph.csr(), 2, 2, ordered=True)
    assert schedule.schedule_of(graph.csr(), 2, 2, ordered=True) is first
    dead = weakref.ref(first)
    del graph, first
    gc.collect()
    assert dead() is None


def test_the_source_of_a_kernel_can_be_read():
    graph = make_graph([1, 2, 3])
    with use_backend("triton"):
        ops.spmm(graph, torch.randn(13, 4))
    sources = [name for name in linecache.cache if name.startswith("<pyg_accel row_kernel")]
    assert any("def row_kernel" in linecache.getline(name, 1) for name in sources)
    assert inspect.cleandoc(launch.choose_tile.__doc__).startswith("Return the tile")


def test_slices_of_the_features_stay_in_the_l2_cache():
    device = Gpu(*H200)
    reddit = choose_tile(device, 232_965, 232_965, 114_615_892, 256, 4, 1, 1, 1)
    assert reddit.rows == 1
    assert 232_965 * 4 * reddit.columns <= device.l2_bytes
    narrow = choose_tile(device, 232_965, 232_965, 114_615_892, 7, 4, 1, 1, 1)
    assert narrow.columns == 8
    molecules = choose_tile(device, 1_889_542, 1_889_542, 3_946_402, 64, 4, 1, 1, 1)
    assert molecules.rows > 1


def test_dots_take_the_whole_width_unless_slices_save_more_traffic_than_they_cause():
    def width(nodes: int, entries: int, columns: int = 256, itemsize: int = 4) -> int:
        device = Gpu(*H200)
        return choose_tile(device, nodes, nodes, entries, columns, itemsize, 1, 1, 1, True).columns

    assert width(169_343, 2_332_486) == 256
    assert width(410_236, 4_878_874) == 256
    assert width(2_449_029, 123_718_280) == 256
    assert 232_965 * 4 * width(232_965, 114_615_892) <= H200[1]
    assert 132_534 * 4 * width(132_534, 79_122_504) <= H200[1]
    assert width(232_965, 114_615_892, columns=7) == 8
    assert width(1000, 5000, columns=602) == 256
    assert width(1000, 5000, columns=602, itemsize=8) == 128


@pytest.mark.one_of(60)
@pytest.mark.parametrize("text", ["u0", "add(u0,v1)", "sum(mul(u0,v1))"])
@pytest.mark.parametrize("reduce", ["sum", "max", "mean max min sqsum", "none"])
@pytest.mark.parametrize("degrees", [(0, 0, 0), (0, 3, 0), (2, 0, 0, 9, 0)], ids=str)
def test_rows_without_entries_are_zero_beside_others(tile, degrees, reduce, text):
    graph = make_graph(degrees)
    x = torch.randn(13, 1, 20, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(degrees), 1, 20, dtype=torch.float64)
    answers = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            outs = ops.gspmm(graph, text, [x, y][: 1 + ("v1" in text)], reduce=reduce.split())
            grad = torch.autograd.grad(sum(o.pow(2).sum() for o in outs), x)[0]
        answers.append([*outs, grad])
    torch.testing.assert_close(*answers)


def test_what_an_absent_edge_contributes_is_known():
    u, v, e = Operand("u", 0), Operand("v", 1), Operand("e", 2)
    assert keeps_zero(Binary("mul", u, e))
    assert keeps_zero(Unary("relu", Binary("add", u, e)))
    assert not keeps_zero(Binary("mul", u, v))  # 0 times an infinity is no zero
    assert not keeps_zero(Unary("exp", u))
    assert not keeps_zero(Const(1.0))


def test_parts_of_the_target_alone_are_found():
    formula = parse("mul(exp(v0),add(u1,neg(v2)))")
    assert [str(part) for part in per_target(formula)] == ["exp(v0)", "neg(v2)"]
    assert list(per_target(parse("mul(sel(v0,v1),u2)"))) == []
    assert isinstance(parse("sum(u0)"), Sum)


def test_second_gradients_equal_those_of_the_reference():
    graph = make_graph([0, 2, 9, 1])
    x = torch.randn(13, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 1, dtype=torch.float64, requires_grad=True)
    answers = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            out = ops.gspmm(graph, "mul(tanh(u0),e1)", [x, weight], reduce="mean")
            first = torch.autograd.grad(out.pow(2).sum(), [x, weight], create_graph=True)
            answers.append(torch.autograd.grad(sum(g.sum() for g in first), [x, weight]))
    torch.testing.assert_close(*answers)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 700])
def test_narrow_rows_are_taken_in_any_order(heads, rows):
    from pyg_accel.backends.triton import gather
    from pyg_accel.backends.triton.sequence import Sequence

    x = torch.randn(max(rows, 1), 2 * heads, 1)[:, :heads]  # rows apart from one another
    order = torch.randint(max(rows, 1), (rows,), dtype=torch.int32)
    sequence = Sequence(1, x.device)
    out = sequence.result((rows, heads, 1), x.dtype)
    kernel, given = gather.gather_of(heads), sequence.operands[0]
    gather.append_to(sequence, kernel, given, x.stride(0), order, out, heads)
    torch.testing.assert_close(sequence([x])[0], x[order.long()], rtol=0, atol=0)


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
    found = []
    for backend in ("triton", "reference"):
        operands = [t.clone().requires_grad_() for t in values]
        with use_backend(backend):
            out = ops.gspmm(graph, text, operands, reduce=reduce)
            out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in operands if t.grad is not None)])
        assert out.is_contiguous()
    assert copies
    near = 2e-5 if dtype is torch.float32 else 4e-2
    for ours, right in zip(*found, strict=True):
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
    found = []
    for backend in ("triton", "reference"):
        operands = [t.to(dtype, copy=True).requires_grad_() for t in values]
        with use_backend(backend):
            out = ops.attention(graph, score, value, operands)
            out.square().sum().backward()
        assert out.is_contiguous()
        found.append([out.detach(), *(t.grad for t in operands)])
    near = 2e-5 if dtype is torch.float32 else 1e-12
    for ours, right in zip(*found, strict=True):
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
    found = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            found.append(ops.sampled_spmm(graph, x, weight, width=width))
    torch.testing.assert_close(*found)
    assert copies == [(13, 1, 41)]


class TestSequence:
    """What the CUDA library is told of launches, without one."""

    @pytest.fixture
    def told(self, monkeypatch):
        from pyg_accel.backends.triton import sequence

        told: list[object] = []
        library = SimpleNamespace(
            add_sequence=lambda arrays, code: told.append((arrays, code)) or self.number,
            remove_sequence=lambda number: None,
            run_sequence=lambda number, operands, sizes: [number, *operands, *sizes],
        )
        monkeypatch.setattr(sequence, "cuda_library", lambda: library)
        monkeypatch.setattr(sequence, "cuda_unavailable_reasons", lambda: [])
        monkeypatch.setattr(sequence, "direct", lambda function: function)
        return told

    number = 5

    def _sequence(self, compiled: object, *numbers: int):
        from pyg_accel.backends.triton.sequence import Kernel, Sequence

        kernel, made = Kernel(None, 4), Sequence(1, torch.device("cuda", 3))
        kernel.compiled = compiled
        out, between = (made.result((2, 3), torch.bfloat16), made.scratch((7,), torch.int64))
        self.array = torch.zeros(4)
        made.launch(kernel, (8, 2), (self.array, None, made.operands[0], out, between, *numbers))
        return made

    compiled = SimpleNamespace(function=99, metadata=SimpleNamespace(shared=64))

    def test_it_is_written_down_as_numbers(self, told):
        assert self._sequence(self.compiled, 6, 7)([torch.ones(1)]) == [5, torch.ones(1)]
        ((arrays, code),) = told
        assert arrays == [self.array]
        # One result; two tensors, of dtypes 15 and 4, not of zeros, of numbers as sizes.
        new = [1, 2, 15, 0, 2, 0, 2, 0, 3, 4, 0, 1, 0, 7]
        grid = [-1, 8, 1, -1, 2, 1, -1, 1, 1]
        arguments = [1, 0, 2, 0, 2, 1, 2, 2, 0, 6, 0, 7]
        assert code == [3, 1, *new, 1, 99, *grid, 128, 64, 6, *arguments]

    def test_what_differs_between_graphs_is_told_in_each_call(self, told):
        from pyg_accel.backends.triton.sequence import Blocks, Kernel, Sequence, Size

        kernel, made = Kernel(None, 4), Sequence(1, torch.device("cuda", 3))
        kernel.compiled = self.compiled
        out = made.result((Size(1), 3), torch.float32, zero=True)
        made.launch(kernel, (Blocks(0, 2, 64), 1), (made.operands[0], out, Size(1)))
        assert made([torch.ones(1)], (100, 4)) == [5, torch.ones(1), 100, 4]
        ((_, code),) = told
        assert code == [3, 1, 1, 1, 6, 1, 2, 1, 1, 0, 3, 1, 99, 0, 2, 64, -1, 1, 1, -1, 1, 1,
                        128, 64, 3, 2, 0, 2, 1, 3, 1]  # fmt: skip

    def test_python_launches_what_is_not_compiled(self, told):
        assert self._sequence(None)._written() is None
        assert told == []

    def test_python_launches_what_the_library_refuses(self, told, monkeypatch):
        monkeypatch.setattr(self.__class__, "number", 0)
        refused = self._sequence(self.compiled)
        assert refused._written() is None
        assert not refused._usual

    @pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
    def test_python_launches_with_long_numbers(self, told, number):
        assert not self._sequence(self.compiled, number)._usual
