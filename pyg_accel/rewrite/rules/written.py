"""Layers that users write: messages ``w * x_j`` with a linear layer before or after.

The code of such a layer is run, not read: :mod:`pyg_accel.rewrite.running` finds the products in
it while it runs, and this rule says what they are.
"""

from typing import Any

from torch import Tensor

from pyg_accel.patching.randomness import random_state, restore
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.deferred import Linear, Product
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf
from pyg_accel.rewrite.matrices import Matrix, plain
from pyg_accel.rewrite.rules.common import Parts, add, edges, inverse_count
from pyg_accel.rewrite.running import Run

__all__ = ["written"]


def written(conv: Any, call: Call) -> Algebra:
    """A X W + b, or what has a part of it: the product of a call, by default the first one.

    Raises:
        NotLifted: if the layer computes none.
    """
    if "product" not in call.memo:
        call.memo["product"] = _first(call)
    product = _product(call)
    inner = "H" if product.after is None else "K"
    parts = Parts()
    parts.compiles = False  # torch.compile does not read modes that replace its functions
    out: Expr = parts.sources(call)
    if product.before is not None:
        weight = Leaf("W", "F", inner, "weight")
        out = out @ parts.leaf(weight, lambda call: _before(call)[0].t())
        if product.before[1] is not None:
            bias = Leaf("w", "1", inner, "weight")
            out = out + parts.ones("N") @ parts.leaf(bias, lambda call: _row(_before(call)))
    if product.weight is not None:
        out = parts.leaf(Leaf("A", "N", "N", "weighted"), _weighted) @ out
    else:
        out = edges(parts, call, "") @ out
    if product.mean:
        out = Broadcast(inverse_count(parts), out)
    if product.after is not None:
        rows = "F" if product.before is None else "K"
        weight = Leaf("V", rows, "H", "weight")
        out = out @ parts.leaf(weight, lambda call: _after(call)[0].t())
        if product.after[1] is not None:
            bias = Leaf("c", "1", "H", "bias")
            out = add(out, parts.leaf(bias, lambda call: _row(_after(call)).squeeze(0)))
    return parts.algebra(out, learned=("A",) if product.weight is not None else ())


class _Found(Exception):
    """The first product of a layer."""


def _first(call: Call) -> Product:
    found: list[Product] = []

    def compute(inner: Call) -> Tensor:
        found.append(_product(inner))
        raise _Found

    run = Run(call, compute)
    state = random_state(call.x.device, call.conv)
    try:
        run(tuple(call.given.values()), {})
    except _Found:
        restore(state)
        return found[0]
    raise NotLifted(run.left)


def _product(call: Call) -> Product:
    product: Product = call.memo["product"]
    return product


def _before(call: Call) -> Linear:
    factors = _product(call).before
    assert factors is not None
    return factors


def _after(call: Call) -> Linear:
    factors = _product(call).after
    assert factors is not None
    return factors


def _row(factors: Linear) -> Tensor:
    assert factors[1] is not None
    return factors[1].unsqueeze(0)


def _weighted(call: Call) -> Matrix:
    graph = plain(call.edge_index, call.num_rows, call.num_cols, call.target)
    weight = _product(call).weight
    assert weight is not None
    return Matrix(graph, weight.squeeze(1), edge_order=True)
