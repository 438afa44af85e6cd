"""The Tensor-Core kernels on a GPU, held against float64; skipped where there is none."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import BackendNotSupported, Graph, ops, use_backend
from pyg_accel.backends import get_backend
from pyg_accel.backends.cuda import sddmm, spmm
from pyg_accel.backends.notes import record_choices
from pyg_accel.graph import facts
from pyg_accel.testing import GraphCase, truth, zoo

pytestmark = pytest.mark.gpu

CASES = {case.name: case for case in zoo(hub=17_000)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS = (16, 32, 64)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    if reasons := get_backend("cuda").unavailable_reasons():
        pytest.skip("; ".join(reasons))
    torch.manual_seed(0)
    with use_backend("cuda"):
        yield


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def graph_of(case: GraphCase) -> Graph:
    return Graph.from_edge_index(case.edge_index.cuda(), (case.num_sources, case.num_targets))


def check(actual: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    relative, absolute = get_backend("cuda").tolerance(dtype)
    assert actual.shape == right.shape
    off = (actual.detach().cpu().double() - right).abs() - relative * scale - absolute
    assert not bool((~(off <= 0)).any()), f"off by {float(off.max()):.2e}"


def check_call(
    case: GraphCase, text: str, operands: list[Tensor], reduce: str, dtype: torch.dtype
) -> None:
    """Result and gradients, on the GPU, of operands [rows, H, F] on the CPU."""
    graph = graph_of(case)
    mine = [t.cuda().requires_grad_() for t in operands]
    exact = [t.double().requires_grad_() for t in operands]
    size = [t.detach().double().abs().requires_grad_() for t in operands]
    actual = ops.gspmm(graph, text, mine, reduce=reduce, edge_order=True)
    if reduce == "none":
        actual = actual.unsqueeze(-1)
    right = truth(case, text, exact, reduce)
    scale = truth(case, text, size, reduce)
    check(actual, right.detach(), scale.detach(), dtype)
    grad = torch.randn(actual.shape).to(dtype)
    if not right.requires_grad:  # no edges
        return
    ours = torch.autograd.grad(actual, mine, grad.cuda())
    rights = torch.autograd.grad(right, exact, grad.double(), allow_unused=True)
    scales = torch.autograd.grad(scale, size, grad.double().abs(), allow_unused=True)
    for a, b, s in zip(ours, rights, scales, strict=True):
        check(a, b, s, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_equal_the_truth(case, dtype, precision):
    case = CASES[case]
    edges = case.edge_index.size(1)
    for heads, width in ((1, 33), (3, 16), (1, 1)):
        x = torch.randn(case.num_sources, heads, width).to(dtype)
        for weight in (None, torch.randn(edges, 1, 1), torch.randn(edges, heads, 1)):
            text = "u0" if weight is None else "mul(u0,e1)"
            operands = [x] if weight is None else [x, weight.to(dtype)]
            for reduce in ("sum", "mean"):
                check_call(case, text, operands, reduce, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_dots_equal_the_truth(case, dtype, precision):
    case = CASES[case]
    for heads, width in ((1, 33), (2, 64), (1, 1)):
        x = torch.randn(case.num_sources, heads, width).to(dtype)
        y = torch.randn(case.num_targets, heads, width).to(dtype)
        for text in ("sum(mul(u0,v1))", "sum(mul(v1,u0))"):
            check_call(case, text, [x, y], "none", dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 33, 64, 100, 257, 602])
def test_every_window_width_and_number_of_warps(width, dtype, window, precision):
    exact = precision == "highest"
    for name in ("directed", "bipartite", "hub"):
        case = CASES[name]
        csr = graph_of(case).csr(edge_order=True)
        x, y = torch.randn(case.num_sources, width), torch.randn(case.num_targets, width)
        weight = torch.randn(case.edge_index.size(1))
        x, y, weight = x.to(dtype), y.to(dtype), weight.to(dtype)
        operands = [x.double().unsqueeze(1), weight.double().view(-1, 1, 1)]
        right = truth(case, "mul(u0,e1)", operands, "sum").squeeze(1)
        scale = truth(case, "mul(u0,e1)", [t.abs() for t in operands], "sum").squeeze(1)
        for warps, least in ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (2, 3), (1, 1000)):
            out = spmm.run(csr, x.cuda(), weight.cuda(), window=window, warps=warps, exact=exact,
                           mean=False, least=least)  # fmt: skip
            check(out, right, scale, dtype)
        both = [x.double().unsqueeze(1), y.double().unsqueeze(1)]
        right = truth(case, "sum(mul(u0,v1))", both, "none").flatten()
        scale = truth(case, "sum(mul(u0,v1))", [t.abs() for t in both], "none").flatten()
        for part in (32, 64, 256):
            if part * dtype.itemsize in (64, 128, 256, 512, 1024):
                for least in (1, 2, 1000):
                    out = sddmm.run(csr, y.cuda(), x.cuda(), window=window, slice=part,
                                    exact=exact, least=least)  # fmt: skip
                    check(out, right, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_entries_are_divided_among_both_kinds_of_cores(case, dtype, precision):
    """Sums and means, divided windows and hubs, and not a number where nobody has one."""
    case = CASES[case]
    csr = graph_of(case).csr(edge_order=True)
    x = torch.randn(case.num_sources, 70)
    x[::7, 3], x[1::5, 8] = float("inf"), float("nan")
    weight = torch.rand(case.edge_index.size(1)) + 0.5
    x, weight = x.to(dtype), weight.to(dtype)
    operands = [x.double().unsqueeze(1), weight.double().view(-1, 1, 1)]
    for reduce in ("sum", "mean"):
        right = truth(case, "mul(u0,e1)", operands, reduce).squeeze(1)
        sizes = [t.abs().nan_to_num(1.0, 1.0) for t in operands]
        scale = truth(case, "mul(u0,e1)", sizes, reduce).squeeze(1)
        for window in WINDOWS:
            out = spmm.run(csr, x.cuda(), weight.cuda(), window=window, warps=2, least=2,
                           exact=precision == "highest", mean=reduce == "mean")  # fmt: skip
            assert torch.equal(out.cpu().isnan(), right.isnan())
            assert torch.equal(out.cpu().isinf(), right.isinf())
            fine = right.isfinite()
            check(out.cpu()[fine], right[fine], scale[fine], dtype)


def test_integers_add_up_exactly(precision):
    """Whole numbers leave no room for rounding: no lost edge can hide in a tolerance."""
    for case in CASES.values():
        graph, edges = graph_of(case), case.edge_index.size(1)
        x = torch.randint(-3, 4, (case.num_sources, 19)).float()
        weight = torch.randint(-3, 4, (edges,)).float()
        operands = [x.unsqueeze(1), weight.view(-1, 1, 1)]
        actual = ops.spmm(graph, x.cuda(), weight.cuda(), edge_order=True)
        assert torch.equal(actual.cpu().double(), truth(case, "mul(u0,e1)", operands, "sum")[:, 0])
        actual = ops.spmm(graph, x.cuda())
        assert torch.equal(actual.cpu().double(), truth(case, "u0", operands[:1], "sum")[:, 0])


def test_infinities_and_nan_stay_with_their_neighbours(precision):
    case = CASES["directed"]
    graph = graph_of(case)
    for dtype in DTYPES:
        x = torch.randn(case.num_sources, 1, 20).to(dtype)
        x[3, 0, 2], x[7, 0, 5], x[9, 0, :] = float("inf"), float("nan"), -float("inf")
        weight = torch.rand(case.edge_index.size(1), 1, 1).to(dtype) + 0.5
        right = truth(case, "mul(u0,e1)", [x, weight], "sum")
        operands = [x.cuda(), weight.cuda()]
        actual = ops.gspmm(graph, "mul(u0,e1)", operands, edge_order=True).cpu().double()
        assert torch.equal(actual.isnan(), right.isnan())
        assert torch.equal(actual.isinf(), right.isinf())
        y = torch.randn(case.num_targets, 1, 20).to(dtype)
        right = truth(case, "sum(mul(u0,v1))", [x, y], "none").squeeze(-1)
        operands = [x.cuda(), y.cuda()]
        actual = ops.gspmm(graph, "sum(mul(u0,v1))", operands, reduce="none", edge_order=True)
        assert torch.equal(actual.cpu().isfinite(), right.isfinite())


def test_a_window_that_is_divided_gives_the_same_bits_every_time(monkeypatch, precision):
    monkeypatch.setattr("pyg_accel.backends.cuda.plan.SHORTEST", 1)
    monkeypatch.setattr("pyg_accel.backends.cuda.plan.BLOCKS", 10**6)
    case = CASES["hub"]
    graph = graph_of(case)
    x = torch.randn(case.num_sources, 1, 70)
    weight = torch.randn(case.edge_index.size(1), 1, 1)
    scale = truth(case, "mul(u0,e1)", [x.abs(), weight.abs()], "sum")
    right = truth(case, "mul(u0,e1)", [x, weight], "sum")
    operands = [x.cuda(), weight.cuda()]
    outs = [ops.gspmm(graph, "mul(u0,e1)", operands, edge_order=True) for _ in range(3)]
    check(outs[0], right, scale, torch.float32)
    assert all(torch.equal(outs[0], other) for other in outs[1:])


def test_int64_graphs_and_strided_features():
    case = CASES["directed"]
    narrow = graph_of(case)
    graph = Graph.from_csr(narrow.rowptr.long(), narrow.col.long(), num_cols=narrow.num_cols)
    x = torch.randn(case.num_sources, 130, device="cuda")
    for part in (x[:, 1:65], x[:, ::2], x[:1].expand(case.num_sources, 130), x[:, 64:128]):
        expected = ops.spmm(narrow, part.contiguous())
        assert torch.equal(ops.spmm(graph, part), expected)
        assert torch.equal(ops.spmm(narrow, part), expected)


def test_warm_calls_wait_for_nothing_and_can_be_captured_on_any_stream():
    case = CASES["hub"]
    graph = graph_of(case)
    x = torch.randn(case.num_sources, 64, device="cuda")
    y = torch.randn(case.num_targets, 64, device="cuda")
    weight = torch.randn(graph.num_edges, device="cuda")

    def run() -> list[Tensor]:
        return [ops.spmm(graph, x, weight), ops.sddmm(graph, y, x)]

    expected = run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = torch.cuda.CUDAGraph()
    with torch.cuda.graph(calls):
        captured = run()
    x.mul_(2.0)
    weight.mul_(0.25)  # which eager calls have in another order by now
    calls.replay()
    again = run()
    assert not torch.equal(again[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(captured, again, strict=True))


def test_calls_within_torch_compile():
    case = CASES["directed"]
    graph = graph_of(case).build()
    x = torch.randn(case.num_sources, 40, device="cuda")
    run = torch.compile(lambda x: ops.spmm(graph, x.relu()) * 2, fullgraph=True)
    assert torch.equal(run(x), ops.spmm(graph, x.relu()) * 2)


def test_what_it_cannot_run_it_declines_with_reasons():
    graph = graph_of(CASES["directed"])
    x = torch.randn(graph.num_cols, 8, device="cuda")
    with pytest.raises(BackendNotSupported, match="neither a sum or mean"):
        ops.spmm(graph, x, reduce="max")
    with pytest.raises(BackendNotSupported, match=r"features are torch\.float64"):
        ops.spmm(graph, x.double())
    with pytest.raises(BackendNotSupported, match="neither a sum or mean"):
        ops.spmm(graph, x, torch.randn(graph.num_edges, 8, device="cuda"))


def test_it_is_chosen_for_graphs_that_share_and_are_used_again(monkeypatch):
    """Blocks of 64 nodes, all connected: every fetched row serves 64 of them."""
    monkeypatch.setattr(facts, "_USES_OF_LARGE", 8)
    count = 64 * 300
    node = torch.arange(count, device="cuda")
    block = (node // 64 * 64).unsqueeze(1) + torch.arange(64, device="cuda")
    edges = torch.stack([block.flatten(), node.repeat_interleave(64)])
    graph = Graph.from_edge_index(edges, (count, count)).build()
    other = edges.clone()
    other[0] = torch.randint(count, (other.size(1),), device="cuda")
    shuffled = Graph.from_edge_index(other, (count, count)).build()
    x = torch.randn(count, 256, device="cuda", dtype=torch.bfloat16)
    with use_backend("auto"):
        for which, expected in (
            (graph, {"triton": None, "cuda": None}),
            (shuffled, {"triton": None}),
        ):
            with record_choices() as names:
                for _ in range(12):
                    out = ops.spmm(which, x)
            assert list(names) == list(expected)
        both = Graph.from_edge_index(torch.cat([edges, other], 1), (count, count)).build()
        for _ in range(9):
            out = ops.spmm(both, x)
        with record_choices() as names:
            out = ops.spmm(both, x)
        assert list(names) == ["cuda", "triton"]  # what no other row has is left to CUDA cores
    del out
