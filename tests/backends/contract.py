"""Operands of the contract of all backends, the truth about them, and their comparison with it."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_accel import Graph, ops
from pyg_accel.backends import Backend
from pyg_accel.formula import operands_of, parse
from pyg_accel.testing import GraphCase, truth, zoo

HUB = 17_000  # above 16384 the CPU kernels cut a row up


CASES = {case.name: case for case in zoo(hub=HUB)}


@cache
def graph_of(case: GraphCase) -> Graph:
    return Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))


GRAPHS = {name: graph_of(case) for name, case in CASES.items()}


# For kernels that are interpreted, edge by edge.
SMALL = {
    case.name: case.part(3)
    for case in zoo(hub=120)
    if case.name in ("directed", "empty-rows", "bipartite", "hub")
}


DIFFERENTIABLE = ("sum", "mean", "max", "min", "prod", "sqsum", "none")


# What an operand looks like beside its rows: everything, one number, one per head, one per feature.
FULL, NUMBER, HEAD, FEATURE = "full", "number", "head", "feature"


FORMULAS = {
    "copy": ("u0", FULL),
    "weight-an-edge": ("mul(u0,e1)", FULL, NUMBER),
    "weight-a-head": ("mul(u0,e1)", FULL, HEAD),
    "weight-a-feature": ("mul(u0,e1)", FULL, FULL),
    "weight-shared-by-heads": ("mul(u0,e1)", FULL, FEATURE),
    "edge-only": ("e0", FULL),
    "target-only": ("v0", FULL),
    "sum-of-ends": ("add(u0,v1)", FULL, FULL),
    "gine": ("relu(add(u0,e1))", FULL, FULL),
    "gated": ("mul(sigmoid(add(v0,u1)),u2)", FULL, FULL, FULL),
    "film": ("add(mul(v0,u1),v2)", FULL, FULL, FULL),
    "quotient": ("div(sub(u0,v1),exp(e2))", FULL, FULL, FULL),
    "broadcast-features": ("mul(tanh(add(u0,v1)),u2)", HEAD, FEATURE, FULL),
    "nested": ("leaky_relu(tanh(add(u0,softplus(e1))),0.2)", FULL, NUMBER),
    "dot": ("sum(mul(u0,v1))", FULL, FULL),
    "attention-score": ("sum(mul(leaky_relu(add(u0,v1),0.2),v2))", FULL, FULL, FEATURE),
}


MAIN = ("copy", "weight-a-head", "gine", "dot")


HALF = (torch.bfloat16, torch.float16)


FLOATS = (torch.float64, torch.float32, *HALF)


def shape_of_kind(kind: str, heads: int, width: int) -> tuple[int, int]:
    return {FULL: (heads, width), NUMBER: (1, 1), HEAD: (heads, 1), FEATURE: (1, width)}[kind]


def make_operands(
    case: GraphCase, name: str, heads: int, width: int, dtype: torch.dtype
) -> tuple[str, list[Tensor]]:
    text, *kinds = FORMULAS[name]
    sides = {o.index: o.side for o in operands_of(parse(text))}
    rows = {"u": case.num_sources, "v": case.num_targets, "e": case.edge_index.size(1)}
    generator = torch.Generator().manual_seed(heads * 1000 + width)
    operands = [
        torch.randn(rows[sides[i]], *shape_of_kind(kind, heads, width), generator=generator)
        .to(dtype)
        .requires_grad_()
        for i, kind in enumerate(kinds)
    ]
    return text, operands


@lru_cache(maxsize=2)  # for the reductions of one formula
def slopes(
    case: GraphCase, name: str, heads: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """|Message| of every edge, and its derivatives by every operand, in float64."""
    text, operands = make_operands(case, name, heads, width, dtype)
    place = places(case, text)
    whole = [max((t.size(dim) for t in operands), default=1) for dim in (1, 2)]
    written_out = [
        t.detach().double()[at].expand(-1, *whole).clone().requires_grad_()
        for t, at in zip(operands, place, strict=True)
    ]
    edges = torch.arange(case.edge_index.size(1))
    one_each = GraphCase("edges", torch.stack([edges, edges]), len(edges), len(edges))
    message = truth(one_each, text, written_out, "none")
    actual = torch.autograd.grad(message, written_out, torch.ones_like(message))
    return message.detach().abs(), [slope.abs() for slope in actual]


def places(case: GraphCase, text: str) -> list[Tensor]:
    """For every operand, the row that every edge reads."""
    source, target = case.edge_index.long()
    rows = {"u": source, "v": target, "e": torch.arange(source.numel())}
    sides = {o.index: o.side for o in operands_of(parse(text))}
    return [rows[sides[i]] for i in sorted(sides)]


def scales(
    case: GraphCase, name: str, heads: int, width: int, dtype: torch.dtype, reduce: str,
    grad: Tensor,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Sum of |terms| of a result and of every gradient: what a tolerance is relative to.

    A term is what one edge adds. Operands are of order one, so cancellation inside a message costs
    rounding of that size: each term counts at least 1 (times the incoming gradient's, backward).
    """
    text, operands = make_operands(case, name, heads, width, dtype)
    message, derivatives = slopes(case, name, heads, width, dtype)
    target = case.edge_index[1].long()

    def add_up(terms: Tensor, index: Tensor, rows: int) -> Tensor:
        return torch.zeros(rows, *terms.shape[1:], dtype=torch.float64).index_add_(0, index, terms)

    size = message + 1
    if reduce == "none":
        forward, seed = size, grad.double().abs()
    elif reduce == "prod":
        forward = add_up(size.log(), target, case.num_targets).exp()
        seed = (grad.double().abs() * forward)[target]
    else:
        forward = add_up(size.pow(2) if reduce == "sqsum" else size, target, case.num_targets)
        seed = grad.double().abs()[target] * (2 * size if reduce == "sqsum" else 1)
    backward = []
    for operand, slope, at in zip(operands, derivatives, places(case, text), strict=True):
        total = add_up((slope + 1) * seed, at, operand.size(0))
        for dim in (1, 2):
            if operand.size(dim) == 1:
                total = total.sum(dim, keepdim=True)
        backward.append(total)
    return forward, backward


class Answer(NamedTuple):
    """What every backend should find, and what its errors are relative to."""

    result: Tensor
    result_scale: Tensor
    grad: Tensor
    gradients: list[Tensor]
    gradient_scales: list[Tensor]


@lru_cache(maxsize=32)  # enough for a test to find what the same test of another backend has left
def answer(
    case: GraphCase, name: str, heads: int, width: int, dtype: torch.dtype, reduce: str
) -> Answer:
    text, operands = make_operands(case, name, heads, width, dtype)
    exact = [t.detach().double().requires_grad_() for t in operands]
    expected = truth(case, text, exact, reduce)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(expected.shape, generator=generator).to(dtype)
    gradients = [None] * len(exact)
    if expected.requires_grad:  # it does not where there is no edge
        gradients = torch.autograd.grad(expected, exact, grad.double(), allow_unused=True)
    gradients = [
        torch.zeros_like(t) if gradient is None else gradient
        for t, gradient in zip(exact, gradients, strict=True)
    ]
    scale, gradient_scales = scales(case, name, heads, width, dtype, reduce, grad)
    return Answer(expected.detach(), scale, grad, gradients, gradient_scales)


def check(
    backend: Backend, case: GraphCase, name: str, heads: int, width: int, dtype: torch.dtype,
    reduce: str,
) -> None:  # fmt: skip
    if case.name == "hub":  # the only graph that is large enough for threads
        torch.set_num_threads(2)
    text, operands = make_operands(case, name, heads, width, dtype)
    right = answer(case, name, heads, width, dtype, reduce)
    actual = ops.gspmm(GRAPHS[case.name], text, operands, reduce=reduce, edge_order=True)
    if text.startswith("sum"):
        actual = actual.unsqueeze(-1)
    assert actual.shape == right.result.shape
    assert actual.dtype == dtype
    relative, absolute = backend.tolerance(dtype)
    label = f"{name} {reduce} {heads}x{width}"

    def compare(what: str, ours: Tensor, right: Tensor, scale: Tensor) -> None:
        error = (ours.double() - right).abs() - relative * scale - absolute
        assert not bool((~(error <= 0)).any()), (
            f"{label}: {what} is off by {float(error.max()):.2e}"
        )

    compare("the result", actual.detach(), right.result, right.result_scale)
    if dtype in HALF and reduce in ("max", "min", "prod"):
        return  # rounding creates ties (see the test of ties) and moves products by whole factors
    ours = torch.autograd.grad(actual, operands, right.grad, allow_unused=True)
    for i, operand in enumerate(operands):
        mine = torch.zeros_like(operand) if ours[i] is None else ours[i]
        assert mine.shape == operand.shape
        assert mine.dtype == dtype
        compare(f"the gradient of operand {i}", mine, right.gradients[i], right.gradient_scales[i])


def reductions(name: str, case: GraphCase) -> list[str]:
    if FORMULAS[name][0].startswith("sum"):
        return ["none"]
    actual = list(DIFFERENTIABLE)
    if case.name == "hub":  # a product of 17000 numbers is 0 or infinite
        actual.remove("prod")
    return actual


def sizes(case: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Heads and widths."""
    if case == "hub":
        return [(1, 5)]
    return [(2, 33), (1, 1)] if dtype == torch.float64 else [(3, 16)]
