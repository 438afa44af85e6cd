"""Formulas: text and data, shapes, gradients."""

import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_accel.backends.reference.messages import evaluate
from pyg_accel.formula import (
    BINARY,
    UNARY,
    Binary,
    Const,
    Formula,
    Operand,
    Sum,
    Unary,
    gradient,
    map_operands,
    operands_of,
    parse,
    shape_of,
    swap_sides,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
operands = st.builds(Operand, st.sampled_from("uve"), st.integers(0, 12))
leaves = operands | st.builds(Const, numbers)
formulas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(
            Unary, st.sampled_from([f for f in UNARY if f not in ("leaky_relu", "pow")]), inner
        )
        | st.builds(Unary, st.sampled_from(["leaky_relu", "pow"]), inner, numbers)
        | st.builds(Binary, st.sampled_from([f for f in BINARY if f != "sel"]), inner, inner)
        | st.builds(Binary, st.just("sel"), inner, operands)
        | st.builds(Sum, inner)
    ),
    max_leaves=8,
)


@given(formulas)
@settings(max_examples=200, deadline=None)
def test_a_formula_survives_its_text(formula):
    assert parse(str(formula)) == formula


@given(formulas)
@settings(max_examples=100, deadline=None)
def test_swapping_sides_twice_changes_nothing(formula):
    swapped = swap_sides(formula)
    assert swap_sides(swapped) == formula
    turned = {"u": "v", "v": "u", "e": "e"}
    assert [o.side for o in operands_of(swapped)] == [turned[o.side] for o in operands_of(formula)]


@given(formulas)
@settings(max_examples=100, deadline=None)
def test_formulas_are_hashable_and_operands_come_in_the_order_of_reading(formula):
    assert hash(formula) == hash(parse(str(formula)))
    assert map_operands(formula, lambda o: o) == formula
    text = str(formula)
    for operand in operands_of(formula):
        actual = text.find(str(operand))
        assert actual >= 0
        text = text[actual + len(str(operand)) :]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "u",
        "x0",
        "u0+v1",
        "u0,v1",
        "add(u0)",
        "add(u0,v1,e2)",
        "mul()",
        "cosh(u0)",
        "relu(u0,1.0)",
        "leaky_relu(u0)",
        "pow(u0,u1)",
        "sum(u0,u1)",
        "True",
        "'u0'",
        "u-1",
        "u0.real",
        "u0[0]",
        "None",
        "add(left=u0,right=v1)",
        "sel(u0,1.0)",
        "sel(u0,add(e1,e2))",
        "__import__('os')",
        "u0 if u1 else u2",
        "mul(u0",
        "not u0",
        "-u0",
        "1j",
    ],
)
def test_anything_else_is_refused_with_a_value_error(text):
    with pytest.raises(ValueError, match=r"expected|unknown"):
        parse(text)


def test_unknown_names_list_those_that_exist():
    with pytest.raises(ValueError, match="unknown function 'cosh'; there are neg, abs, exp"):
        Unary("cosh", Operand("u", 0))
    with pytest.raises(
        ValueError, match="unknown operation 'mod'; there are add, sub, mul, div, sel"
    ):
        Binary("mod", Operand("u", 0), Operand("v", 1))
    with pytest.raises(ValueError, match="operand side"):
        Operand("w", 0)


@pytest.mark.parametrize(
    ("text", "shapes", "expected"),
    [
        ("u0", {0: (2, 3)}, (2, 3)),
        ("2.0", {}, (1, 1)),
        ("mul(u0,e1)", {0: (2, 3), 1: (1, 1)}, (2, 3)),
        ("mul(u0,e1)", {0: (2, 1), 1: (1, 3)}, (2, 3)),
        ("sum(mul(u0,v1))", {0: (2, 3), 1: (2, 3)}, (2, 1)),
        ("sel(u0,v1)", {0: (2, 3), 1: (2, 3)}, (2, 3)),
        ("add(u0,e1)", {0: (1, 0), 1: (1, 1)}, (1, 0)),
        ("add(u0,1.0)", {0: (4, 5)}, (4, 5)),
    ],
)
def test_the_shape_of_a_message_broadcasts(text, shapes, expected):
    assert shape_of(parse(text), shapes) == expected


def test_shapes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\) do not broadcast in add\(u0,v1\)"):
        shape_of(parse("add(u0,v1)"), {0: (1, 2), 1: (1, 3)})


DIFFERENTIABLE = [
    "u0",
    "neg(u0)",
    "abs(u0)",
    "exp(u0)",
    "log(add(abs(u0),1.0))",
    "sqrt(add(abs(u0),1.0))",
    "relu(u0)",
    "leaky_relu(u0,0.3)",
    "sigmoid(u0)",
    "tanh(u0)",
    "softplus(u0)",
    "pow(add(abs(u0),1.0),2.5)",
    "nonzero(u0)",
    "step(u0)",
    "sign(u0)",
    "iszero(u0)",
    "add(u0,v1)",
    "sub(v1,u0)",
    "mul(u0,u0)",
    "div(v1,add(exp(u0),1.0))",
    "div(u0,add(exp(v1),1.0))",
    "mul(tanh(add(u0,e2)),sub(u0,v1))",
    "mul(mul(u0,v1),div(u0,add(abs(e2),1.0)))",
    "sum(mul(u0,v1))",
    "sum(mul(leaky_relu(add(u0,v1),0.2),e2))",
    "mul(sum(mul(u0,v1)),u0)",
    "add(sigmoid(sum(u0)),mul(u0,e2))",
]


@pytest.mark.parametrize("text", DIFFERENTIABLE)
def test_the_gradient_of_a_message_equals_autograd(text):
    formula: Formula = parse(text)
    rows = torch.arange(5)
    place = {"u": rows, "v": rows, "e": rows}
    given_ = [torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    out = evaluate(formula, given_, place)
    seed = torch.randn(5, 1, out.size(2), dtype=torch.float64)
    for index in range(3):
        wanted = gradient(formula, index, Operand("e", 3))
        right = None
        if out.requires_grad:  # steps have no gradient in torch; ours is 0
            (right,) = torch.autograd.grad(
                out, given_[index], seed, retain_graph=True, allow_unused=True
            )
        if wanted is None:
            assert right is None or not bool(right.any())
            continue
        actual = evaluate(wanted, [*given_, seed], place).expand(5, 1, 4)
        torch.testing.assert_close(actual, torch.zeros_like(actual) if right is None else right)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("narrow", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        *DIFFERENTIABLE,
        "sum(add(u0,v1))",
        "sum(mul(add(u0,v1),u0))",
        "sum(sub(tanh(v1),mul(2.0,u0)))",
        "sum(add(sum(mul(u0,v1)),e2))",
        "add(sum(u0),mul(u0,e2))",
    ],
)
def test_the_gradient_of_a_message_whose_operands_broadcast_equals_autograd(text, narrow):
    formula, rows = parse(text), torch.arange(5)
    place = {"u": rows, "v": rows, "e": rows}
    given_ = [
        torch.randn(5, 1, 1 if i in narrow else 4, dtype=torch.float64, requires_grad=True)
        for i in range(3)
    ]
    out = evaluate(formula, given_, place)
    seed = torch.randn(5, 1, out.size(2), dtype=torch.float64)
    shapes = {i: (t.size(1), t.size(2)) for i, t in enumerate([*given_, seed])}
    for index, operand in enumerate(given_):
        wanted = gradient(formula, index, Operand("e", 3), shapes)
        if wanted is None or not out.requires_grad:
            continue
        actual = evaluate(wanted, [*given_, seed], place)
        if index in narrow:  # as kernels do
            actual = actual.sum(-1, keepdim=True)
        (right,) = torch.autograd.grad(out, operand, seed, retain_graph=True)
        torch.testing.assert_close(actual.expand_as(right), right)


@pytest.mark.parametrize(
    "text",
    ["abs(u0)", "relu(u0)", "leaky_relu(u0,0.3)", *(f"pow(u0,{p})" for p in (0.0, 1.0, 2.0, 3.0))],
)
def test_the_gradient_at_0_equals_autograd(text):
    formula, place = parse(text), {"u": torch.arange(3)}
    x = torch.zeros(3, 1, 2, dtype=torch.float64, requires_grad=True)
    evaluate(formula, [x], place).sum().backward()
    wanted = gradient(formula, 0, Operand("u", 1))
    assert wanted is not None
    torch.testing.assert_close(evaluate(wanted, [x, torch.ones_like(x)], place), x.grad)


def test_an_operand_that_does_not_matter_has_no_gradient():
    assert gradient(parse("mul(u0,2.0)"), 1, Operand("v", 2)) is None
    assert gradient(parse("3.0"), 0, Operand("v", 1)) is None


def test_numbers_keep_every_digit():
    for value in (0.1, 1e-300, -1.5e300, math.pi, 5e-324, -0.0):
        actual = parse(str(Const(value)))
        assert actual.value == value
        assert math.copysign(1, actual.value) == math.copysign(1, value)


def test_zeros_of_two_signs_are_two_numbers():
    assert Const(0.0) != Const(-0.0)
    assert {Const(0.0): 1}.get(Const(-0.0)) is None
    assert Const(0.0) == Const(0.0)
    assert Const(2.0) == Const(2)
    assert Const(0.0) != 0.0
    x0 = Operand("u", 0)
    assert Binary("div", x0, Const(0.0)) != Binary("div", x0, Const(-0.0))


def test_threads_parse_at_the_same_time() -> None:
    def switch(*_: object) -> None:
        time.sleep(0)  # lets another thread run in the middle of what makes objects

    def read(thread: int) -> list[Formula]:
        texts = [f"{'exp(' * 12}mul(u0,{k}.{thread}){')' * 12}" for k in range(100)]
        return [f for text in texts if str(f := parse(text)) == text]

    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    gc.callbacks.append(switch)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert [len(actual) for actual in pool.map(read, range(1, 9))] == [100] * 8
    finally:
        gc.callbacks.remove(switch)
        gc.set_threshold(*thresholds)
