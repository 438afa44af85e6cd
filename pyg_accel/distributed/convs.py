"""Layers that build their own graphs or read all nodes, over the nodes of all ranks.

As for norms, the ``__class__`` of a module in the model is set to a subclass below.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import DirGNNConv, GPSConv, HGTConv
from torch_geometric.utils import to_dense_batch

from pyg_accel.distributed.halo import exchange, make_halo
from pyg_accel.distributed.norms import num_graphs
from pyg_accel.distributed.tracking import RUNNING, Following, halo_of, running
from pyg_accel.distributed.wire import Wire
from pyg_accel.errors import NotDistributable

__all__ = ["CONVS"]


class AllNodesHGTConv(HGTConv):
    """``HGTConv``, which joins the graphs of all types.

    Each edge type has a halo, so keys and values are exchanged per edge type.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x_dict: dict[Any, Tensor], edge_index_dict: dict[Any, Tensor]) -> Any:
        """Run the layer."""
        with running(exchanged=RUNNING.wire is not None):
            return super().forward(x_dict, edge_index_dict)

    def _construct_src_node_feat(self, k_dict: Any, v_dict: Any, edge_index_dict: Any) -> Any:
        keys, values, begins = super()._construct_src_node_feat(k_dict, v_dict, edge_index_dict)
        if RUNNING.wire is None:
            return keys, values, begins
        parts: list[list[Tensor]] = []
        offsets: dict[Any, int] = {}
        for key, edges in edge_index_dict.items():
            halo = halo_of(edges)
            if halo is None or halo.own != k_dict[key[0]].size(0):
                raise NotDistributable(f"HGTConv was called with edges or features of {key} that "
                                       "distribute() did not return")  # fmt: skip
            own = slice(begins[key], begins[key] + halo.own)
            offsets[key] = sum(len(part[0]) for part in parts)
            parts.append([exchange(halo, keys[own]), exchange(halo, values[own])])
        keys, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return keys, values, offsets


class AllNodesDirGNNConv(DirGNNConv):
    """``DirGNNConv``, whose reversed edges are those that leave the nodes of this rank."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run the layer."""
        if RUNNING.wire is None:
            return super().forward(x, edge_index)
        with Following():
            return super().forward(x, edge_index)


class AllNodesGPSConv(GPSConv):
    """``GPSConv``, in which the nodes of this rank attend to those of all ranks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, edge_index: Any, batch: Any = None, **kwargs: Any) -> Any:
        """Run the layer."""
        wire = RUNNING.wire
        if wire is None:
            return super().forward(x, edge_index, batch, **kwargs)
        out = self._added(self._attended(wire, x, batch), x, self.norm2, batch)
        if self.conv is not None:
            out = out + self._added(self.conv(x, edge_index, **kwargs), x, self.norm1, batch)
        return self._normed(self.norm3, out + self.mlp(out), batch)

    def _added(self, rows: Tensor, x: Tensor, norm: Any, batch: Tensor | None) -> Any:
        return self._normed(norm, F.dropout(rows, self.dropout, self.training) + x, batch)

    def _normed(self, norm: Any, rows: Tensor, batch: Tensor | None) -> Any:
        if norm is None:
            return rows
        return norm(rows, batch=batch) if self.norm_with_batch else norm(rows)

    def _attended(self, wire: Wire, x: Tensor, batch: Tensor | None) -> Tensor:
        """Return the attention of the nodes of this rank to all nodes of their graphs."""
        own = x.new_zeros(x.size(0), dtype=torch.int64) if batch is None else batch
        size = 1 if batch is None else num_graphs(wire, batch)
        cuts = torch.tensor([0, *wire.values(x.size(0))], device=x.device).cumsum(0)
        begin, end = cuts[wire.rank : wire.rank + 2].tolist()
        positions = torch.arange(int(cuts[-1]), device=x.device)
        halo, local = make_halo(wire, positions, cuts, x.size(0), kind="rows")
        rows, graphs = (exchange(halo, t).index_select(0, local) for t in (x, own))
        keys, mask, order = _dense(rows, graphs, size)
        if isinstance(self.attn, torch.nn.MultiheadAttention):
            queries, own_mask, own_order = _dense(x, own, size)
            out, _ = self.attn(queries, keys, keys, key_padding_mask=~mask, need_weights=False)
            return _in_old_order(out[own_mask], own_order)
        return _in_old_order(self.attn(keys, mask=mask)[mask], order)[begin:end]


def _dense(rows: Tensor, batch: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows by graph and their mask, as ``to_dense_batch`` does, and the order of rows."""
    order = batch.argsort(stable=True)
    dense, mask = to_dense_batch(rows[order], batch[order], batch_size=size)
    return dense, mask, order


def _in_old_order(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy(0, order, rows)


CONVS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    cls.__bases__[0]: cls for cls in (AllNodesDirGNNConv, AllNodesGPSConv, AllNodesHGTConv)
}
