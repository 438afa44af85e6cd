"""RGCNConv: all relations in one set of kernels.

Its ``forward`` loops over relations and multiplies a matrix of all nodes for each: a hundred
relations are a hundred calls of ``propagate``, each too small to be worth a kernel. It is the one
layer whose loop lies outside of ``propagate``, and so the one whose ``forward`` is replaced (beside
that of HeteroConv, a loop over layers: :mod:`.hetero`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, RGCNConv

from pyg_accel.costs import work_of
from pyg_accel.formula import Computation, Operand
from pyg_accel.graph import for_autograd
from pyg_accel.graph.derived import derived, find
from pyg_accel.ops.relations import Relations, relational_spmm, stack_relations
from pyg_accel.patching import gate
from pyg_accel.patching.reasons import (
    call_reasons,
    is_watched,
    row_bytes,
    subclass_reasons,
    takes_part,
    transform_reasons,
)
from pyg_accel.patching.reductions import is_simple, reduces_of
from pyg_accel.patching.sampling import in_force
from pyg_accel.record.recorder import perform
from pyg_accel.runtime.state import running

__all__ = ["computed_by", "forward", "reduce_of", "stacking_reasons", "weights_of"]

_REDUCES = frozenset({"sum", "mean", "max", "min"})
_OWN = ("message", "aggregate", "update", "message_and_aggregate")


def forward(
    original: Callable[..., Any], self: RGCNConv, x: Any, edge_index: Any, edge_type: Any = None
) -> Any:
    """Stand in for ``RGCNConv.forward``; where this cannot, each relation is a call of its own."""
    if not takes_part(self):
        return original(self, x, edge_index, edge_type)
    call = gate.Call(original, self, (x, edge_index, edge_type), {})
    size = row_bytes({"x": x})
    reasons = _reasons(self, x, edge_index, edge_type, size)
    return gate.enter(call, reasons, _stacked, self.weight.device, row_bytes=size, counts=False)


def _stacked(call: gate.Call) -> tuple[Tensor, list[Computation]]:
    """Make a call over all relations at once."""
    self: Any = call.owner
    x, edge_index, edge_type = call.args
    source, target = x if isinstance(x, tuple) else (x, x)
    sizes = _sizes(self, source, target)
    relations: Relations = perform(
        _relations, edge_index, edge_type, sizes, self.flow, borrows=True
    )
    reduce = str(reduce_of(self))
    out = perform(relational_spmm, relations, source, weights_of(self), reduce=reduce)
    if self.root is not None:
        out = out + target @ self.root
    if self.bias is not None:
        out = out + self.bias
    return out, [computed_by(self)]


def _sizes(self: RGCNConv, source: Tensor, target: Tensor) -> tuple[int, int, int]:
    return source.size(0), target.size(0), self.num_relations


def computed_by(self: RGCNConv) -> Computation:
    """Return what a call computes."""
    return Computation(Operand("u", 0), (str(reduce_of(self)),), relations=self.num_relations)


def reduce_of(self: MessagePassing) -> str | None:
    """Return how a layer reduces its messages; None if that is no sum, mean, maximum or minimum.

    Its ``aggr_module`` does, whatever its ``aggr`` is: that may have been replaced.
    """
    if not is_simple(self.aggr_module):
        return None
    (reduce,) = reduces_of(self.aggr_module) or ("",)
    return reduce if reduce in _REDUCES else None


def _relations(
    edge_index: Tensor, edge_type: Tensor, sizes: tuple[int, int, int], flow: str
) -> Relations:
    """The graphs of all relations, stacked once."""

    @for_autograd
    def make() -> Relations:
        first, second = edge_index
        source, target = (first, second) if flow == "source_to_target" else (second, first)
        return stack_relations(source, target, edge_type, sizes)

    return derived((edge_index, edge_type), ("relations", sizes, flow), make)


def weights_of(self: RGCNConv) -> Tensor:
    """Return the matrix of every relation, [R, F, H]; or its blocks, [R, B, F / B, H / B]."""
    weight: Tensor = self.weight
    if self.num_bases is None:
        return weight
    flat = self.comp @ weight.view(self.num_bases, -1)
    return flat.view(self.num_relations, self.in_channels_l, self.out_channels)


def stacking_reasons(layers: Iterable[MessagePassing], graphs: Sequence[Any]) -> list[str]:
    """Return why relations are not stacked, whatever their layers."""
    if any(type(graph) is not Tensor or graph.layout is not torch.strided for graph in graphs):
        return ["not a plain edge_index"]
    if is_watched(*layers):
        return ["hooks, or methods of their own"]
    if in_force() is not None:
        return ["edges are sampled"]
    return ["autocast"] if torch.is_autocast_enabled(graphs[0].device.type) else []


def _reasons(self: RGCNConv, x: Any, edge_index: Any, edge_type: Any, size: int) -> list[str]:
    """Why a call is left to the loop."""
    if reasons := transform_reasons() or subclass_reasons(x):  # before operators that a mode sees
        return reasons
    if reasons := stacking_reasons([self], [edge_index]):
        return reasons
    sides = x if isinstance(x, tuple) and len(x) == 2 else (x, x)
    if type(edge_type) is not Tensor or edge_type.shape != edge_index.shape[1:]:
        reasons.append("no relation for every edge")
    elif edge_type.dtype not in (torch.int32, torch.int64) or edge_type.device != edge_index.device:
        reasons.append("relations that are no ids")
    for side in sides:
        if not isinstance(side, Tensor) or not side.is_floating_point() or side.dim() != 2:
            reasons.append("not features of nodes")
        elif side.dtype != self.weight.dtype or side.device != edge_index.device:
            reasons.append("features of another type or device")
    if torch.promote_types(self.weight.dtype, torch.get_default_dtype()) != self.weight.dtype:
        reasons.append("relations are added up in another type than the layer's")
    if reduce_of(self) is None:
        reasons.append(f"aggr={self.aggr_module!r}")
    own = [name for name in _OWN if getattr(type(self), name) is not getattr(RGCNConv, name)]
    reasons += [f"a {name} of its own" for name in own]
    if reasons or (reasons := call_reasons(self, edge_index)) or running.recorder:
        return reasons
    key = "relations", _sizes(self, *sides), self.flow
    work = work_of([computed_by(self)])._replace(stacks=1)
    built = find((edge_index, edge_type), key) is not None
    return gate.too_small(self, edge_index, edge_index.size(1), work, size, built=built)
