"""The functions of message formulas: a table with one row per function, for all evaluators.

To add one, add its row, run ``python -m pyg_accel.formula.functions`` (it writes the part of the
CPU kernels) and build. :mod:`.language` reads names and derivatives, the reference backend
``torch``, the Triton backend ``triton``, and the CPU kernels ``cpp``;
``tests/formula/test_functions.py`` runs every row. Functions of torch that messages call become
formulas in :mod:`pyg_accel.patching.rules.elementwise`.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["BINARY", "FUNCTIONS", "OPS", "PARAMETRIC", "UNARY", "Function", "header",
           "numbers"]  # fmt: skip


@dataclass(frozen=True)
class Function:
    """An elementwise function.

    Attributes:
        name: in formulas.
        torch: computes it on tensors: of x, of x and the parameter, or of x and y.
        triton: Triton code for ``{x}``, ``{y}`` and the parameter ``{v}``; ACC is the dtype.
        cpp: C++ code for x, y and the parameter ``value``: vectors of type V, of elements A.
        gradients: for each argument, a formula of the gradient g of the result, of x and y, and of
            the result f; empty if the function is constant almost everywhere. With a parameter, a
            function that returns the formula.
        keeps_zero: whether the result of zeros is 0.
        parameter: whether its last argument is a number.
    """

    name: str
    torch: Callable[..., Any]
    triton: str
    cpp: str
    gradients: tuple[str, ...] | Callable[[float], str] = ()
    keeps_zero: bool = False
    parameter: bool = False


def _slope(v: float) -> str:
    return f"mul(g,add({v!r},mul({1.0 - v!r},step(x))))"


def _power(v: float) -> str:  # x ** -1 may be infinite
    return "mul(g,0.0)" if v == 0.0 else f"mul(g,mul({v!r},pow(x,{v - 1.0!r})))"


_FIRST = "add(step(sub({0},{1})),mul(0.5,iszero(sub({0},{1}))))"  # 1 if it is larger, 0.5 if equal
_NORMAL = "mul(0.3989422804014327,exp(mul(-0.5,mul(x,x))))"

_BINARY = (
    Function("add", operator.add, "{x} + {y}", "x + y", ("g", "g"), keeps_zero=True),
    Function("sub", operator.sub, "{x} - {y}", "x - y", ("g", "neg(g)"), keeps_zero=True),
    Function("mul", operator.mul, "{x} * {y}", "x * y", ("mul(g,y)", "mul(g,x)"), keeps_zero=True),
    Function("div", operator.truediv, "{x} / {y}", "x / y",
             ("div(g,y)", "neg(div(mul(g,f),y))")),
    # x where the index operand y names this edge, else 0; evaluators know it by its name.
    Function("sel", lambda x, y: x, "", "", ("sel(g,y)", "")),
    Function("maximum", torch.maximum, "tl.where(({x} > {y}) | ({x} != {x}), {x}, {y})",
             "(x > y) | (x != x) ? x : y",
             tuple(f"mul(g,{_FIRST.format(*xy)})" for xy in ("xy", "yx")), keeps_zero=True),
    Function("minimum", torch.minimum, "tl.where(({x} < {y}) | ({x} != {x}), {x}, {y})",
             "(x < y) | (x != x) ? x : y",
             tuple(f"mul(g,{_FIRST.format(*xy)})" for xy in ("yx", "xy")), keeps_zero=True),
    # x where y is not 0, else 0: where(c,a,b) is add(keep(a,c),keep(b,iszero(c))).
    Function("keep", lambda x, y: torch.where(y != 0, x, 0.0), "tl.where({y} != 0.0, {x}, 0.0)",
             "y != 0 ? x : V{}", ("keep(g,y)", ""), keeps_zero=True),
)  # fmt: skip

_UNARY = (
    Function("neg", torch.neg, "-{x}", "-x", ("neg(g)",), keeps_zero=True),
    Function("abs", torch.abs, "tl.abs({x})", "x < 0 ? -x : x", ("mul(g,sign(x))",),
             keeps_zero=True),
    Function("exp", torch.exp, "tl.exp({x})", "vexp(x)", ("mul(g,f)",)),
    Function("log", torch.log, "tl.log({x})", "vlog(x)", ("div(g,x)",)),
    Function("sqrt", torch.sqrt, "tl.sqrt({x})", "vsqrt<A>(x)", ("div(mul(g,0.5),f)",)),
    # The comparison is written so that NaN passes through.
    Function("relu", torch.relu, "tl.where({x} <= 0.0, 0.0, {x})", "x <= 0 ? V{} : x",
             ("mul(g,step(x))",), keeps_zero=True),
    Function("leaky_relu", F.leaky_relu, "tl.where({x} > 0.0, {x}, {x} * {v})",
             "x > 0 ? x : x * value", _slope, keeps_zero=True, parameter=True),
    Function("sigmoid", torch.sigmoid, "1.0 / (1.0 + tl.exp(-{x}))", "vsigmoid(x)",
             ("mul(g,mul(f,sub(1.0,f)))",)),
    Function("tanh", torch.tanh, "tanh({x})", "vtanh(x)", ("mul(g,sub(1.0,mul(f,f)))",),
             keeps_zero=True),
    Function("softplus", lambda x: torch.logaddexp(x, torch.zeros_like(x)), "softplus({x})",
             "vsoftplus(x)", ("mul(g,sigmoid(x))",)),
    # The text of a power depends on the exponent: pyg_accel.backends.triton.expression.
    Function("pow", torch.pow, "", "vpow<A>(x, value)", _power, parameter=True),
    Function("step", lambda x: (x > 0).to(x.dtype), "({x} > 0.0).to(ACC)",
             "x > 0 ? splat<A>(1) : V{}"),
    Function("sign", torch.sign, "({x} > 0.0).to(ACC) - ({x} < 0.0).to(ACC)",
             "x > 0 ? splat<A>(1) : x < 0 ? splat<A>(-1) : V{}", keeps_zero=True),
    Function("iszero", lambda x: (x == 0).to(x.dtype), "({x} == 0.0).to(ACC)",
             "x == 0 ? splat<A>(1) : V{}"),
    Function("nonzero", lambda x: torch.where(x == 0, 1, x), "tl.where({x} == 0.0, 1.0, {x})",
             "x == 0 ? splat<A>(1) : x", ("mul(g,sub(1.0,iszero(x)))",)),
    Function("silu", F.silu, "{x} / (1.0 + tl.exp(-{x}))", "x * vsigmoid(x)",
             ("mul(g,mul(sigmoid(x),add(1.0,sub(x,f))))",), keeps_zero=True),
    Function("erf", torch.erf, "tl.erf({x})", "verf<A>(x)",
             ("mul(g,mul(1.1283791670955126,exp(neg(mul(x,x)))))",), keeps_zero=True),
    Function("gelu", F.gelu, "0.5 * {x} * (1.0 + tl.erf({x} * 0.7071067811865476))",
             "x * (verf<A>(x * splat<A>(0.7071067811865476)) + 1) / 2",
             (f"mul(g,add(mul(0.5,add(1.0,erf(mul(x,0.7071067811865476)))),mul(x,{_NORMAL})))",),
             keeps_zero=True),
)  # fmt: skip

FUNCTIONS = {function.name: function for function in (*_BINARY, *_UNARY)}
BINARY = tuple(function.name for function in _BINARY)
UNARY = tuple(function.name for function in _UNARY)
PARAMETRIC = tuple(function.name for function in _UNARY if function.parameter)
OPS = (*BINARY, *UNARY, "const")  # by their numbers in the CPU kernels


def header() -> str:
    """Return the table as the CPU kernels include it."""

    def rows(functions: tuple[Function, ...]) -> str:
        lines = (f"  X({_enumerator(f.name)}, {f.cpp})" for f in functions if f.cpp)
        return " \\\n".join(lines)

    names = "\n".join(f"  {_enumerator(name)}," for name in OPS)
    return f"""// Written by `python -m pyg_accel.formula.functions`, from its table: do not edit.
#pragma once

namespace pyg_accel {{

// clang-format off
enum class Op : int {{
{names}
}};

inline constexpr int kBinaryOps = {len(BINARY)};  // the first ones

#define PYG_ACCEL_BINARY(X) \\
{rows(_BINARY)}

#define PYG_ACCEL_UNARY(X) \\
{rows(_UNARY)}
// clang-format on

}}  // namespace pyg_accel
"""


def numbers() -> str:
    """Return the functions with their numbers, like a library built from this table."""
    functions = (f for f in (*_BINARY, *_UNARY) if f.cpp)
    return "".join(f"{_enumerator(f.name)}={OPS.index(f.name)};" for f in functions)


def _enumerator(name: str) -> str:
    return "k" + name.title().replace("_", "")


HEADER = Path(__file__).parents[2] / "csrc" / "cpu" / "functions.h"

if __name__ == "__main__":
    HEADER.write_text(header())
    print(f"{HEADER}: {len(FUNCTIONS)} functions")
