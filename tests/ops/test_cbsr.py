"""The face of maxk and cbsr_spmm: what is refused, and how they behave inside torch."""

from collections.abc import Callable

import pytest
import torch

from pyg_accel import CBSR, Graph, ops, use_backend
from pyg_accel.backends import Backend, Kernel, backends, get_backend, register_backend

GRAPH = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2], [1, 0, 1, 2]]), (3, 4))


def features() -> CBSR:
    return ops.maxk(torch.randn(3, 6), 2)


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (torch.randn(3), 1, r"\[N, F\]"),
        (torch.ones(2, 3).int(), 1, "floating-point"),
        (torch.randn(2, 3), 0, "at least 1"),
        (torch.randn(2, 3), 1.5, "whole number"),
        (torch.randn(1, 65_537), 2, "at most 65536"),
    ],
)
def test_maxk_refuses_what_does_not_fit(x, k, message):
    with pytest.raises(ValueError, match=message):
        ops.maxk(x, k)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "dense": (lambda: ops.cbsr_spmm(GRAPH, torch.randn(3, 6)), "a CBSR matrix"),
    "rows": (lambda: ops.cbsr_spmm(GRAPH, ops.maxk(torch.randn(4, 6), 2)), "3 rows"),
    "weights": (lambda: ops.cbsr_spmm(GRAPH, features(), torch.randn(3)), r"\[4\]"),
    "integer weights": (lambda: ops.cbsr_spmm(GRAPH, features(), torch.ones(4).int()), "floating"),
    "reduction": (lambda: ops.cbsr_spmm(GRAPH, features(), reduce="max"), "sum, mean"),
    "index dtype": (
        lambda: ops.cbsr_spmm(GRAPH, features()._replace(indices=torch.zeros(3, 2).long())),
        "uint8",
    ),
    "shapes": (lambda: ops.cbsr_spmm(GRAPH, features()._replace(values=torch.randn(3, 3))), "k]"),
    "too many": (lambda: ops.cbsr_spmm(GRAPH, features()._replace(width=1)), "between 1 and 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_cbsr_spmm_refuses_what_does_not_fit(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ops.cbsr_spmm(GRAPH, ops.maxk(x, 2), weight, reduce="mean").relu()


def test_a_compiled_step_equals_the_eager_one():
    x = torch.randn(3, 6, requires_grad=True)
    weight = torch.randn(4, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    answers = [(out, *torch.autograd.grad(out.sum(), [x, weight]))
               for out in (step(x, weight), compiled(x, weight))]  # fmt: skip
    torch.testing.assert_close(*answers)


def test_autocast_keeps_the_dtype_of_the_features():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(3, 5) @ torch.randn(5, 6)
        out = ops.cbsr_spmm(GRAPH, ops.maxk(x, 2))
    assert out.dtype == torch.bfloat16


def test_mixed_dtypes_are_promoted():
    values = features().values.bfloat16().requires_grad_()
    out = ops.cbsr_spmm(GRAPH, features()._replace(values=values), torch.randn(4))
    assert out.dtype == torch.float32
    (grad,) = torch.autograd.grad(out.sum(), values)
    assert grad.dtype == torch.bfloat16


def test_without_gradients_no_transpose_is_built():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), (3, 3))
    ops.cbsr_spmm(graph, features())
    assert graph._transposed is None


def test_backends_hear_of_k_and_are_passed_over_for_what_they_lack():
    asked = []
    maxk = Kernel(get_backend("reference").kernels["maxk"].run, lambda spec: 0.0,
                  lambda spec: asked.append(spec) or [])  # fmt: skip
    register_backend(Backend("recorder", {"maxk": maxk}))
    assert "recorder" in backends()
    ops.maxk(torch.randn(3, 6), 2)
    assert [(spec.op, spec.width, spec.k) for spec in asked] == [("maxk", 6, 2)]
    ops.cbsr_spmm(GRAPH, features())
    with use_backend("recorder"), pytest.raises(RuntimeError, match="no kernel for 'cbsr_spmm'"):
        ops.cbsr_spmm(GRAPH, features())
