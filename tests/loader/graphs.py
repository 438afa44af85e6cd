"""Graphs to sample from."""

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

N, E = 60, 400


def random_data(num_nodes: int = N, num_edges: int = E) -> Data:
    return Data(
        edge_index=torch.randint(num_nodes, (2, num_edges)),
        num_nodes=num_nodes,
        time=torch.randint(50, (num_nodes,)),
        when=torch.randint(50, (num_edges,)),
        weight=torch.rand(num_edges) + 0.1,
    )


def star(degree: int, **attributes: Tensor) -> Data:
    """Nodes 1 to degree, all of them neighbours of node 0."""
    edge_index = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.long)])
    return Data(edge_index=edge_index, num_nodes=degree + 1, **attributes)


def typed_data() -> HeteroData:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes, data["c"].num_nodes = 20, 30, 5
    data["a"].time, data["b"].time = torch.randint(50, (20,)), torch.randint(50, (30,))
    data["c"].time = torch.randint(50, (5,))
    for source, target, count in (("a", "b", 90), ("b", "a", 80), ("b", "b", 120), ("c", "a", 30)):
        ends = [torch.randint(data[kind].num_nodes, (count,)) for kind in (source, target)]
        data[source, "to", target].edge_index = torch.stack(ends)
    return data
