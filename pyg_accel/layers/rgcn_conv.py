"""Relational convolution with all relations in one set of kernels."""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import RGCNConv as StockRGCNConv

from pyg_accel import ops
from pyg_accel.backends.dispatch import record_choices
from pyg_accel.calls import record
from pyg_accel.graph import Graph
from pyg_accel.layers.aggregation import module_reasons
from pyg_accel.memo import MEMO

__all__ = ["RGCNConv"]

_REDUCES = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}


class _Relations(NamedTuple):
    """The graphs of all relations, stacked: a row for each target that a relation has edges to.

    Attributes:
        into: from source nodes to the P pairs of a relation and a target, by relation.
        out: from the pairs to the target nodes.
        ptr: [R + 1], where the pairs of every relation begin; on the CPU.
    """

    into: Graph
    out: Graph
    ptr: Tensor


class RGCNConv(StockRGCNConv):
    """:class:`~torch_geometric.nn.conv.RGCNConv`: same arguments, parameters and results.

    PyG loops over relations, and multiplies a matrix of all nodes for each. Here the graphs of all
    relations are stacked: one aggregation to the P pairs of relation and target node that have
    edges (at most as many as edges), one product of segments, one sum over relations. It takes
    P x F memory. The stacked graph is remembered while ``edge_index`` and ``edge_type`` live.

    Node ids instead of features, a sparse matrix instead of an edge_index and several aggregations
    are left to PyG's loop; ``pyg_accel.report()`` says so.
    """

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            x: [N, F], or a pair of them for source and target nodes.
            edge_index: [2, E].
            edge_type: [E], the relation of every edge.

        Returns:
            [N, H].
        """
        start = 0.0 if torch.compiler.is_compiling() else time.perf_counter()
        reasons = self._reasons(x, edge_index, edge_type)
        if reasons:
            # PyG reads the arguments of propagate from here:
            # propagate_type: (x: Tensor, edge_type_ptr: OptTensor)
            out: Tensor = super().forward(x, edge_index, edge_type)
            if start:
                seconds = time.perf_counter() - start
                record(type(self).__name__, "", "PyG", "; ".join(reasons), seconds)
            return out
        source, target = x if isinstance(x, tuple) else (x, x)
        size = (source.size(0), target.size(0), self.num_relations, self.flow)
        relations: _Relations = MEMO(_stack, edge_index, edge_type, *size)
        with record_choices() as names:
            out = self._run(source, relations)
        if start:
            formula = f"{_REDUCES[str(self.aggr)]}_j u0 of every relation"
            seconds = time.perf_counter() - start
            record(type(self).__name__, formula, "+".join(names), "", seconds)
        if self.root is not None:
            out = out + target @ self.root
        return out if self.bias is None else out + self.bias

    def _run(self, x: Tensor, relations: _Relations) -> Tensor:
        rows = ops.spmm(relations.into, x, reduce=_REDUCES[str(self.aggr)])
        if self.num_blocks is not None:
            parts = zip(rows.chunk(self.num_blocks, dim=1), self.weight.unbind(1), strict=True)
            rows = torch.cat([_product(part, relations.ptr, w) for part, w in parts], dim=1)
        else:
            weight: Tensor = self.weight
            if self.num_bases is not None:
                flat = self.comp @ weight.view(self.num_bases, -1)
                weight = flat.view(self.num_relations, self.in_channels_l, self.out_channels)
            rows = _product(rows, relations.ptr, weight)
        summed: Tensor = ops.spmm(relations.out, rows)
        return summed

    def _reasons(self, x: Any, edge_index: Any, edge_type: Tensor | None) -> list[str]:
        """Return why PyG has to do it."""
        reasons = module_reasons(self)
        sides = x if isinstance(x, tuple) else (x,)
        if any(not isinstance(t, Tensor) or not t.is_floating_point() for t in sides):
            reasons.append("node ids in place of features")
        if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
            reasons.append(f"a {type(edge_index).__name__} in place of an edge_index")
        if edge_type is None:
            reasons.append("no edge_type")
        if not isinstance(self.aggr, str) or self.aggr not in _REDUCES:
            reasons.append(f"aggr={self.aggr!r}")
        if torch.compiler.is_compiling():
            reasons.append("torch.compile: the number of pairs depends on the data")
        return reasons


def _product(rows: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, weight.dtype)
    return ops.segment_matmul(rows.to(dtype), ptr, weight.to(dtype))


def _stack(
    edge_index: Tensor, edge_type: Tensor, sources: int, targets: int, relations: int, flow: str
) -> _Relations:
    target, source = edge_index.flip(0) if flow == "source_to_target" else edge_index
    if edge_type.numel() and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < relations:
        raise IndexError(f"found relations outside of [0, {relations})")
    keys, pair = torch.unique(edge_type.long() * max(targets, 1) + target, return_inverse=True)
    into = Graph.from_edge_index(torch.stack([source.long(), pair]), (sources, keys.numel()))
    ids = torch.arange(keys.numel(), device=keys.device)
    out = Graph.from_edge_index(torch.stack([ids, keys % max(targets, 1)]), (keys.numel(), targets))
    starts = torch.arange(relations + 1, device=keys.device) * max(targets, 1)
    return _Relations(into, out, torch.searchsorted(keys, starts).cpu())
