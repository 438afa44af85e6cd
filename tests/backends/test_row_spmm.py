"""Precompiled reductions of CSR rows, on a GPU and, lane by lane, on a processor.

The truth is that of float64. Row lengths of every class, hubs that are cut, every dtype, index and
reduction, weights of every kind, widths that fill no vectors, features that are not contiguous.
"""

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends.cuda import rows
from pyg_accel.backends.dispatch import record_choices
from pyg_accel.formula import parse

HAS_GPU = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device"))
ON_CPU = pytest.mark.skipif(HAS_GPU or shutil.which("g++") is None,
                            reason="there is a GPU, or no g++")  # fmt: skip
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
WIDTHS = [1, 7, 33, 64, 257]
KINDS = ["tiny", "short", "long", "empty", "hub"]
WEIGHTS = {"none": "u0", "edge": "mul(u0,e1)", "head": "mul(u0,e1)", "source": "mul(u0,u1)",
           "first": "mul(e0,u1)"}  # fmt: skip


@pytest.fixture(params=[pytest.param("cuda", marks=ON_GPU), pytest.param("cpu", marks=ON_CPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        library = request.getfixturevalue("cuda_on_cpu")
        monkeypatch.setattr(rows, "cuda_library", lambda: library)
    return request.param


def make_graph(kind: str, device: str, dtype: torch.dtype) -> Graph:
    n, m = (3000, 2000) if device == "cuda" else (23, 19)
    degree = {
        "tiny": torch.randint(0, 5, (n,)),
        "short": torch.randint(0, 30, (n,)),
        "long": torch.randint(30, 90, (n,)),
        "empty": torch.zeros(n, dtype=torch.int64),
        "hub": torch.randint(0, 9, (n,)),
    }[kind]
    if kind == "hub":
        degree[3], degree[20] = (20_000, 1500) if device == "cuda" else (300, 90)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col = torch.randint(m, (int(rowptr[-1]),))
    perm = torch.randperm(col.numel())
    arrays = [t.to(device, dtype) for t in (rowptr, col, perm)]
    return Graph.trusted(*arrays, m, sorted=False)


def messages(graph: Graph, x: Tensor, weight: Tensor | None, kind: str, eid: Tensor) -> Tensor:
    message = x.double()[graph.col.long()]
    if weight is not None:
        weight = weight.double()
        message = message * (weight[graph.col.long()] if kind == "source" else weight[eid])
    return message


def reduced(graph: Graph, message: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The truth, and the size of what was added up."""
    row = torch.repeat_interleave(graph.degree.long())
    out = message.new_zeros(graph.num_rows, *message.shape[1:])
    if reduce in ("sum", "mean"):
        size = out.index_add(0, row, message.abs())
        out = out.index_add(0, row, message)
        if reduce == "mean":
            share = graph.degree.clamp(min=1).double()[:, None, None]
            out, size = out / share, size / share
        return out, size
    how = {"max": "amax", "min": "amin"}[reduce]
    index = row[:, None, None].expand_as(message)
    out = out.scatter_reduce(0, index, message, how, include_self=False)
    return out, out.abs()


def run(graph: Graph, edge_order: bool, text: str, operands: list[Tensor], reduce: str,
        winners: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """By the kernel alone, of operands as they are in memory."""
    csr = graph.csr(edge_order=edge_order)
    like = [t.contiguous() for t in operands]
    launch = rows._bind(csr, parse(text), like, [reduce], want_arg=winners)(csr)
    outs = launch.bound()(*operands)
    return (outs,) if isinstance(outs, Tensor) else tuple(outs)


def layouts(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype)

    *lead, last = shape
    return {
        "contiguous": random(*shape),
        "rows apart": random(*lead, last + 3)[..., :last],
        "unaligned": random(*lead, last + 1)[..., 1:],
        "turned": random(*reversed(shape)).permute(*reversed(range(len(shape)))),
        "expanded": random(1, *shape[1:]).expand(shape),
    }


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_reduced(device, kind, index, dtype, weights):
    graph = make_graph(kind, device, index)
    entries, last = graph.num_edges, 0
    for width in WIDTHS:
        for reduce in ("sum", "mean", "max", "min"):
            last += 1
            if device == "cpu" and (last + KINDS.index(kind)) % 4:
                continue  # lanes that take turns are slow
            heads, edge_order = (1, 3)[last % 2], last % 3 > 0
            names = list(layouts((1, 1), dtype, device))
            x = layouts((graph.num_cols, heads, width), dtype, device)[names[last % len(names)]]
            weight = None
            if weights != "none":
                count = graph.num_cols if weights == "source" else entries
                size = (count, heads if weights in ("head", "source") else 1, 1)
                weight = layouts(size, dtype, device)[names[last % 3]]
            operands = [x] if weight is None else [x, weight]
            if weights == "first":
                operands.reverse()
            eid = graph.perm.long() if edge_order else torch.arange(entries, device=device)
            message = messages(graph, x, weight, weights, eid)
            right, size = reduced(graph, message, reduce)
            for winners in (False, True) if reduce in ("max", "min") else (False,):
                out, *found = run(graph, edge_order, WEIGHTS[weights], operands, reduce, winners)
                assert out.shape == right.shape and out.dtype == dtype
                # Rounding adds up over the entries of a row whose terms have one sign.
                terms = 1 + graph.degree.double()[:, None, None] / 1000
                error = (out.double() - right).abs() - DTYPES[dtype] * size * terms
                assert not bool((error > 1e-6).any()), (width, heads, reduce, winners)
                if winners:
                    check_winners(graph, found[0], out, x, message, eid, weights)


def check_winners(
    graph: Graph, winner: Tensor, out: Tensor, x: Tensor, message: Tensor, eid: Tensor, kind: str
) -> None:
    assert winner.dtype == graph.col.dtype
    assert bool((winner[graph.degree == 0] == -1).all())
    assert bool((winner[graph.degree > 0] >= 0).all())
    if not graph.num_edges:
        return
    values = message[torch.argsort(eid)] if kind != "none" else x.double()
    there = values.gather(0, winner.clamp(min=0).long())
    there = torch.where(winner < 0, 0, there)
    torch.testing.assert_close(there.to(out.dtype), out, rtol=DTYPES[out.dtype], atol=1e-6)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("kind", ["tiny", "long", "hub"])
def test_the_first_of_equal_extremes_wins_and_nan_wins_over_all(device, kind, reduce):
    graph = make_graph(kind, device, torch.int32)
    row = torch.repeat_interleave(graph.degree.long())
    position = torch.arange(graph.num_edges, device=device)
    first = torch.full((graph.num_rows,), graph.num_edges, device=device)
    for value in (1.0, -torch.inf, torch.inf, torch.nan):
        x = torch.full((graph.num_cols, 1, 5), value, device=device)
        weight = torch.ones(graph.num_edges, 1, 1, device=device)
        out, winner = run(graph, False, "mul(u0,e1)", [x, weight], reduce, True)
        some = graph.degree > 0
        assert bool((out[some] == value).all()) or (
            value != value and bool(out[some].isnan().all())
        )
        right = first.scatter_reduce(0, row, position, "amin")
        assert torch.equal(winner[some][..., 0, 0].long(), right[some])
    x = torch.randn(graph.num_cols, 1, 5, device=device)
    x[graph.col[-1].long()] = torch.nan
    (out,) = run(graph, False, "u0", [x], reduce, False)
    right, _ = reduced(graph, x.double()[graph.col.long()], reduce)
    assert torch.equal(out.isnan(), right.isnan())


def test_results_are_the_same_in_every_run(device):
    graph = make_graph("hub", device, torch.int32)
    x = torch.randn(graph.num_cols, 2, 33, device=device)
    weight = torch.randn(graph.num_edges, 2, 1, device=device)
    first, again = (run(graph, True, "mul(u0,e1)", [x, weight], "sum", False) for _ in range(2))
    assert torch.equal(first[0], again[0])


def test_what_does_not_fit_is_told(device):
    graph = make_graph("tiny", device, torch.int32)
    x, weight = (torch.randn(n, 4, device=device) for n in (graph.num_cols, graph.num_edges))
    csr, weight = graph.csr(), weight[:, :1]
    operands = [x.unsqueeze(1), weight.unsqueeze(1)]
    call: Callable[..., Tensor] = rows._bind(
        csr, parse("mul(u0,e1)"), operands, ["sum"], want_arg=False
    )(csr).bound()
    for wrong in ((x[1:], weight), (x, weight[1:]), (x.double(), weight), (x, weight.half())):
        with pytest.raises(RuntimeError, match="expected"):
            call(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
class TestOnGpu:
    """What users call, on a GPU."""

    @pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
    @pytest.mark.parametrize("weights", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_are_those_of_the_reference(self, kind, weights, reduce):
        graph = make_graph(kind, "cuda", torch.int32)
        x = torch.randn(graph.num_cols, 2, 7, device="cuda")
        weight = torch.randn(graph.num_edges, 2, device="cuda") if weights else None
        seed = torch.randn(graph.num_rows, 2, 7, device="cuda")
        answers = []
        for name, wide in (("auto", x), ("reference", x.double())):
            leaves = [wide.clone().requires_grad_()]
            if weight is not None:
                leaves.append(weight.to(wide.dtype).requires_grad_())
            with use_backend(name), record_choices() as chosen:
                out = ops.spmm(graph, *leaves, reduce=reduce, edge_order=True)
                grads = torch.autograd.grad(out, leaves, seed.to(out.dtype))
            assert name != "auto" or "cuda_rows" in chosen
            answers.append((out.detach(), *grads))
        for mine, right in zip(*answers, strict=True):
            assert mine.shape == right.shape
            if right.numel():
                scale = right.abs().max().clamp(min=1.0)
                assert float(((mine.double() - right).abs() / scale).max()) < 2e-5

    def test_no_call_waits_for_the_device_and_all_can_be_captured(self):
        graph = make_graph("hub", "cuda", torch.int32)
        x = torch.randn(graph.num_cols, 33, device="cuda", requires_grad=True)
        seed = torch.ones((), device="cuda").expand(graph.num_rows, 33)

        def step() -> Tensor:
            (grad,) = torch.autograd.grad(ops.spmm(graph, x, reduce="max"), x, seed)
            return grad + torch.autograd.grad(ops.spmm(graph, x), x, seed)[0]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            right = [step() for _ in range(3)][-1]
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = step()
        captured.replay()
        torch.testing.assert_close(found, right)

    def test_the_gradient_of_a_sum_is_read_right(self):
        graph = make_graph("short", "cuda", torch.int32)
        x = torch.randn(graph.num_cols, 33, device="cuda", requires_grad=True)
        (grad,) = torch.autograd.grad(ops.spmm(graph, x).sum(), x)
        ends = torch.bincount(graph.col.long(), minlength=graph.num_cols).float()
        torch.testing.assert_close(grad, ends[:, None].expand_as(x))

    def test_wide_work_on_rows_that_fill_no_vectors(self):
        """So much of it that features are copied to rows that do."""
        rowptr = torch.arange(0, 40_001 * 32, 32, device="cuda", dtype=torch.int32)
        col = torch.randint(40_000, (40_000 * 32,), device="cuda", dtype=torch.int32)
        graph = Graph.from_csr(rowptr, col, num_cols=40_000)
        for shape in ((41,), (3, 41)):
            x = torch.randn(40_000, *shape, device="cuda")
            weight = torch.rand(graph.num_edges, *shape[:-1], device="cuda")
            message = x.double()[col.long()] * weight.double()[..., None].reshape(
                graph.num_edges, *shape[:-1], 1
            )
            right = message.view(40_000, 32, *shape).sum(1)
            torch.testing.assert_close(ops.spmm(graph, x, weight).double(), right, rtol=1e-4,
                                       atol=1e-4)  # fmt: skip
