"""Transforms for the loaders of PyTorch Geometric, to do work in their worker processes."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

from pyg_accel.graph import Graph
from pyg_accel.graph.matrices import is_edge_index
from pyg_accel.ops.csr import keep_graph
from pyg_accel.runtime.cache import version_of

__all__ = ["BuildCSR"]


class BuildCSR(BaseTransform):
    """Builds the CSR form of every ``edge_index``, which patched layers would build otherwise.

    The data are not changed. Layers that are called with this ``edge_index`` object and all of its
    nodes use the CSR form, also in the main process if a worker process has built it. If the
    ``edge_index`` is replaced, changed in place, or copied (for example to a GPU), layers build it
    as usual.

    As the ``transform`` of a loader that samples, it runs on each batch. A ``DataLoader`` runs the
    transform of its dataset on each graph, before they become a batch: see
    ``docs/how-to/build_graphs_in_workers.md``.

    Args:
        transpose: build the transpose as well, which gradients need.
        flow: of the layers, ``"source_to_target"`` or ``"target_to_source"``.
    """

    def __init__(self, *, transpose: bool = True, flow: str = "source_to_target") -> None:
        """Check and store the options."""
        if flow not in ("source_to_target", "target_to_source"):
            raise ValueError(f"unknown flow '{flow}'")
        self.transpose, self.flow = transpose, flow

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        """Build the CSR form of each edge type that has none."""
        for store in data.edge_stores:
            edge_index = store.get("edge_index")
            if (
                is_edge_index(edge_index)
                and not edge_index.is_inference()
                and None not in (size := store.size())
            ):
                try:
                    graph = Graph.from_edge_index(edge_index, size, self.flow)
                except IndexError:  # more nodes than ``x`` has rows
                    continue
                if self.transpose:
                    graph.transposed(edge_order=True)
                target = 1 if self.flow == "source_to_target" else 0
                if get_worker_info() is None:
                    keep_graph(edge_index, target, graph)
                else:
                    store["edge_index"] = _Parcel.of(edge_index, target, graph)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(transpose={self.transpose}, flow={self.flow!r})"


class _Parcel(Tensor):
    """An edge_index in a worker process that is pickled together with its graph.

    It is unpickled as an ordinary tensor, and operations return ordinary tensors too.
    """

    # The graph of the edge_index, its target row, and its version.
    _sent: tuple[Graph, int, int]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, edge_index: Tensor, target: int, graph: Graph) -> "_Parcel":
        parcel = edge_index.as_subclass(cls)
        parcel._sent = graph, target, version_of(parcel)
        return parcel

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        edge_index = self.as_subclass(Tensor)
        graph, target, version = self._sent
        if version_of(self) != version:  # another transform changed it
            return _plain, (edge_index,)
        arrays = graph.arrays()
        sizes = [None if a is None else a.numel() for a in arrays]
        # One tensor: each one that is sent needs an open file.
        packed = torch.cat([a for a in arrays if a is not None])
        return _unpack, (edge_index, target, graph.num_cols, packed, sizes)


def _plain(edge_index: Tensor) -> Tensor:
    return edge_index


def _unpack(
    edge_index: Tensor, target: int, num_cols: int, packed: Tensor, sizes: list[int | None]
) -> Tensor:
    """Store the graph that was sent with an edge_index, in the process that receives it."""
    parts = iter(packed.split([size for size in sizes if size is not None]))
    arrays = [None if size is None else next(parts) for size in sizes]
    keep_graph(edge_index, target, Graph.of_arrays(arrays, num_cols))
    return edge_index
