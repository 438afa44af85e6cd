"""A matrix of edges for each relation: RGCN."""

from torch import Tensor
from torch_geometric.nn import RGCNConv

from pyg_accel.graph import Graph
from pyg_accel.rewrite.algebra import Algebra, Call, NotLifted, Value
from pyg_accel.rewrite.ir import Broadcast, Expr, Leaf
from pyg_accel.rewrite.matrices import Matrix, derived, plain
from pyg_accel.rewrite.registry import lifts
from pyg_accel.rewrite.rules.common import ExprBuilder, add, need_sum_or_mean


@lifts(RGCNConv)
def rgcn(conv: RGCNConv, call: Call) -> Algebra:
    """Σ Dr⁻¹ Ar X Wr + X V + b."""
    mean = need_sum_or_mean(conv)
    if conv.num_blocks is not None:
        raise NotLifted("a block-diagonal weight")
    types = call.given.get("edge_type")
    if not isinstance(types, Tensor) or types.dim() != 1 or types.is_floating_point():
        raise NotLifted("edge types that are not one number per edge")
    parts = ExprBuilder()
    parts.compiles = False  # how many edges a relation has is known after looking
    x = parts.sources(call)
    terms: list[Expr] = []
    for r in range(conv.num_relations):
        a = parts.leaf(Leaf(f"A{r}", "N", x.rows, "sparse"), _relation(r))
        out: Expr = a @ x
        if mean:
            name = f"D{r}⁻¹"
            inverse = Leaf(name, "N", "N", "diagonal", mean_of=a.name)
            out = Broadcast(parts.leaf(inverse, _inverse(r)), out)
        terms.append(out @ parts.leaf(Leaf(f"W{r}", "F", "H", "weight"), _weight(r)))
    if conv.root is not None:
        y = parts.targets(call)
        terms.append(y @ parts.leaf(Leaf("V", y.cols, "H", "weight"), lambda call: call.conv.root))
    return parts.algebra(add(*terms, *parts.bias("b", conv)), owners=("edge_type",))


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


def _relation(r: int):  # type: ignore[no-untyped-def]
    return lambda call: Matrix(_graphs(call)[r])


def _inverse(r: int):  # type: ignore[no-untyped-def]
    def value(call: Call) -> Value:
        graph, dtype = _graphs(call)[r], call.x.dtype
        return derived(graph, ("D⁻¹", dtype), (), lambda: 1 / graph.degree.clamp(min=1).to(dtype))

    return value


def _weight(r: int):  # type: ignore[no-untyped-def]
    def value(call: Call) -> Tensor:
        conv = call.conv
        if conv.num_bases is None:
            found: Tensor = conv.weight[r]
            return found
        if "weights" not in call.memo:  # combinations of the bases, all in one product
            flat = conv.comp @ conv.weight.view(conv.num_bases, -1)
            call.memo["weights"] = flat.view(conv.num_relations, *conv.weight.shape[1:])
        whole: Tensor = call.memo["weights"]
        return whole[r]

    return value
