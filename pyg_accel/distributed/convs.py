"""Layers that make a graph of their own, or look at all nodes, over those of all ranks.

As for norms, a module of the model becomes one of a class below, a subclass of its own: parameters,
buffers and settings stay.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import DirGNNConv, GPSConv, HANConv, HGTConv
from torch_geometric.utils import to_dense_batch

from pyg_accel.distributed.halo import exchange
from pyg_accel.distributed.known import RUNNING, Following, halo_of, running
from pyg_accel.distributed.sums import gathered, num_graphs, total
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = ["CONVS"]


class AllNodesHGTConv(HGTConv):
    """``HGTConv``, which joins the graphs of all types: each with the keys and values of its halo.

    A halo is that of an edge type, so they are exchanged where sources are listed by edge type.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_dict: dict[Any, Tensor], edge_index_dict: dict[Any, Tensor]) -> Any:
        """Run the layer."""
        with running(exchanged=RUNNING.wire is not None):
            return super().forward(x_dict, edge_index_dict)

    def _construct_src_node_feat(
        self,
        k_dict: dict[Any, Tensor],
        v_dict: dict[Any, Tensor],
        edge_index_dict: dict[Any, Tensor],
    ) -> tuple[Tensor, Tensor, dict[Any, int]]:
        keys, values, begins = super()._construct_src_node_feat(k_dict, v_dict, edge_index_dict)
        if RUNNING.wire is None:
            return keys, values, begins
        found: list[list[Tensor]] = []
        offsets: dict[Any, int] = {}
        rows = 0
        for key, edges in edge_index_dict.items():
            halo = halo_of(edges)
            if halo is None or halo.own != k_dict[key[0]].size(0):
                raise NotDistributable(f"HGTConv was called with edges or features of {key} that "
                                       "distribute() did not return")  # fmt: skip
            own = slice(begins[key], begins[key] + halo.own)
            found.append(exchange(halo, [keys[own], values[own]]))
            offsets[key], rows = rows, rows + halo.rows
        return *(torch.cat(parts) for parts in zip(*found, strict=True)), offsets  # type: ignore[return-value]


class AllNodesHANConv(HANConv):
    """``HANConv``, whose weights of edge types are means over the nodes of all ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        x_dict: dict[Any, Tensor],
        edge_index_dict: dict[Any, Tensor],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """Run the layer."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x_dict, edge_index_dict, return_semantic_attention_weights)
        shape = -1, self.heads, self.out_channels // self.heads
        rows = {key: self.proj[key](x).view(shape) for key, x in x_dict.items()}
        sums: dict[Any, list[Tensor]] = {key: [] for key in x_dict}
        for key, edges in edge_index_dict.items():
            name, ends = "__".join(key), (rows[key[0]], rows[key[-1]])
            alpha = tuple(
                (end * lin[name]).sum(-1)
                for end, lin in zip(ends, (self.lin_src, self.lin_dst), strict=True)
            )
            sums[key[-1]].append(F.relu(self.propagate(edges, x=ends, alpha=alpha)))
        outs: dict[Any, Tensor | None] = dict.fromkeys(x_dict)
        weights: dict[Any, Tensor | None] = dict.fromkeys(x_dict)
        for key, several in sums.items():
            if several:
                out = torch.stack(several)  # [edge types, own, F]
                number = total(wire, out.new_full((), float(out.size(1))))
                mean = total(wire, self.k_lin(out).tanh().sum(1)) / number.clamp(min=1)
                weight = (self.q * mean).sum(-1).softmax(0)
                outs[key], weights[key] = (weight.view(-1, 1, 1) * out).sum(0), weight
        return (outs, weights) if return_semantic_attention_weights else outs


class AllNodesDirGNNConv(DirGNNConv):
    """``DirGNNConv``, whose edges that are turned round are those that leave this rank's nodes."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run the layer."""
        if RUNNING.wire is None:
            return super().forward(x, edge_index)
        with Following():
            return super().forward(x, edge_index)


class AllNodesGPSConv(GPSConv):
    """``GPSConv``, in which this rank's nodes attend to those of all ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, x: Tensor, edge_index: Any, batch: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the layer."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, edge_index, batch, **kwargs)
        terms = []
        if self.conv is not None:
            near = self.conv(x, edge_index, **kwargs)
            terms.append(self._added(near, x, self.norm1, batch))
        terms.append(self._added(self._attended(wire, x, batch), x, self.norm2, batch))
        out = sum(terms[1:], terms[0])
        return self._normed(self.norm3, out + self.mlp(out), batch)

    def _added(self, rows: Tensor, x: Tensor, norm: Any, batch: Tensor | None) -> Tensor:
        return self._normed(norm, F.dropout(rows, self.dropout, self.training) + x, batch)

    def _normed(self, norm: Any, rows: Tensor, batch: Tensor | None) -> Tensor:
        if norm is None:
            return rows
        out: Tensor = norm(rows, batch=batch) if self.norm_with_batch else norm(rows)
        return out

    def _attended(self, wire: Wire, x: Tensor, batch: Tensor | None) -> Tensor:
        """Return what this rank's nodes make of all nodes of their graphs."""
        own = x.new_zeros(x.size(0), dtype=torch.int64) if batch is None else batch
        size = num_graphs(wire, batch)
        rows, graphs = gathered(wire, x), gathered(wire, own)
        keys, kept, order = _dense(rows, graphs, size)
        if isinstance(self.attn, torch.nn.MultiheadAttention):
            queries, mine, own_order = _dense(x, own, size)
            out, _ = self.attn(queries, keys, keys, key_padding_mask=~kept, need_weights=False)
            return _undone(out[mine], own_order)
        out = _undone(self.attn(keys, mask=kept)[kept], order)
        begin = int(gathered(wire, own.new_tensor([x.size(0)]))[: wire.rank].sum())
        return out[begin : begin + x.size(0)]


def _dense(rows: Tensor, batch: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by graph, as ``to_dense_batch`` has them of a batch in order, and the order."""
    order = batch.argsort(stable=True)
    dense, mask = to_dense_batch(rows[order], batch[order], batch_size=size)
    return dense, mask, order


def _undone(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy(0, order, rows)


CONVS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    DirGNNConv: AllNodesDirGNNConv,
    GPSConv: AllNodesGPSConv,
    HANConv: AllNodesHANConv,
    HGTConv: AllNodesHGTConv,
}
