"""Chebyshev polynomials of the Laplacian."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import ChebConv

from pyg_accel import derived as store
from pyg_accel.graph import Graph
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted
from pyg_accel.rewrite.ir import Expr, Leaf
from pyg_accel.rewrite.matrices import Matrix, derived, in_order_of
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import ExprBuilder, add, check_weight, need_sum

MOST_TERMS = 8  # of a Chebyshev polynomial: its terms are written out


@lifts(ChebConv)
def cheb(conv: ChebConv, call: Call) -> Algebra:
    """Σ T_k(L) X Wk + b: by the recurrence of T, or by Clenshaw's, which multiplies first."""
    need_sum(conv)
    weight, largest = call.given.get("edge_weight"), call.given.get("lambda_max")
    if call.given.get("batch") is not None or isinstance(largest, Tensor):
        raise NotLifted("eigenvalues of several graphs")
    if weight is not None:
        check_weight(weight, call)
        if weight.requires_grad:
            raise NotLifted("edge weights that are learned, through their normalisation")
    if len(conv.lins) > MOST_TERMS:
        raise NotLifted(f"more than {MOST_TERMS} terms")
    parts = ExprBuilder()
    parts.facts = (largest,)
    parts.compiles = False  # the layer's own normalisation looks for self-loops
    a = parts.leaf(Leaf("L", "N", "N", "weighted"), _laplacian)
    two, minus = parts.number("2", 2.0), parts.number("-1", -1.0)
    x: Expr = parts.sources(call)
    weights = [parts.linear(f"W{k}", layer) for k, layer in enumerate(conv.lins)]
    bias = parts.bias("b", conv)

    powers = [x, a @ x]
    while len(powers) < len(weights):
        powers.append(two @ a @ powers[-1] + minus @ powers[-2])
    plain = add(*(t @ w for t, w in zip(powers, weights, strict=False)), *bias)

    # b_k = X Wk + 2 L b_(k+1) - b_(k+2); the sum is X W0 + L b_1 - b_2
    last: list[Expr] = []
    for k in reversed(range(1, len(weights))):
        terms: list[Expr] = [x @ weights[k]]
        terms += [two @ a @ last[-1]] if last else []
        terms += [minus @ last[-2]] if len(last) > 1 else []
        last.append(add(*terms))
    terms = [x @ weights[0]]
    terms += [a @ last[-1]] if last else []
    terms += [minus @ last[-2]] if len(last) > 1 else []
    return parts.algebra(plain, also=(add(*terms, *bias),))


def _laplacian(call: Call) -> Matrix:
    """The scaled Laplacian, as the layer computes it."""
    conv: Any = call.conv
    weight, largest = call.given.get("edge_weight"), call.given.get("lambda_max")
    key = ("laplacian", conv.normalization, call.num_rows, call.target)

    def normalised() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = conv.__norm__(
            call.edge_index, call.num_rows, weight, conv.normalization, largest,
            dtype=call.x.dtype,
        )  # fmt: skip
        return found

    def make() -> Graph:
        return Graph.from_edge_index(normalised()[0], (call.num_rows, call.num_rows), conv.flow)

    graph = store.derived((call.edge_index,), key, make)

    def stored() -> Tensor:
        return in_order_of(graph, normalised()[1])

    owners = (call.edge_index,) if weight is None else (call.edge_index, weight)
    return Matrix(graph, derived(graph, ("laplacian", largest, call.x.dtype), owners, stored))
