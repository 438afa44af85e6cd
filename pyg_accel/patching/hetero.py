"""HeteroConv: all relations in one set of kernels.

It calls a layer for each relation, and a hundred relations are a hundred calls too small to be
worth a kernel. Where all of them are SAGEConv or GraphConv of one shape, the graphs of all
relations are stacked and aggregated over at once, with a row for each pair of a relation and a
target, and each row is multiplied by the matrix of its relation. From there on each type of targets
goes its own way: one that nobody reads has no backward pass, and its weights no gradients.
"""

import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GraphConv, HeteroConv, SAGEConv
from torch_geometric.nn.conv.hetero_conv import group
from torch_geometric.nn.dense import Linear

from pyg_accel.costs import Work, work_of
from pyg_accel.formula import Computation, Operand
from pyg_accel.graph import Graph, for_autograd
from pyg_accel.graph.derived import derived, find
from pyg_accel.machine import is_captured
from pyg_accel.ops.relations import graph_into_pairs, graph_out_of_pairs
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

__all__ = ["forward"]

# What a layer does, and bytes of its features, in the last call that was not ruled out otherwise.
_judged: "weakref.WeakKeyDictionary[HeteroConv, tuple[Work, int]]" = weakref.WeakKeyDictionary()
EdgeType = tuple[str, ...]  # source, relation, target


class Stack(NamedTuple):
    """The graphs of all relations, those into a type of nodes one after another.

    Attributes:
        into: from all nodes to the pairs of a relation and a target.
        outs: of every type of targets, the graph from its pairs to its nodes, and where the pairs
            of each of its relations begin, from 0; on the CPU.
    """

    into: Graph
    outs: tuple[tuple[Graph, Tensor], ...]


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
    if torch_records() or len(args) != 2 or kwargs:
        return original(self, *args, **kwargs)
    xs, edges = args
    if not (isinstance(xs, dict) and isinstance(edges, dict)):
        return original(self, *args)
    judged = _judged.get(self)  # most calls that are too small are like an earlier one
    if judged is not None and _too_small(self, edges, *judged):
        return original(self, *args)
    layers: dict[Any, Any] = {key: conv for key, conv in self.convs.items() if key in edges}
    if len(layers) < 2 or not all(takes_part(conv) for conv in layers.values()):
        return original(self, *args)
    parts = {key: found for key, conv in layers.items() if (found := _parts_of(conv)) is not None}
    if len(parts) < len(layers):
        return original(self, *args)
    targets = list(dict.fromkeys(key[-1] for key in parts))
    parts = dict(sorted(parts.items(), key=lambda part: targets.index(part[0][-1])))
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


def _stacking(
    parts: dict[EdgeType, Parts], xs: dict[str, Tensor], edges: dict[EdgeType, Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of :func:`_stack`: the graphs, and what else tells their stack apart."""
    types = _types_of(parts)
    how = {
        "sizes": tuple(xs[name].size(0) for name in types),
        "ends": tuple((types.index(key[0]), types.index(key[-1])) for key in parts),
    }
    return [edges[key] for key in parts], how


def _types_of(parts: dict[EdgeType, Parts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for key in parts for name in (key[0], key[-1])))


def _stacked(
    parts: dict[EdgeType, Parts], call: gate.Call
) -> tuple[dict[str, Tensor], list[Computation]]:
    """Make the calls of all layers at once."""
    xs, edges = call.args
    self: Any = call.owner
    graphs, how = _stacking(parts, xs, edges)
    key, make = ("relations", *how.values()), for_autograd(partial(_stack, *graphs, **how))
    stack: Stack = derived(graphs, key, make)
    out = _all_at_once(parts, stack, {name: xs[name] for name in _types_of(parts)}, self.aggr)
    return out, [_computed_by(parts)]


def _computed_by(parts: dict[EdgeType, Parts]) -> Computation:
    reduce = next(iter(parts.values())).reduce
    return Computation(Operand("u", 0), (reduce,), relations=len(parts))


def _all_at_once(
    parts: dict[EdgeType, Parts], stack: Stack, xs: dict[str, Tensor], aggr: str | None
) -> dict[str, Tensor]:
    """Make the calls of all layers; ``xs`` are in the order of the nodes of ``stack``."""
    reduce = next(iter(parts.values())).reduce
    rows = spmm(stack.into, torch.cat(list(xs.values())), reduce=reduce)
    targets = dict.fromkeys(key[-1] for key in parts)
    each = rows.split([int(ptr[-1]) for _, ptr in stack.outs])
    out = {}
    for name, (graph, ptr), own in zip(targets, stack.outs, each, strict=True):
        mine = [part for key, part in parts.items() if key[-1] == name]
        own = segment_matmul(own, ptr, torch.stack([part.linear.weight.t() for part in mine]))
        if aggr not in ("sum", "mean"):
            out[name] = group(_apart(mine, graph, ptr, own, xs[name]), aggr)
            continue
        result = spmm(graph, own)
        if roots := [part.root.weight for part in mine if part.root is not None]:
            result = result + xs[name] @ torch.stack(roots).sum(0).t()
        if biases := [part.linear.bias for part in mine if part.linear.bias is not None]:
            result = result + torch.stack(biases).sum(0)
        out[name] = result / len(mine) if aggr == "mean" else result
    return out


def _apart(
    parts: list[Parts], graph: Graph, ptr: Tensor, rows: Tensor, x: Tensor
) -> list[Tensor]:
    """The results of all layers of a type of targets."""
    counts, nodes = ptr.diff().tolist(), graph.transposed().col.long()  # each pair has one
    results = []
    for part, own, ids in zip(parts, rows.split(counts), nodes.split(counts), strict=True):
        result = own.new_zeros(x.size(0), own.size(1)).index_copy(0, ids, own)
        if part.root is not None:
            result = result + x @ part.root.weight.t()
        if part.linear.bias is not None:
            result = result + part.linear.bias
        results.append(result)
    return results


def _stack(*edges: Tensor, sizes: tuple[int, ...], ends: tuple[tuple[int, int], ...]) -> Stack:
    """Stack the graphs of relations between types of nodes: those of a type follow one another."""
    device = edges[0].device
    counts = torch.tensor([ei.size(1) for ei in edges], device=device)
    relation = torch.repeat_interleave(torch.arange(len(edges), device=device), counts)
    *first, total = accumulate(sizes, initial=0)
    moved = []
    for side, ids in enumerate(torch.cat(edges, dim=1).long()):
        most = torch.tensor([sizes[end[side]] for end in ends], device=device)[relation]
        begin = torch.tensor([first[end[side]] for end in ends], device=device)[relation]
        if bool(((ids < 0) | (ids >= most)).any()):  # once moved they would be another type's
            raise IndexError("found ids in 'edge_index_dict' that are no nodes of their type")
        moved.append(ids + begin)
    into, nodes, ptr = graph_into_pairs(*moved, relation, (total, total, len(edges)))
    outs, end = [], 0
    for target, alike in groupby(target for _, target in ends):
        start, end = end, end + len(list(alike))
        own = nodes[int(ptr[start]) : int(ptr[end])] - first[target]
        graph = graph_out_of_pairs(own, sizes[target])
        outs.append((graph, ptr[start : end + 1] - ptr[start]))
    return Stack(into, tuple(outs))


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
    stacked, how = _stacking(parts, xs, edges)
    known = find(stacked, ("relations", *how.values())) is not None
    if is_captured(graphs[0]) and not known:
        return ["stacking waits for the device, and a CUDA graph is captured"]
    _judged[self] = work_of([_computed_by(parts)])._replace(stacks=True), width
    return _too_small(self, {key: edges[key] for key in layers}, *_judged[self], known=known)


def _too_small(
    self: HeteroConv, edges: dict[Any, Any], work: Work, width: int, *, known: bool = False
) -> list[str]:
    first = next(iter(edges.values()), None)
    if not isinstance(first, Tensor):
        return []
    together = sum(graph.size(1) for graph in edges.values())
    return gate.too_small(self, first, together, work, width, known=known)
