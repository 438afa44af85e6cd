"""HeteroConv: all relations in one set of kernels.

It calls a layer for each relation, and a hundred relations are a hundred calls too small to be
worth a kernel. Where these layers are of one kind and shape (:mod:`.stackable`), the graphs of all
relations are stacked and aggregated over at once, with a row for each pair of a relation and a
target, and each row is multiplied by the matrix of its relation.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import HeteroConv
from torch_geometric.nn.conv.hetero_conv import group
from torch_geometric.utils import add_remaining_self_loops

from pyg_accel.derived import derived, find
from pyg_accel.graph import for_autograd
from pyg_accel.machine import is_captured
from pyg_accel.ops.relations import (
    AttentionRelations,
    Relations,
    stack_attention,
    stack_relations,
)
from pyg_accel.ops.spmm import spmm
from pyg_accel.patching import gate
from pyg_accel.patching.reasons import (
    call_reasons,
    layer_reasons,
    takes_part,
    torch_records,
)
from pyg_accel.patching.relations import stacking_reasons
from pyg_accel.patching.size import work_of
from pyg_accel.patching.stackable import Attention, Parts, aggregate, formula_of, parts_of
from pyg_accel.settings import settings

__all__ = ["forward"]

EdgeType = tuple[str, ...]  # source, relation, target


def forward(original: Callable[..., Any], self: HeteroConv, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``HeteroConv.forward``; where this cannot, a relation is a call of its own."""
    if torch_records() or len(args) != 2 or kwargs:
        return original(self, *args, **kwargs)
    xs, edges = args
    if not (isinstance(xs, dict) and isinstance(edges, dict)):
        return original(self, *args)
    layers: dict[Any, Any] = {key: conv for key, conv in self.convs.items() if key in edges}
    if len(layers) < 2 or not all(takes_part(conv) for conv in layers.values()):
        return original(self, *args)
    parts = {key: found for key, conv in layers.items() if (found := parts_of(conv)) is not None}
    if len(parts) < len(layers):
        return original(self, *args)
    call = gate.Call(original, self, args, {})
    device = next(iter(parts.values())).weight.device
    reasons = _reasons(self, layers, parts, xs, edges)
    return gate.enter(call, reasons, partial(_stacked, parts), device, counts=False)


def _stacking(
    parts: dict[EdgeType, Parts], xs: dict[str, Tensor], edges: dict[EdgeType, Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of :func:`_stack`: the graphs, and what else tells their stack apart."""
    types = _types_of(parts)
    how = {
        "sizes": tuple(xs[name].size(0) for name in types),
        "ends": tuple((types.index(key[0]), types.index(key[-1])) for key in parts),
        "loops": tuple(part.loops for part in parts.values()),
        "attends": isinstance(next(iter(parts.values())).options, Attention),
    }
    return [edges[key] for key in parts], how


def _types_of(parts: dict[EdgeType, Parts]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for key in parts for name in (key[0], key[-1])))


def _stacked(parts: dict[EdgeType, Parts], call: gate.Call) -> tuple[dict[str, Tensor], list[str]]:
    """Make the calls of all layers at once."""
    xs, edges = call.args
    self: Any = call.owner
    graphs, how = _stacking(parts, xs, edges)
    key, make = ("relations", *how.values()), for_autograd(partial(_stack, *graphs, **how))
    relations: Relations | AttentionRelations = derived(graphs, key, make)
    out = _all_at_once(parts, relations, {name: xs[name] for name in _types_of(parts)}, self.aggr)
    return out, [_formula_of(parts)]


def _formula_of(parts: dict[EdgeType, Parts]) -> str:
    return f"{formula_of(next(iter(parts.values())))}, {len(parts)} relations"


def _all_at_once(
    parts: dict[EdgeType, Parts],
    relations: Relations | AttentionRelations,
    xs: dict[str, Tensor],
    aggr: str | None,
) -> dict[str, Tensor]:
    """Make the calls of all layers; ``xs`` are in the order of the nodes of ``relations``."""
    rows = aggregate(list(parts.values()), relations, torch.cat(list(xs.values())))
    if aggr not in ("sum", "mean"):
        return _grouped(parts, relations, rows, xs, aggr)
    sizes = [features.size(0) for features in xs.values()]
    sums = dict(zip(xs, spmm(relations.out, rows).split(sizes), strict=True))
    out = {}
    for name in dict.fromkeys(key[-1] for key in parts):
        mine = [part for key, part in parts.items() if key[-1] == name]
        result = sums[name]
        if mine[0].root is not None:
            own = torch.stack([part.root.weight for part in mine]).sum(0)
            result = result + xs[name] @ own.t()
        if biases := [part.bias for part in mine if part.bias is not None]:
            result = result + torch.stack(biases).sum(0)
        out[name] = result / len(mine) if aggr == "mean" else result
    return out


def _grouped(
    parts: dict[EdgeType, Parts],
    relations: Relations | AttentionRelations,
    rows: Tensor,
    xs: dict[str, Tensor],
    aggr: str | None,
) -> dict[str, Tensor]:
    """Reduce over relations as PyG does, from the result of every layer."""
    begin = dict(zip(xs, accumulate([x.size(0) for x in xs.values()], initial=0), strict=False))
    counts = relations.ptr.diff().tolist()
    nodes = relations.out.transposed().col.long()  # of every pair, which has one
    results: dict[str, list[Tensor]] = {}
    for (key, part), own, ids in zip(
        parts.items(), rows.split(counts), nodes.split(counts), strict=True
    ):
        x = xs[key[-1]]
        result = own.new_zeros(x.size(0), own.size(1)).index_copy(0, ids - begin[key[-1]], own)
        if part.root is not None:
            result = result + x @ part.root.weight.t()
        if part.bias is not None:
            result = result + part.bias
        results.setdefault(key[-1], []).append(result)
    reduced = ((name, group(found, aggr)) for name, found in results.items())
    return {name: out for name, out in reduced if out is not None}  # it is None of no layers


def _stack(
    *edges: Tensor,
    sizes: tuple[int, ...],
    ends: tuple[tuple[int, int], ...],
    loops: tuple[bool, ...],
    attends: bool,
) -> Relations | AttentionRelations:
    """Stack the graphs of relations between types of nodes: those of a type follow one another."""
    device = edges[0].device
    looped = [
        add_remaining_self_loops(ei, num_nodes=min(sizes[end] for end in pair))[0] if loop else ei
        for ei, pair, loop in zip(edges, ends, loops, strict=True)
    ]
    counts = torch.tensor([ei.size(1) for ei in looped], device=device)
    relation = torch.repeat_interleave(torch.arange(len(edges), device=device), counts)
    *first, total = accumulate(sizes, initial=0)
    moved = []
    for side, ids in enumerate(torch.cat(looped, dim=1).long()):
        most = torch.tensor([sizes[end[side]] for end in ends], device=device)[relation]
        begin = torch.tensor([first[end[side]] for end in ends], device=device)[relation]
        if bool(((ids < 0) | (ids >= most)).any()):  # once moved they would be another type's
            raise IndexError("found ids in 'edge_index_dict' that are no nodes of their type")
        moved.append(ids + begin)
    stack = stack_attention if attends else stack_relations
    return stack(moved[0], moved[1], relation, (total, total, len(edges)))


def _reasons(
    self: HeteroConv,
    layers: dict[EdgeType, Any],
    parts: dict[EdgeType, Parts],
    xs: dict[Any, Any],
    edges: dict[EdgeType, Tensor],
) -> list[str]:
    """Why a call is left to the loop."""
    first, one = next(iter(parts.items()))
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
            if type(x) is not Tensor or x.dim() != 2 or x.size(1) != one.weight.size(1):
                return ["features of several widths"]
            if (x.dtype, x.device) != (one.weight.dtype, edges[key].device):
                return ["features of another type or device"]
    for key, conv in layers.items():
        if reasons := layer_reasons(conv, edges[key]):
            return reasons
    if reasons := call_reasons(layers[first], edges[first]):
        return reasons
    width = xs[first[0]].size(1) * one.weight.itemsize
    if isinstance(one.options, Attention) and not settings.always:
        largest = min(graphs, key=lambda graph: graph.size(1))
        alone = work_of([formula_of(one)])
        if not gate.too_small(None, largest, largest.size(1), alone, width, known=True):
            return ["relations that are large enough each"]  # to gather their rows gains nothing
    stacked, how = _stacking(parts, xs, edges)
    known = find(stacked, ("relations", *how.values())) is not None
    if is_captured(graphs[0]) and not known:
        return ["stacking waits for the device, and a CUDA graph is captured"]
    together = sum(graph.size(1) for graph in graphs)
    work = work_of([_formula_of(parts)], 1)
    return gate.too_small(self, edges[first], together, work, width, known=known)
