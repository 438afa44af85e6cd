"""RGCN: a matrix of edges for each relation, or one over the stacked graphs of many."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn import RGCNConv

from pyg_accel.graph import Graph
from pyg_accel.ops.relations import Relations, multiply_relations, stack_relations
from pyg_accel.patching.relations import weights_of
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf, Map
from pyg_accel.rewrite.matrices import Matrix, derived, inverse_degree, plain
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import ExprBuilder, add, need_sum_or_mean

_MANY = 8  # relations from which on they are stacked


@lifts(RGCNConv)
def rgcn(conv: RGCNConv, call: Call) -> Algebra:
    """Σ Dr⁻¹ Ar X Wr + X V + b; of many relations S by-relation(D⁻¹ P X) + X V + b.

    Row (r, i) of P has the edges of relation r to node i, and S adds up the rows of a node. A
    product for each of many relations costs more than their number of edges ever pays back.
    """
    mean = need_sum_or_mean(conv)
    types = call.given.get("edge_type")
    if not isinstance(types, Tensor) or types.dim() != 1 or types.is_floating_point():
        raise NotLifted("edge types that are not one number per edge")
    parts = ExprBuilder()
    parts.compiles = False  # how many edges a relation has is known after looking
    x = parts.sources(call)
    if conv.num_relations >= _MANY:
        terms = [_stacked(parts, call, x, mean=mean)]
    elif conv.num_blocks is not None:
        raise NotLifted("a block-diagonal weight")
    else:
        terms = [_of_relation(parts, r, x, mean=mean) for r in range(conv.num_relations)]
    if conv.root is not None:
        y = parts.targets(call)
        terms.append(y @ parts.leaf(Leaf("V", y.cols, "H", "weight"), lambda call: call.conv.root))
    return parts.algebra(add(*terms, *parts.bias("b", conv)), owners=("edge_type",))


def _stacked(parts: ExprBuilder, call: Call, x: Leaf, *, mean: bool) -> Expr:
    """Products with the stacked graphs of all relations, and one of each row by its relation."""
    if call.halos is not None:
        raise NotLifted("many relations of a graph in several processes")
    relations = _relations(call)
    parts.sampled = False  # a sample of the rows that are added up would be one of relations
    parts.sizes |= {"P": relations.into.num_rows, "H": call.conv.out_channels}
    pairs = parts.leaf(Leaf("P", "P", x.rows, "sparse"), lambda call: Matrix(_relations(call).into))
    rows: Expr = pairs @ x
    if mean:
        rows = _mean(parts, "D⁻¹", pairs, rows, lambda call: _relations(call).into)
    parts.calls["by-relation"] = _by_relation
    summed = parts.leaf(Leaf("S", "N", "P", "sparse"), lambda call: Matrix(_relations(call).out))
    return summed @ Map("by-relation", rows, "H")


def _by_relation(call: Call, rows: Tensor) -> Tensor:
    """Multiply the rows of each relation by its matrix."""
    weight = weights_of(call.conv)
    if torch.is_autocast_enabled(rows.device.type):
        weight = weight.to(rows.dtype)
    return multiply_relations(_relations(call), rows, weight)


def _relations(call: Call) -> Relations:
    """The stacked graphs of all relations."""
    source, target = call.edge_index[1 - call.target], call.edge_index[call.target]
    types: Tensor = call.given["edge_type"]
    sizes = call.num_cols, call.num_rows, call.conv.num_relations

    def stack() -> Relations:
        try:
            return stack_relations(source, target, types, sizes)
        except IndexError as error:
            raise NotLifted("edge types or nodes that the layer does not have") from error

    whole = plain(call.edge_index, call.num_rows, call.num_cols, call.target)
    return derived(whole, ("stacked", sizes), (call.edge_index, types), stack)


def _of_relation(parts: ExprBuilder, r: int, x: Leaf, *, mean: bool) -> Expr:
    a = parts.leaf(Leaf(f"A{r}", "N", x.rows, "sparse"), lambda call: Matrix(_graphs(call)[r]))
    out: Expr = a @ x
    if mean:
        out = _mean(parts, f"D{r}⁻¹", a, out, lambda call: _graphs(call)[r])
    return out @ parts.leaf(Leaf(f"W{r}", "F", "H", "weight"), _weight(r))


def _mean(
    parts: ExprBuilder, name: str, matrix: Leaf, sums: Expr, graph: Callable[[Call], Graph]
) -> Expr:
    """Divide sums over the rows of a matrix by their numbers of entries."""
    inverse = Leaf(name, matrix.rows, matrix.rows, "diagonal", mean_of=matrix.name)
    value = parts.leaf(inverse, lambda call: inverse_degree(graph(call), call.x.dtype))
    return Broadcast(value, sums)


def _graphs(call: Call) -> list[Graph]:
    """The graph of every relation."""
    whole = plain(call.edge_index, call.num_rows, call.num_cols, call.target)
    types: Tensor = call.given["edge_type"]
    most = call.conv.num_relations

    def split() -> list[Graph]:
        if types.numel() and not 0 <= int(types.min()) <= int(types.max()) < most:
            raise NotLifted("edge types that are no relations of the layer")
        size = (call.num_cols, call.num_rows)
        if call.target == 0:
            size = size[::-1]
        return [
            Graph.from_edge_index(call.edge_index[:, types == r], size, call.conv.flow)
            for r in range(most)
        ]

    owners = (call.edge_index, types)
    return derived(whole, ("relations", most), owners, split)


def _weight(r: int):  # type: ignore[no-untyped-def]
    def value(call: Call) -> Value:
        if "weights" not in call.memo:  # combinations of bases are one product for all relations
            call.memo["weights"] = weights_of(call.conv)
        whole: Tensor = call.memo["weights"]
        return whole[r]

    return value
