"""HeteroConv: all relations in one set of kernels.

It calls a layer for each relation, and a hundred relations are a hundred calls too small to be
worth a kernel. Where all of them are SAGEConv or GraphConv of one shape, the graphs of all
relations into a type of nodes are stacked and aggregated over at once, with a row for each pair of
a relation and a target, and each row is multiplied by the matrix of its relation. Types of targets
stay apart: one that nobody reads has no backward pass, and its weights no gradients, as in PyG.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GraphConv, HeteroConv, SAGEConv
from torch_geometric.nn.conv.hetero_conv import group
from torch_geometric.nn.dense import Linear

from pyg_accel.costs import OF_TARGETS, Work, relational_work
from pyg_accel.formula import Computation, Operand
from pyg_accel.graph import for_autograd
from pyg_accel.graph.derived import derived, find
from pyg_accel.ops.relations import Relations, relational_spmm, stack_relations
from pyg_accel.ops.segment_matmul import segment_matmul
from pyg_accel.ops.spmm import spmm
from pyg_accel.patching import gate
from pyg_accel.patching.reasons import (
    call_reasons,
    layer_reasons,
    takes_part,
    torch_records,
)
from pyg_accel.patching.relations import reduce_of, stacking_reasons
from pyg_accel.runtime.machine import is_captured
from pyg_accel.runtime.state import running

__all__ = ["forward"]

# What a layer does, and bytes of its features, in the last call that was not ruled out otherwise.
_judged: "weakref.WeakKeyDictionary[HeteroConv, tuple[Work, int]]" = weakref.WeakKeyDictionary()
EdgeType = tuple[str, ...]  # source, relation, target


class Parts(NamedTuple):
    """What a layer computes with.

    Attributes:
        reduce: how neighbours are reduced.
        linear: what the result is multiplied by, and its bias.
        root: what the target's own features are multiplied by, without a bias; or None.
    """

    reduce: str
    linear: Any
    root: Any

    def kind(self) -> tuple[Any, ...]:
        """What parts of layers that run together have in common."""
        root = None if self.root is None else self.root.weight.shape
        return self.reduce, self.linear.weight.shape, self.linear.bias is None, root


def forward(original: Callable[..., Any], self: HeteroConv, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``HeteroConv.forward``; where this cannot, a relation is a call of its own."""
    if torch_records() or len(args) != 2 or kwargs or running.wire is not None:
        return original(self, *args, **kwargs)
    xs, edges = args
    if not (isinstance(xs, dict) and isinstance(edges, dict)):
        return original(self, *args)
    judged = _judged.get(self)  # most calls that are too small are like an earlier one
    if judged is not None and _too_small(self, xs, edges, *judged):
        return original(self, *args)
    layers: dict[Any, Any] = {key: conv for key, conv in self.convs.items() if key in edges}
    if len(layers) < 2 or not all(takes_part(conv) for conv in layers.values()):
        return original(self, *args)
    parts = {key: found for key, conv in layers.items() if (found := _parts_of(conv)) is not None}
    if len(parts) < len(layers):
        return original(self, *args)
    call = gate.Call(original, self, args, {})
    device = next(iter(parts.values())).linear.weight.device
    reasons = _reasons(self, layers, parts, xs, edges)
    return gate.enter(call, reasons, partial(_stacked, parts), device, counts=False)


def _parts_of(conv: Any) -> Parts | None:
    """The parts of a layer; None for one that computes something else."""
    if type(conv) is SAGEConv and not (conv.project or conv.normalize):
        linear, root = conv.lin_l, conv.lin_r if conv.root_weight else None
    elif type(conv) is GraphConv:
        linear, root = conv.lin_rel, conv.lin_root
    else:
        return None
    linears = [linear] if root is None else [linear, root]
    if any(type(lin) is not Linear or is_lazy(lin.weight) for lin in linears):
        return None
    reduce, weight = reduce_of(conv), linear.weight
    if reduce is None or conv.flow != "source_to_target" or getattr(root, "bias", None) is not None:
        return None
    tensors = [t for lin in linears for t in lin.parameters()]
    if any(t.dtype != weight.dtype for t in tensors):
        return None
    return Parts(reduce, linear, root) if linears[-1].weight.size(1) == weight.size(1) else None


def _by_target(parts: dict[EdgeType, Parts]) -> dict[str, dict[EdgeType, Parts]]:
    """The layers of the relations into each type of nodes."""
    apart: dict[str, dict[EdgeType, Parts]] = {}
    for key, part in parts.items():
        apart.setdefault(key[-1], {})[key] = part
    return apart


def _stacking(
    relations: Sequence[EdgeType], xs: dict[str, Tensor], edges: dict[EdgeType, Tensor]
) -> tuple[list[str], list[Tensor], dict[str, Any]]:
    """Types of sources, and the arguments of :func:`_stack`: graphs, and what else it reads."""
    sources = list(dict.fromkeys(key[0] for key in relations))
    how = {
        "sizes": tuple(xs[name].size(0) for name in sources),
        "ends": tuple(sources.index(key[0]) for key in relations),
        "targets": xs[relations[0][-1]].size(0),
    }
    return sources, [edges[key] for key in relations], how


def _stacked(
    parts: dict[EdgeType, Parts], call: gate.Call
) -> tuple[dict[str, Tensor], list[Computation]]:
    """Make the calls of all layers at once."""
    xs, edges = call.args
    self: Any = call.owner
    out = {}
    for name, mine in _by_target(parts).items():
        sources, graphs, how = _stacking(list(mine), xs, edges)
        key, make = ("relations", *how.values()), for_autograd(partial(_stack, *graphs, **how))
        relations: Relations = derived(graphs, key, make)
        x = torch.cat([xs[source] for source in sources]) if sources[1:] else xs[sources[0]]
        out[name] = _into_target(list(mine.values()), relations, x, xs[name], self.aggr)
    return out, [_computed_by(parts)]


def _computed_by(parts: dict[EdgeType, Parts]) -> Computation:
    reduce = next(iter(parts.values())).reduce
    return Computation(Operand("u", 0), (reduce,), relations=len(parts))


def _into_target(
    parts: list[Parts], relations: Relations, source: Tensor, target: Tensor, aggr: str | None
) -> Tensor:
    """Make the calls of all layers into a type of nodes."""
    weight = torch.stack([part.linear.weight.t() for part in parts])
    if aggr not in ("sum", "mean"):
        rows = spmm(relations.into, source, reduce=parts[0].reduce)
        rows = segment_matmul(rows, relations.ptr, weight)
        return cast("Tensor", group(_apart(parts, relations, rows, target), aggr))
    result = relational_spmm(relations, source, weight, reduce=parts[0].reduce)
    if roots := [part.root.weight for part in parts if part.root is not None]:
        result = result + target @ torch.stack(roots).sum(0).t()
    if biases := [part.linear.bias for part in parts if part.linear.bias is not None]:
        result = result + torch.stack(biases).sum(0)
    return result / len(parts) if aggr == "mean" else result


def _apart(parts: list[Parts], relations: Relations, rows: Tensor, target: Tensor) -> list[Tensor]:
    """The result of every layer, which PyG reduces."""
    counts = relations.ptr.diff().tolist()
    nodes = relations.out.transposed().col.long()  # of every pair, which has one
    results = []
    for part, own, ids in zip(parts, rows.split(counts), nodes.split(counts), strict=True):
        result = own.new_zeros(target.size(0), own.size(1)).index_copy(0, ids, own)
        if part.root is not None:
            result = result + target @ part.root.weight.t()
        if part.linear.bias is not None:
            result = result + part.linear.bias
        results.append(result)
    return results


def _stack(
    *edges: Tensor, sizes: tuple[int, ...], ends: tuple[int, ...], targets: int
) -> Relations:
    """Stack the graphs of relations into a type of nodes; types of sources follow one another."""
    device = edges[0].device
    counts = torch.tensor([ei.size(1) for ei in edges], device=device)
    relation = torch.repeat_interleave(torch.arange(len(edges), device=device), counts)
    *first, total = accumulate(sizes, initial=0)
    source, target = torch.cat(edges, dim=1).long()
    most = torch.tensor([sizes[end] for end in ends], device=device)[relation]
    if bool(((source < 0) | (source >= most)).any()):  # once moved they would be another type's
        raise IndexError("found ids in 'edge_index_dict' that are no nodes of their type")
    source = source + torch.tensor([first[end] for end in ends], device=device)[relation]
    return stack_relations(source, target, relation, (total, targets, len(edges)))


def _reasons(
    self: HeteroConv,
    layers: dict[EdgeType, Any],
    parts: dict[EdgeType, Parts],
    xs: dict[Any, Any],
    edges: dict[EdgeType, Tensor],
) -> list[str]:
    """Why a call is left to the loop."""
    first, one = next(iter(parts.items()))
    weight = one.linear.weight
    graphs = [edges[key] for key in layers]
    if reasons := stacking_reasons(layers.values(), graphs):
        return reasons
    if len({part.kind() for part in parts.values()}) > 1:
        return ["layers of several shapes"]
    if any(isinstance(name, tuple) for name in xs):
        return ["features of relations"]
    for key in layers:
        for name in (key[0], key[-1]):
            x = xs.get(name)
            if type(x) is not Tensor or x.dim() != 2 or x.size(1) != weight.size(1):
                return ["features of several widths"]
            if (x.dtype, x.device) != (weight.dtype, edges[key].device):
                return ["features of another type or device"]
    for key, conv in layers.items():
        if reasons := layer_reasons(conv, edges[key]):
            return reasons
    if reasons := call_reasons(layers[first], edges[first]):
        return reasons
    width = xs[first[0]].size(1) * weight.itemsize
    stacks = [_stacking(list(mine), xs, edges) for mine in _by_target(parts).values()]
    built = all(find(own, ("relations", *how.values())) is not None for _, own, how in stacks)
    if is_captured(graphs[0]) and not built:
        return ["stacking waits for the device, and a CUDA graph is captured"]
    _judged[self] = relational_work(_computed_by(parts), len(stacks)), width
    own = {key: edges[key] for key in layers}
    return _too_small(self, xs, own, *_judged[self], built=built)


def _too_small(
    self: HeteroConv, xs: dict[Any, Any], edges: dict[Any, Any], work: Work, width: int, *,
    built: bool = False,
) -> list[str]:  # fmt: skip
    first = next(iter(edges.values()), None)
    if not isinstance(first, Tensor):
        return []
    together = sum(graph.size(1) for graph in edges.values())
    rows = sum(x.size(0) for key in edges if isinstance(x := xs.get(key[-1]), Tensor))
    work = work._replace(tensors=1.0 + OF_TARGETS * round(rows / max(together, 1), 1))
    return gate.too_small(self, first, together, work, width, built=built)
