"""The models that are timed, and the peers: written on torch alone, by all-gather or by halos."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import pyg_accel
from pyg_accel.distributed.tracking import halo_of
from pyg_accel.distributed.wire import Wire

HIDDEN, LAYERS, CLASSES, HEADS, KEPT = 256, 3, 40, 4, 32


def build(name: str, features: int) -> Module:
    torch.manual_seed(0)
    if name == "GAT":
        return GAT(features, HIDDEN, LAYERS, CLASSES, heads=HEADS)
    made = (GCN if name == "GCN" else GraphSAGE)(features, HIDDEN, LAYERS, CLASSES)
    return pyg_accel.to_maxk(made, k=KEPT) if name.endswith("MaxK") else made


class Peer(Module):
    """GCN or GraphSAGE on a function that multiplies this rank's rows of A by features."""

    def __init__(self, name: str, features: int, multiply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [features, *[HIDDEN] * (LAYERS - 1), CLASSES]
        pairs = list(pairwise(sizes))
        self.gcn, self.multiply = name == "GCN", multiply
        self.first = ModuleList(Linear(a, b, bias=not self.gcn) for a, b in pairs)
        self.second = ModuleList(Linear(a, b, bias=False) for a, b in pairs if not self.gcn)
        self.bias = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(b)) for _, b in pairs if self.gcn
        )

    def copy_from(self, model: Module) -> "Peer":
        """Take the parameters of PyG's model."""
        with torch.no_grad():
            for i, conv in enumerate(model.convs):
                self.first[i].weight.copy_((conv.lin if self.gcn else conv.lin_l).weight)
                if self.gcn:
                    self.bias[i].copy_(conv.bias)
                else:
                    self.first[i].bias.copy_(conv.lin_l.bias)
                    self.second[i].weight.copy_(conv.lin_r.weight)
        return self

    def forward(self, x: Tensor) -> Tensor:
        for i, lin in enumerate(self.first):
            if self.gcn:
                x = self.multiply(lin(x)) + self.bias[i]
            else:
                x = lin(self.multiply(x)) + self.second[i](x)
            x = relu(x) if i + 1 < LAYERS else x
        return x


# torch 2.13 renamed both and warns about the old names.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, padded to one length; the backward pass adds up and scatters."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, longest: int, own: Tensor) -> Tensor:
        ctx.wire, ctx.rows = wire, own.size(0)
        padded = own.new_zeros(longest, own.size(1))
        padded[: own.size(0)] = own
        whole = own.new_empty(wire.size * longest, own.size(1))
        with wire.measured("halo", padded.nbytes, whole.nbytes - padded.nbytes):
            ALL_GATHER(whole, padded, group=wire.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        wire, grad = ctx.wire, grad.contiguous()
        own = grad.new_empty(grad.size(0) // wire.size, grad.size(1))
        with wire.measured("halo", grad.nbytes - own.nbytes, own.nbytes):
            REDUCE_SCATTER(own, grad, group=wire.group)
        return None, None, own[: ctx.rows]


class _Exchanged(torch.autograd.Function):
    """Own rows and those that other ranks send, as one would write it in a script."""

    @staticmethod
    def forward(ctx: Any, halo: Any, own: Tensor) -> Tensor:
        ctx.halo = halo
        received = own.new_empty(halo.rows - halo.own, own.size(1))
        halo.wire.exchange(received, halo.receive, own[halo.requested], halo.send, "halo")
        return torch.cat([own, received])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        halo = ctx.halo
        received = grad.new_empty(halo.requested.numel(), grad.size(1))
        sent = grad[halo.own :].contiguous()
        halo.wire.exchange(received, halo.send, sent, halo.receive, "halo")
        return None, grad[: halo.own].index_add(0, halo.requested, received)


def peer(kind: str, name: str, data: Data, whole: Data, wire: Wire, cuts: Tensor) -> Module:
    """A peer's model, wrapped by DDP, on this rank's share of the graph."""
    edges, halo = data.edge_index, halo_of(data.edge_index)
    degree = torch.bincount(whole.edge_index[1], minlength=whole.num_nodes).float()
    low, high = int(cuts[wire.rank]), int(cuts[wire.rank + 1])
    rows = edges[1]
    mine = (whole.edge_index[1] >= low) & (whole.edge_index[1] < high)
    sources = whole.edge_index[0][mine]  # in the order of `edges`
    own = torch.arange(low, high, device=wire.device)
    local, columns = edges[0], halo.rows
    if name == "GCN":
        loops = sources != rows + low
        rows, sources, local = rows[loops], sources[loops], local[loops]
        plain = torch.bincount(rows, minlength=high - low)
        all_plain = wire_concatenated(wire, plain, cuts)
        root = (all_plain + 1).float().pow(-0.5)
        rows = torch.cat([rows, own - low])
        sources, local = torch.cat([sources, own]), torch.cat([local, own - low])
        values = root[sources] * root[rows + low]
    else:
        values = 1 / degree[rows + low]
    if kind == "all-gather":
        longest = int(cuts.diff().max())
        at = torch.searchsorted(cuts.to(wire.device), sources, right=True) - 1
        local, columns = sources - cuts.to(wire.device)[at] + at * longest, wire.size * longest
    size = (high - low, columns)
    a = torch.sparse_coo_tensor(torch.stack([rows, local]), values, size).coalesce()
    a_t = a.t().coalesce().to_sparse_csr()
    a = a.to_sparse_csr()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return a @ h

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return a_t @ grad

    def multiply(h: Tensor) -> Tensor:
        if kind == "all-gather":
            return Product.apply(_Gathered.apply(wire, longest, h))
        return Product.apply(_Exchanged.apply(halo, h))

    model = Peer(name, data.x.size(1), multiply).to(wire.device)
    return DistributedDataParallel(model.copy_from(build(name, data.x.size(1))))


def wire_concatenated(wire: Wire, own: Tensor, cuts: Tensor) -> Tensor:
    """One number a node of every rank, in the order of the nodes."""
    whole = own.new_zeros(int(cuts[-1]))
    whole[int(cuts[wire.rank]) : int(cuts[wire.rank + 1])] = own
    return wire.total(whole)
