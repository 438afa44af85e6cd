"""Which attention is the Tensor Cores' and when, without a GPU; its numbers, with one."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import AGNNConv, TransformerConv

import pyg_accel
from pyg_accel import Graph, ops, use_backend
from pyg_accel.backends import OpSpec, get_backend
from pyg_accel.backends.cuda.attention import DotAttention, dot_attention
from pyg_accel.backends.cuda.choice import attention_ratio
from pyg_accel.backends.dispatch import forget_decisions, record_choices
from pyg_accel.column_reuse import Shared
from pyg_accel.formula import parse

WIDE, ONE = (2, 64), (2, 1)


@pytest.mark.parametrize(
    ("score", "value", "shapes", "expected"),
    [
        ("div(sum(mul(v0,u1)),8.0)", "u2", (WIDE,) * 3, DotAttention(0, 1, 2, None, 0.125)),
        ("mul(v2,sum(mul(u1,v0)))", "u3", (WIDE, WIDE, ONE, WIDE), DotAttention(0, 1, 3, 2, 1.0)),
        ("neg(mul(sum(mul(v0,u1)),2.0))", "u1", (WIDE, WIDE), DotAttention(0, 1, 1, None, -2.0)),
        ("sum(mul(v0,u1))", "mul(u2,e3)", (WIDE, WIDE, WIDE, ONE), None),  # dropout
        ("sum(mul(leaky_relu(add(v1,u0),0.2),v2))", "u0", (WIDE,) * 3, None),
        ("leaky_relu(add(u1,v2),0.2)", "u0", (WIDE, ONE, ONE), None),
        ("add(sum(mul(v0,u1)),e3)", "u2", (WIDE, WIDE, WIDE, ONE), None),
        ("mul(sum(mul(v0,u1)),sum(mul(v2,u3)))", "u4", (WIDE,) * 5, None),
        ("mul(sum(mul(v0,u1)),u3)", "u2", (WIDE, WIDE, WIDE, ONE), None),
        ("sum(mul(v0,u1))", "u2", (WIDE, WIDE, (2, 32)), None),
        ("sum(mul(v0,u1))", "u2", ((2, 1),) * 3, None),
    ],
)
def test_attention_by_dot_products_is_recognised(score, value, shapes, expected):
    assert dot_attention(parse(score), parse(value), shapes) == expected


def shared(entries: float) -> tuple[Shared, ...]:
    """So many entries a column in windows of 64 rows."""
    return (Shared(64, 1, 1.0, 1 / entries),)


def spec(**changes: object) -> OpSpec:
    facts = {
        "op": "attention", "device": "cuda", "dtype": torch.float16,
        "num_rows": 10**5, "num_cols": 10**5, "num_edges": 10**8, "heads": 1, "width": 128,
        "formula": "u2", "score": "sum(mul(v0,u1))", "shapes": ((1, 128),) * 3,
        "sharing": shared(6.7),
    }  # fmt: skip
    return OpSpec(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.bfloat16}, None),
        ({"dtype": torch.float32}, "not of 16 bits"),
        ({"score": "sum(mul(relu(v0),u1))"}, "by dot products"),
        ({"width": 160, "shapes": ((1, 160),) * 3}, "at most 128"),
        ({"op": "attention_targets"}, None),
        ({"op": "attention_backward", "formula": "v2", "reduces": ("sum", "sum")}, None),
        ({"op": "attention_backward", "formula": "v2", "reduces": ("sum", "none")}, "per edge"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(changes, reason):
    found = get_backend("cuda").not_supported_reasons(spec(**changes))
    assert (not found) if reason is None else any(reason in each for each in found)


def cost(name: str, spec: OpSpec) -> float:
    return get_backend(name).kernels[spec.op].cost(spec)


def test_it_is_chosen_where_rows_share_their_neighbours():
    assert cost("cuda", spec()) < cost("triton", spec())
    for sharing in ((), shared(1.1)):
        assert cost("cuda", spec(sharing=sharing)) > cost("triton", spec(sharing=sharing))
    assert attention_ratio(32, shared(2.1)) > attention_ratio(128, shared(2.1))


def test_its_gradient_is_chosen_where_they_share_more():
    def costs(entries: float) -> tuple[float, float]:
        """Of two passes over tiles; of one on CUDA cores and the sum that it leaves to do."""
        known = {"sharing": shared(entries)}
        turned = spec(op="attention_backward", formula="v2", reduces=("sum", "sum"), **known)
        targets = spec(op="attention_targets", **known)
        rest = spec(op="gspmm", formula="mul(u0,e1)", reduces=("sum",), score="")
        tiles = cost("cuda", turned) + cost("cuda", targets)
        return tiles, cost("triton", turned) + cost("triton", rest)

    over_tiles, otherwise = costs(7.4)
    assert over_tiles < otherwise
    over_tiles, otherwise = costs(2.1)
    assert over_tiles > otherwise


def graph_of(kind: str) -> Graph:
    """Row lengths of a kind, neighbours near one another, a few edges twice; unsorted."""
    torch.manual_seed(0)
    rows, cols = 1500, 1100
    degree = torch.randint(0, 5 if kind == "tiny" else 60, (rows,))
    if kind == "hubs":
        degree[torch.randperm(rows)[:6]] = torch.randint(1000, 20_000, (6,))
    row = torch.repeat_interleave(torch.arange(rows), degree)
    col = (row * cols // rows + torch.randint(0, 90, (row.numel(),))) % cols
    edges = torch.stack([col, row])
    edges = torch.cat([edges, edges[:, :50]], 1)
    return Graph.from_edge_index(edges[:, torch.randperm(edges.size(1))].cuda(), (cols, rows))


FORMS = {
    "transformer": ("div(sum(mul(v0,u1)),4.0)", "u2", "vuu"),
    "agnn": ("mul(v2,sum(mul(v0,u1)))", "u3", "vu1u"),
    "keys-are-values": ("sum(mul(v0,u1))", "u1", "vu"),
}
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def operands_of(graph: Graph, sides: str, heads: int, width: int) -> list[Tensor]:
    """Features that make scores of about 1, and for "1" one number per target."""
    rows = {"u": graph.num_cols, "v": graph.num_rows, "1": graph.num_rows}
    return [torch.randn(rows[s], 1 if s == "1" else heads, 1 if s == "1" else width, device="cuda")
            / (1 if s == "1" else width**0.25) for s in sides]  # fmt: skip


def run(graph: Graph, name: str, operands: list[Tensor], backend: str) -> list[Tensor]:
    """The result and the gradients, by a backend where it can."""
    score, value, _ = FORMS[name]
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    with use_backend(backend):
        out = ops.attention(graph, score, value, leaves)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def gradients(layer: Module, x: Tensor, edge_index: Tensor, grad: Tensor) -> list[Tensor]:
    dtype = next(layer.parameters()).dtype
    x = x.to(dtype).detach().requires_grad_()
    out = layer(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad.to(dtype))]


class TestOnTheGpu:
    pytestmark = GPU

    @pytest.fixture(autouse=True)
    def chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensor Cores for attention that they have, whatever the graph."""
        kernels = get_backend("cuda").kernels
        free = replace(kernels["attention"], cost=lambda spec: 0.0)
        monkeypatch.setitem(kernels, "attention", free)
        forget_decisions()

    @pytest.fixture
    def passes(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The passes of gradients that tiles have run."""
        kernels, seen = get_backend("cuda").kernels, []

        def watch(op: str) -> None:
            kernel = kernels[op]

            def watched(*args: object) -> object:
                seen.append(op)
                return kernel.run(*args)

            monkeypatch.setitem(kernels, op, replace(kernel, run=watched))

        for op in ("attention_backward", "attention_targets"):
            watch(op)
        forget_decisions()
        return seen

    def check(
        self,
        kind: str,
        name: str,
        heads: int,
        width: int,
        dtype: torch.dtype,
        backend: str = "auto",
    ) -> None:
        graph = graph_of(kind)
        operands = [t.to(dtype) for t in operands_of(graph, FORMS[name][2], heads, width)]
        ours = run(graph, name, operands, backend)
        right = run(graph, name, [t.double() for t in operands], "reference")
        for mine, good in zip(ours, right, strict=True):
            assert mine.dtype == dtype
            error = float((mine.double() - good).abs().max() / good.abs().max().clamp(min=1.0))
            assert error <= TOLERANCE[dtype], error

    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("name", FORMS)
    @pytest.mark.parametrize("kind", ["tiny", "short", "hubs"])
    def test_results_and_gradients_equal_the_truth(self, kind, name, dtype):
        self.check(kind, name, 2, 64, dtype)

    @pytest.mark.parametrize(("heads", "width"), [(1, 128), (3, 32), (1, 7), (4, 100), (1, 33)])
    def test_every_width_equals_the_truth(self, heads, width):
        self.check("hubs", "transformer", heads, width, torch.float16)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", FORMS)
    @pytest.mark.parametrize("kind", ["tiny", "short", "hubs"])
    def test_gradients_over_tiles_equal_the_truth(self, passes, kind, name, dtype):
        self.check(kind, name, 2, 64, dtype, "cuda")
        assert passes == ["attention_backward", "attention_targets"]

    @pytest.mark.parametrize(("heads", "width"), [(1, 128), (3, 32), (1, 7), (4, 100), (1, 33)])
    def test_gradients_of_every_width_equal_the_truth(self, passes, heads, width):
        for name in FORMS:
            self.check("hubs", name, heads, width, torch.float16, "cuda")
        assert len(passes) == 2 * len(FORMS)

    @pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2]], ids=str)
    def test_gradients_that_are_asked_for(self, wanted):
        graph = graph_of("short")
        operands = [t.half() for t in operands_of(graph, "vuu", 2, 32)]
        everything = run(graph, "transformer", operands, "cuda")[1:]
        leaves = [t.requires_grad_(i in wanted) for i, t in enumerate(operands)]
        with use_backend("cuda"):
            out = ops.attention(graph, *FORMS["transformer"][:2], leaves)
        torch.manual_seed(1)
        grad = torch.randn(out.shape, device="cuda").half()
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad)
        for i, mine in zip(wanted, found, strict=True):
            assert torch.equal(mine, everything[i])

    @pytest.mark.parametrize("where", ["value", "grad"])
    def test_infinite_gradients_stay_with_their_neighbours(self, passes, where):
        graph = graph_of("short")
        operands = [t.half() for t in operands_of(graph, "vuu", 1, 32)]
        grad = torch.randn(graph.num_rows, 1, 32, device="cuda").half()
        (operands[2] if where == "value" else grad)[::1000] = float("inf")
        found = []
        for backend, dtype in (("cuda", torch.float16), ("reference", torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in operands]
            with use_backend(backend):
                out = ops.attention(graph, "sum(mul(v0,u1))", "u2", leaves)
            found.append(torch.autograd.grad(out, leaves, grad.to(dtype)))
        assert len(passes) == 2
        for ours, right in zip(*found, strict=True):
            finite = right.isfinite()
            assert bool(finite.any())
            assert torch.equal(ours.isfinite(), finite)
            error = (ours.double() - right)[finite].abs().max() / right[finite].abs().max()
            assert float(error) <= 1e-2

    @pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
    @pytest.mark.parametrize("name", ["AGNN", "Transformer"])
    def test_patched_layers_equal_stock_ones_in_float64(self, always, name, precision):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        tolerance = {"bf16": 5e-2, "fp16": 1e-2, "tf32": 5e-3, "fp32": 1e-4}[precision]
        torch.manual_seed(0)
        edge_index = torch.randint(0, 700, (2, 9000), device="cuda")
        layer = (
            (AGNNConv() if name == "AGNN" else TransformerConv(64, 32, heads=2)).cuda().to(dtype)
        )
        stock = copy.deepcopy(layer).double()
        stock.load_state_dict(layer.state_dict())
        x = torch.randn(700, 64, device="cuda").to(dtype)
        grad = torch.randn(700, 64, device="cuda").to(dtype)
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            with pyg_accel.patched(), record_choices() as chosen:
                ours = gradients(layer, x, edge_index, grad)
        finally:
            torch.set_float32_matmul_precision("highest")
        assert ("cuda" in chosen) == (dtype.itemsize == 2)
        for mine, good in zip(ours, gradients(stock, x, edge_index, grad), strict=True):
            error = float((mine.double() - good).abs().max() / good.abs().max().clamp(min=1.0))
            assert error <= tolerance, error

    def test_the_tiles_ran(self):
        graph = graph_of("hubs")
        query, key, value = (t.half() for t in operands_of(graph, "vuu", 2, 64))
        with use_backend("cuda"):  # which has no softmax: the parts would not run there
            ours = ops.attention(graph, *FORMS["transformer"][:2], [query, key, value])
        wide = [t.double() for t in (query, key, value)]
        with use_backend("reference"):
            right = ops.attention(graph, *FORMS["transformer"][:2], wide)
        assert float((ours.double() - right).abs().max()) <= 4e-3 * float(right.abs().max())

    def test_infinite_values_stay_with_their_neighbours(self):
        graph = graph_of("short")
        query, key, value = (t.half() for t in operands_of(graph, "vuu", 1, 32))
        value[::100] = float("inf")
        with use_backend("cuda"):
            ours = ops.attention(graph, "sum(mul(v0,u1))", "u2", [query, key, value])
        wide = [t.double() for t in (query, key, value)]
        with use_backend("reference"):
            right = ops.attention(graph, "sum(mul(v0,u1))", "u2", wide)
        assert torch.equal(ours.isfinite(), right.isfinite())
        finite = right.isfinite()
        assert float((ours.double() - right)[finite].abs().max()) <= 2e-2

    def test_the_same_bits_in_every_run(self):
        graph = graph_of("hubs")
        operands = [t.half() for t in operands_of(graph, "vuu", 2, 64)]
        first, again = (run(graph, "transformer", operands, "cuda") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
