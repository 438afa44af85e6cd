"""What rules share: leaves, normalised adjacencies, linear layers."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_accel import ops
from pyg_accel.cbsr import CBSR
from pyg_accel.layers import MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.ir import Broadcast, Expr, Kind, Leaf, Map
from pyg_accel.rewrite.matrices import (
    Matrix,
    Scores,
    degree_of,
    derived,
    inverse_degree,
    inverse_root,
    looped,
    plain,
    weighted,
)

__all__ = [
    "ExprBuilder",
    "add",
    "cached",
    "check_weight",
    "edges",
    "inverse_count",
    "need_sum",
    "need_sum_or_mean",
    "symmetric",
]

Values = dict[str, Callable[[Call], Value]]


class ExprBuilder:
    """Leaves of an expression while a rule builds it, and how their values are found."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.maps: dict[str, Callable[[Tensor], Any]] = {}
        self.calls: dict[str, Callable[[Call, Tensor], Any]] = {}
        self.scores: dict[str, Callable[..., Tensor | Scores]] = {}
        self.sizes: dict[str, int] = {}
        self.constants: tuple[str, ...] = ()
        self.facts: tuple[Any, ...] = ()
        self.sampled = self.compiles = True

    def algebra(
        self,
        expr: Expr,
        *,
        owners: tuple[str, ...] = ("edge_weight",),
        learned: tuple[str, ...] = (),
        also: tuple[Expr, ...] = (),
    ) -> Algebra:
        """Return the finished algebra."""
        return Algebra(expr, self.values, self.maps, self.scores, owners, learned, self.constants,
                       self.sizes, also, self.calls, self.facts, self.sampled,
                       self.compiles)  # fmt: skip

    def leaf(self, leaf: Leaf, value: Callable[[Call], Value]) -> Leaf:
        """Add a leaf."""
        known = self.values.setdefault(leaf.name, value)
        assert known is value, f"two leaves named {leaf.name}"
        return leaf

    def linear(
        self, name: str, layer: Any, rows: str = "F", cols: str = "H", *, heads: int = 1
    ) -> Leaf:
        """Add the weight of a linear layer, as it multiplies from the right: [in, out]."""
        return self.leaf(Leaf(name, rows, cols, "weight", heads), lambda call: layer.weight.t())

    def affine(self, name: str, layer: Any, x: Leaf, heads: int, *, cols: str = "H") -> Expr:
        """Return what a linear layer with a bias does to features, in ``heads`` heads.

        The bias is a product with a column of ones, so that what comes later can be moved past it.
        """
        out: Expr = x @ self.linear(name, layer, x.cols, cols, heads=heads)
        if layer.bias is None:
            return out
        bias = Leaf(f"{name.lower()}", "1", cols, "weight", heads)
        return out + self.ones(x.rows) @ self.leaf(bias, lambda call: layer.bias.unsqueeze(0))

    def ones(self, rows: str) -> Leaf:
        """Add a column of ones."""
        ones = Leaf(f"e{rows}", rows, "1", "data")
        if ones.name not in self.values:
            self.constants += (ones.name,)
            self.leaf(ones, ones_of(rows))
        return ones

    def number(self, name: str, value: float) -> Leaf:
        """Add a number, as the diagonal that multiplies with it."""
        return self.leaf(Leaf(name, "N", "N", "diagonal", number=True), lambda call: float(value))

    def bias(self, name: str, holder: Any, cols: str = "H") -> tuple[Leaf, ...]:
        """Add ``holder.bias``, if there is one."""
        if holder.bias is None:
            return ()
        return (self.leaf(Leaf(name, "1", cols, "bias"), lambda call: holder.bias),)

    def selected(self, conv: Any, call: Call, x: Expr) -> Expr:
        """Return features as a layer aggregates them: through MaxK, if it is one of those."""
        if not isinstance(conv, (MaxKGCNConv, MaxKGINConv, MaxKSAGEConv)):
            return x
        self.maps["maxk"] = lambda t: ops.maxk(t, conv.k)
        self.sizes["k"] = conv.k
        self.facts += (conv.k,)
        self.sampled = False  # nor does it apply to the layers themselves
        like = CBSR(call.x[:, : conv.k], call.x, call.x.size(1))  # for what it is, not what it has
        width = getattr(conv, "out_channels", call.x.size(1))
        able = call.x.device.type != "meta" and ops.multiplies_compressed(like, width)
        return Map("maxk", x, keeps=True, multiplies=able)

    def sources(self, call: Call) -> Leaf:
        """Add the features of the sources."""
        return self.leaf(Leaf("X", "M" if call.bipartite else "N", "F", "data"), _sources)

    def targets(self, call: Call) -> Leaf:
        """Add the features of the targets; those of the sources if they are the same nodes."""
        if not call.bipartite:
            return self.sources(call)
        return self.leaf(Leaf("Y", "N", "G", "data"), _targets)


def _sources(call: Call) -> Tensor:
    return call.x


def _targets(call: Call) -> Tensor:
    assert call.x_dst is not None
    return call.x_dst


def ones_of(rows: str) -> Callable[[Call], Value]:
    """Return what makes a column of ones, as many as there are targets (N) or sources (M)."""

    def value(call: Call) -> Tensor:
        return call.x.new_ones(call.num_rows if rows == "N" else call.num_cols, 1)

    return value


def add(first: Expr, *others: Expr) -> Expr:
    """Return the sum."""
    total = first
    for other in others:
        total = total + other
    return total


def need_sum(conv: Any) -> None:
    """Decline anything but a sum of messages."""
    if need_sum_or_mean(conv):
        raise NotLifted("a mean of messages")


def need_sum_or_mean(conv: Any) -> bool:
    """Return whether messages are averaged, rather than added; decline anything else."""
    name = type(conv.aggr_module).__name__
    if name not in ("SumAggregation", "MeanAggregation"):
        raise NotLifted(f"aggregation by {name}")
    if conv.node_dim not in (-2, 0):
        raise NotLifted("an unusual node dimension")
    return name == "MeanAggregation"


def edges(parts: ExprBuilder, call: Call, argument: str = "edge_weight") -> Leaf:
    """Add the matrix of edges, with the weights of an argument if there are some."""
    weight = call.given.get(argument)
    columns = "M" if call.bipartite else "N"
    if weight is None:
        return parts.leaf(Leaf("A", "N", columns, "sparse"), plain_matrix)
    check_weight(weight, call)
    leaf = Leaf("A", "N", columns, "weighted")
    return parts.leaf(leaf, lambda call: with_weight(call, call.given[argument]))


def check_weight(weight: Any, call: Call) -> None:
    """Decline what is not one floating-point weight per edge."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise NotLifted("edge weights that are not floating-point")
    if weight.dim() != 1 or weight.size(0) != call.edge_index.size(1):
        raise NotLifted("edge weights that are not one number per edge")


def plain_matrix(call: Call) -> Matrix:
    """Return the matrix of edges without values."""
    return Matrix(plain(call.edge_index, call.num_rows, call.num_cols, call.target))


def with_weight(call: Call, weight: Tensor) -> Matrix:
    """Return the matrix of edges with values [E]."""
    return weighted(plain_matrix(call).graph, weight)


def inverse_count(parts: ExprBuilder) -> Leaf:
    """Add the diagonal that makes means of the sums over A."""
    return parts.leaf(Leaf("D⁻¹", "N", "N", "diagonal", mean_of="A"), inverse_count_of)


def inverse_count_of(call: Call) -> Tensor:
    """Return the numbers that sums over the edges are multiplied with to make means, [N]."""
    return inverse_degree(plain_matrix(call).graph, call.x.dtype)


def cached(parts: ExprBuilder, conv: Any, call: Call) -> Callable[[Expr], Expr] | None:
    """Add the normalised adjacency that a layer keeps in its own place; None if it keeps none.

    As in the layer it is that of the first call, whatever graph comes later.
    """
    if not getattr(conv, "cached", False) or not hasattr(conv, "_cached_edge_index"):
        return None
    weight = call.given.get("edge_weight")
    if call.bipartite or (weight is not None and weight.requires_grad):
        raise NotLifted("cached=True on a bipartite graph or with edge weights that are learned")
    parts.compiles = False  # it may have to be made, which looks for self-loops

    def value(call: Call) -> Matrix:
        if conv._cached_edge_index is None:
            conv._cached_edge_index = gcn_norm(
                call.edge_index, call.given.get("edge_weight"), call.num_rows,
                getattr(conv, "improved", False), conv.add_self_loops, conv.flow, call.x.dtype,
            )  # fmt: skip
        edge_index, values = conv._cached_edge_index
        return weighted(plain(edge_index, call.num_rows, call.num_cols, call.target), values)

    return parts.leaf(Leaf("Â", "N", "N", "weighted"), value).__matmul__


def symmetric(
    parts: ExprBuilder, call: Call, *, loops: bool, fill: float = 1.0
) -> Callable[[Expr], Expr]:
    """Add GCN's normalised adjacency; return what multiplies an expression with it.

    Both sides are divided by the root of the degree: two row broadcasts.
    """
    if call.bipartite:
        raise NotLifted("symmetric normalisation of a bipartite graph")
    parts.facts += (fill,)
    weight = call.given.get("edge_weight")
    if weight is not None:
        check_weight(weight, call)
        if weight.requires_grad:
            raise NotLifted("edge weights that are learned, through their normalisation")

    def matrix(call: Call) -> Matrix:
        weight = call.given.get("edge_weight")
        if loops:
            size = call.num_rows, call.target, fill, call.num_cols
            return looped(call.edge_index, weight, *size)
        return plain_matrix(call) if weight is None else with_weight(call, weight)

    def diagonal(call: Call) -> Tensor:
        found, dtype = matrix(call), call.x.dtype
        owners = () if found.weight is None else (found.weight,)
        return derived(
            found.graph, ("D", fill, dtype), owners,
            lambda: inverse_root(degree_of(found, dtype)),
        )  # fmt: skip

    kind: Kind = "sparse" if weight is None else "weighted"
    a = parts.leaf(Leaf("A", "N", "N", kind), matrix)
    d = parts.leaf(Leaf("D", "N", "N", "diagonal"), diagonal)
    return lambda expr: Broadcast(d, a @ Broadcast(d, expr))
