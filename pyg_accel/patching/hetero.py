"""HeteroConv: all relations in one set of kernels.

It calls a layer for each relation, and a hundred relations are a hundred calls too small to be
worth a kernel. Where these layers are SAGEConv or GraphConv of one shape, the graphs of all
relations are stacked and summed over at once, and each relation's sums multiplied by its matrix.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import GraphConv, HeteroConv, SAGEConv
from torch_geometric.nn.dense import Linear

from pyg_accel.backends.dispatch import record_choices
from pyg_accel.call_report import record
from pyg_accel.memo import MEMO
from pyg_accel.ops.relations import Relations, relational_spmm, stack_relations
from pyg_accel.patching.reasons import (
    call_reasons,
    is_watched,
    kind_reasons,
    layer_reasons,
    new_graph_reasons,
    size_reasons,
    takes_part,
    torch_records,
)
from pyg_accel.patching.relations import MANY, REDUCES
from pyg_accel.patching.rng_state import random_state
from pyg_accel.patching.sampling import in_force
from pyg_accel.patching.verification import verify
from pyg_accel.settings import settings

__all__ = ["forward"]

FLOW = "source_to_target"
EdgeType = tuple[str, ...]  # source, relation, target
# The matrices of a layer: for the neighbours, with the bias, and for the target itself.
_MATRICES = {SAGEConv: ("lin_l", "lin_r"), GraphConv: ("lin_rel", "lin_root")}


def forward(original: Callable[..., Any], self: HeteroConv, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``HeteroConv.forward``; where this cannot, a relation is a call of its own."""
    taken = len(args) == 2 and not kwargs and all(isinstance(arg, dict) for arg in args)
    if torch_records() or not taken:
        return original(self, *args, **kwargs)
    xs, edges = args
    layers: dict[Any, Any] = {key: conv for key, conv in self.convs.items() if key in edges}
    if len(layers) < 2 or _reasons(self, layers, xs, edges):
        return original(self, xs, edges)
    start = time.perf_counter()
    state = random_state(next(iter(xs.values())).device) if settings.verify else None
    types = tuple(dict.fromkeys(name for key in layers for name in (key[0], key[-1])))
    sizes = tuple(xs[name].size(0) for name in types)
    ends = tuple((types.index(key[0]), types.index(key[-1])) for key in layers)
    try:
        relations: Relations = MEMO(_stack, *[edges[key] for key in layers], sizes=sizes, ends=ends)
    except IndexError:  # ids out of range: PyG raises what PyG raises
        return original(self, xs, edges)
    with record_choices() as names:
        out = _all_at_once(layers, relations, {name: xs[name] for name in types}, self.aggr)
    if state is not None:
        joined = torch.cat(list(out.values()))
        verify(lambda *given: torch.cat(list(original(*given).values())), self, xs, (edges,), {},
               joined, state)  # fmt: skip
    reduce = REDUCES[str(next(iter(layers.values())).aggr)]
    formula, seconds = f"{reduce}_j u0, {len(layers)} relations", time.perf_counter() - start
    record(type(self).__name__, formula, "+".join(names), "", seconds)
    return out


def _all_at_once(
    layers: dict[EdgeType, Any], relations: Relations, xs: dict[str, Tensor], aggr: str | None
) -> dict[str, Tensor]:
    """Make the calls of all layers; ``xs`` are in the order of the nodes of ``relations``."""
    convs = list(layers.values())
    neighbour, root = _MATRICES[type(convs[0])]
    weight = torch.stack([getattr(conv, neighbour).weight.t() for conv in convs])
    x, reduce = torch.cat(list(xs.values())), REDUCES[str(convs[0].aggr)]
    sizes = [features.size(0) for features in xs.values()]
    sums = dict(zip(xs, relational_spmm(relations, x, weight, reduce=reduce).split(sizes),
                    strict=True))  # fmt: skip
    out = {}
    for name in dict.fromkeys(key[-1] for key in layers):
        mine = [conv for key, conv in layers.items() if key[-1] == name]
        result = sums[name]
        if hasattr(mine[0], root):
            own = torch.stack([getattr(conv, root).weight for conv in mine]).sum(0)
            result = result + xs[name] @ own.t()
        if getattr(mine[0], neighbour).bias is not None:
            result = result + torch.stack([getattr(conv, neighbour).bias for conv in mine]).sum(0)
        out[name] = result / len(mine) if aggr == "mean" else result
    return out


def _stack(*edges: Tensor, sizes: tuple[int, ...], ends: tuple[tuple[int, int], ...]) -> Relations:
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
    return stack_relations(moved[0], moved[1], relation, (total, total, len(edges)))


def _reasons(
    self: HeteroConv, layers: dict[EdgeType, Any], xs: dict[str, Any], edges: dict[EdgeType, Any]
) -> list[str]:
    """Why a call is left to the loop."""
    if self.aggr not in ("sum", "mean"):
        return [f"aggr={self.aggr!r}"]
    kinds = {_kind(conv) for conv in layers.values()}
    if len(kinds) > 1 or None in kinds:
        return ["layers that are not SAGEConv, or GraphConv, of one shape"]
    one = next(iter(layers.values()))
    first, second = _MATRICES[type(one)]
    neighbour, root = getattr(one, first), getattr(one, second, None)
    if is_watched(*layers.values()):
        return ["hooks, or methods of their own"]
    weight = neighbour.weight
    for key in layers:
        if type(edges[key]) is not Tensor or edges[key].layout != torch.strided:
            return ["not a plain edge_index"]
        for name in (key[0], key[-1]):
            x = xs.get(name)
            if type(x) is not Tensor or x.dim() != 2 or x.size(1) != weight.size(1):
                return ["features of several widths"]
            if (x.dtype, x.device) != (weight.dtype, edges[key].device):
                return ["features of another type or device"]
    if root is not None and (root.weight.shape != weight.shape or root.bias is not None):
        return ["another matrix for the targets than the layer makes"]
    if in_force() is not None or torch.is_autocast_enabled(weight.device.type):
        return ["edges are sampled, or autocast"]
    return _of_every_call(layers, edges)


def _of_every_call(layers: dict[EdgeType, Any], edges: dict[EdgeType, Tensor]) -> list[str]:
    if len(layers) < MANY:
        together = sum(edges[key].size(-1) for key in layers)
        first = edges[next(iter(layers))]
        device = first.device.type
        if reasons := (
            size_reasons(together, device) or kind_reasons("relations", together, device)
            or new_graph_reasons("relations", together, first, id(next(iter(layers.values()))))
        ):  # fmt: skip
            return reasons
    for key, conv in layers.items():
        if not takes_part(conv):
            return ["not patched"]
        if reasons := layer_reasons(conv, edges[key]):
            return reasons
    key, conv = next(iter(layers.items()))
    return call_reasons(conv, edges[key], any_size=True)


def _kind(conv: Any) -> tuple[Any, ...] | None:
    """What layers that go together have in common; None for one that does not go with any."""
    if type(conv) not in _MATRICES or not isinstance(conv.aggr, str) or conv.aggr not in REDUCES:
        return None
    if getattr(conv, "project", False) or getattr(conv, "normalize", False):
        return None
    linears: Sequence[Any] = [getattr(conv, name, None) for name in _MATRICES[type(conv)]]
    for lin in linears:
        if lin is not None and (type(lin) is not Linear or is_lazy(lin.weight)):
            return None
    shapes = [lin and (tuple(lin.weight.shape), lin.bias is None) for lin in linears]
    return (type(conv), conv.aggr, *shapes) if conv.flow == FLOW else None
