"""Every operator of the package keeps torch's contract: schema, fake tensors, autograd, compile."""

from typing import Any

import pytest
import torch

from pyg_accel import Graph

EDGES = torch.tensor([[0, 1, 2, 2, 0, 3, 3, 3], [1, 0, 1, 1, 3, 3, 0, 0]])
COLUMNS = torch.tensor([[0, 3], [1, 2], [0, 5], [4, 5]], dtype=torch.uint8)


def arrays(edge_order: bool) -> tuple[Any, ...]:
    graph = Graph.from_edge_index(EDGES, (4, 5))
    return (
        *graph.csr(edge_order=edge_order)[:3],
        *graph.transposed(edge_order=edge_order)[:3],
        graph.num_cols,
        True,
    )


def operand(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, requires_grad=True)


def gspmm(text: str, reduces: list[str], *shapes: tuple[int, ...], want_arg: bool = False) -> Any:
    return lambda: (*arrays(True), [operand(*s) for s in shapes], text, reduces, want_arg)


def operand_at(side: str, *sizes: int) -> Any:
    return lambda: operand({"u": 4, "v": 5, "e": 8}[side], *sizes)


def sampled(*tensors: Any, strategy: str = "fastrand") -> Any:
    def made() -> tuple[Any, ...]:
        seed = torch.tensor([3]) if strategy == "random" else None
        given = [t() if callable(t) and not isinstance(t, torch.Tensor) else t for t in tensors]
        return (*arrays(True)[:3], 4, *given, 2, strategy, "row", seed)

    return made


CALLS = {
    "gspmm": {
        "copy": gspmm("u0", ["sum"], (4, 1, 3)),
        "copy-max": gspmm("u0", ["max"], (4, 1, 3), want_arg=True),
        "weighted": gspmm("mul(u0,e1)", ["mean"], (4, 2, 3), (8, 2, 1)),
        "several": gspmm(
            "relu(add(u0,e1))", ["sum", "max", "min"], (4, 1, 3), (8, 1, 3), want_arg=True
        ),
        "product": gspmm("u0", ["prod"], (4, 1, 3)),
        "messages": gspmm("mul(u0,v1)", ["none"], (4, 1, 3), (5, 1, 3)),
        "dot": gspmm("sum(mul(u0,v1))", ["none"], (4, 2, 3), (5, 2, 3)),
        "csr-order": lambda: (*arrays(False), [operand(8, 1, 2)], "e0", ["sum"], False),
    },
    "scatter_arg": {
        "some": lambda: (operand(5, 3), torch.randint(-1, 4, (5, 3), dtype=torch.int32), 4),
        "no-rows": lambda: (operand(0, 3), torch.empty(0, 3, dtype=torch.int64), 4),
    },
    "gather_arg": {"some": lambda: (operand(4, 3), torch.randint(-1, 4, (5, 3)))},
    "edge_softmax": {
        "one-head": lambda: (*arrays(True)[:3], 4, operand(8, 1)),
        "heads": lambda: (*arrays(False)[:3], 4, operand(8, 3)),
    },
    "edge_softmax_backward": {
        "heads": lambda: (*arrays(True)[:3], 4, operand(8, 3), operand(8, 3)),
    },
    "maxk": {"some": lambda: (operand(3, 9), 4), "wide": lambda: (operand(2, 300), 7)},
    "cbsr_spmm": {
        "weighted": lambda: (*arrays(True), operand(4, 2), COLUMNS, 6, operand(8), "mean"),
        "plain": lambda: (*arrays(False), operand(4, 2), COLUMNS, 6, None, "sum"),
    },
    "sspmm": {
        "weighted": lambda: (*arrays(True), operand(5, 6), COLUMNS, operand(8)),
        "plain": lambda: (*arrays(False), operand(5, 6), COLUMNS, None),
    },
    "cbsr_dot": {"some": lambda: (*arrays(True), operand(4, 2), COLUMNS, operand(5, 6))},
    "cbsr_mm": {"some": lambda: (operand(4, 2), COLUMNS, 6, operand(6, 3))},
    "cbsr_sddmm": {"some": lambda: (operand(4, 3), COLUMNS, operand(6, 3))},
    "cbsr_mm_t": {"some": lambda: (operand(4, 2), COLUMNS, 6, operand(4, 3))},
    "sampled_spmm": {
        "plain": sampled(operand_at("u", 2, 3), None, None),
        "weighted": sampled(operand_at("u", 2, 3), None, operand_at("e", 2)),
        "random": sampled(operand_at("u", 2, 3), None, operand_at("e", 1), strategy="random"),
        "8-bit": sampled(lambda: torch.ones(4, 1, 3, dtype=torch.int8), torch.ones(1, 3), None),
    },
    "sampled_spmm_t": {"weighted": sampled(operand_at("v", 2, 3), operand_at("e", 1))},
    "sampled_sddmm": {"dots": sampled(operand_at("v", 2, 3), operand_at("u", 2, 3))},
    "segment_matmul": {
        "some": lambda: (operand(5, 3), torch.tensor([0, 2, 2, 5]), operand(3, 3, 4)),
    },
    "segment_outer": {
        "some": lambda: (operand(5, 3), torch.tensor([0, 2, 2, 5]), operand(5, 4)),
    },
    "attention": {
        "dots": lambda: (
            *arrays(True),
            [operand(4, 2, 3), operand(5, 2, 3)],
            "sum(mul(u0,v1))",
            "u0",
        ),
        "edges": lambda: (
            *arrays(False),
            [operand(8, 2, 1), operand(4, 1, 3)],
            "e0",
            "u1",
        ),
    },
    "attention_backward": {
        "dots": lambda: (
            *arrays(True),
            [torch.randn(4, 2, 3), torch.randn(5, 2, 3)],
            torch.randn(5, 2, 3),
            torch.randn(5, 2, 3),
            torch.randn(5, 2),
            "sum(mul(u0,v1))",
            "u0",
            [True, True],
        ),
        "edges": lambda: (
            *arrays(False),
            [torch.randn(8, 2, 1), torch.randn(4, 1, 3)],
            torch.randn(5, 2, 3),
            torch.randn(5, 2, 3),
            torch.randn(5, 2),
            "e0",
            "u1",
            [True, False],
        ),
    },
    "gspmm_several": {
        "both": lambda: (
            *arrays(True)[:3],
            4,
            True,
            [torch.randn(4, 2, 3), torch.randn(8, 2, 1)],
            ["mul(u0,e1)", "sum(mul(u0,e1))"],
            ["sum", "none"],
        ),
    },
    "embedding": {
        "rows": lambda: (operand(4, 3), EDGES, -1, False),
        "padding": lambda: (operand(4, 3), EDGES[0], 2, True),
    },
    "embedding_backward": {
        "rows": lambda: (operand(2, 8, 3), EDGES, 4, -1, False),
        "padding": lambda: (operand(8, 3), EDGES[0], 4, 2, True),
    },
    "csr": {
        "edges": lambda: (EDGES, 5, 4, 1),
        "turned": lambda: (EDGES, 4, 5, 0),
        "loops": lambda: (EDGES, 4, 4, 1, True),
    },
    "csr_transposed": {
        "edges": lambda: (EDGES, 5, 4, 1),
        "turned": lambda: (EDGES, 4, 5, 0),
        "loops": lambda: (EDGES, 4, 4, 1, True, False),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"), [(name, call) for name, calls in CALLS.items() for call in calls]
)
def test_the_operator_passes_opcheck(name, call):
    torch.library.opcheck(getattr(torch.ops.pyg_accel, name).default, CALLS[name][call]())


def test_every_operator_of_the_package_is_checked_here():
    names = {
        schema.name.removeprefix("pyg_accel::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("pyg_accel::")
    }
    assert names == set(CALLS)
