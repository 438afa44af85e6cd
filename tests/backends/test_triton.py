"""What is the Triton backend's own: tiles, cut rows, schedules, source. Kernels run interpreted."""

import gc
import inspect
import linecache
import weakref
from typing import Any

import pytest
import torch

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import OpSpec, choose, get_backend
from pyg_accel.formula import Binary, Const, Operand, Sum, Unary, parse
from pyg_accel.runtime.machine import Gpu
from tests.backends.interpreted import BACKEND, INTERPRETED, REASONS, make_graph, same_on_both

pytestmark = INTERPRETED
if not REASONS:
    import triton
    import triton.language as tl

    from pyg_accel.backends import schedule
    from pyg_accel.backends.triton import launch, plan
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

    def run() -> Any:
        out = ops.gspmm(graph, "mul(u0,e1)", [x, weight], reduce=reduce)
        grads = torch.autograd.grad(out.pow(2).sum(), [x, weight])
        return (out, *grads)

    same_on_both(run)


@pytest.mark.one_of(11)
@pytest.mark.parametrize(("heads", "width"), [(1, 9), (3, 4), (1, 35), (2, 70)])
def test_every_tile_gives_the_same_dots(tile, heads, width):
    graph = make_graph([0, 1, 5, 6, 7, 0, 2])
    x = torch.randn(13, heads, width, dtype=torch.float64, requires_grad=True)
    y = torch.randn(7, heads, width, dtype=torch.float64, requires_grad=True)

    def run() -> Any:
        out = ops.gspmm(graph, "sum(mul(u0,v1))", [x, y], reduce="none")
        return (out, *torch.autograd.grad(out.pow(2).sum(), [x, y]))

    same_on_both(run)


@pytest.mark.one_of(3, 1)
def test_nan_and_infinities_travel_like_the_reference(tile):
    graph = make_graph([1, 6, 10, 2])
    x = torch.randn(13, 1, 5)
    x[3, 0, 0], x[4, 0, 1], x[5, 0, 2], x[:, 0, 3] = float("nan"), torch.inf, -torch.inf, -torch.inf
    for reduce in ("sum", "mean", "max", "min"):

        def run(reduce: str = reduce) -> Any:
            leaf = x.clone().requires_grad_()
            out = ops.spmm(graph, leaf, reduce=reduce)
            return (out, torch.autograd.grad(out, leaf, torch.ones_like(out))[0])

        same_on_both(run, equal_nan=True)


def test_strange_gradients_reach_their_winners():
    grad = torch.tensor([[torch.inf, 1.0, torch.nan], [torch.inf, -torch.inf, 2.0],
                         [-3.0, torch.inf, 1e-30], [5.0, 5.0, 5.0]])  # fmt: skip
    arg = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [-1, -1, -1]], dtype=torch.int32)
    right = get_backend("reference").kernels["scatter_arg"].run(grad, arg, 3)
    actual = BACKEND.kernels["scatter_arg"].run(grad, arg, 3)
    torch.testing.assert_close(actual, right, equal_nan=True)


def test_scattered_gradients_keep_the_small_beside_the_large():
    grad = torch.tensor([[1.0], [1e-7], [1e-8], [1e-7]])
    arg = torch.tensor([[0], [1], [1], [1]])
    actual = BACKEND.kernels["scatter_arg"].run(grad, arg, 2)
    torch.testing.assert_close(actual, torch.tensor([[1.0], [2.1e-7]]), rtol=1e-6, atol=0)


SUMS = ["mul(sum(mul(u0,v1)),u0)", "sum(mul(sum(mul(u0,v1)),v1))", "mul(exp(sum(u0)),v1)"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("text", SUMS)
def test_sums_anywhere_in_a_formula(text):
    graph = make_graph([0, 1, 5, 12, 2])
    x = torch.randn(13, 2, 7, dtype=torch.float64).mul_(0.3).requires_grad_()
    y = torch.randn(5, 2, 7, dtype=torch.float64).mul_(0.3).requires_grad_()
    for reduce in ("sum", "max", "none"):

        def run(reduce: str = reduce) -> Any:
            out = ops.gspmm(graph, text, [x, y], reduce=reduce)
            return (out, *torch.autograd.grad(out.pow(2).sum(), [x, y]))

        same_on_both(run)


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

    def run() -> Any:
        outs = ops.gspmm(graph, text, [x, y][: 1 + ("v1" in text)], reduce=reduce.split())
        grad = torch.autograd.grad(sum(o.pow(2).sum() for o in outs), x)[0]
        return [*outs, grad]

    same_on_both(run)


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

    def run() -> Any:
        out = ops.gspmm(graph, "mul(tanh(u0),e1)", [x, weight], reduce="mean")
        first = torch.autograd.grad(out.pow(2).sum(), [x, weight], create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in first), [x, weight])

    same_on_both(run)
