"""What the neighbour sampler refuses, what it reports, and graphs that are nearly empty."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NeighborSampler

import pyg_accel
from tests.loader.graphs import E, N, random_data, star, typed_data

pytestmark = pytest.mark.usefixtures("patched_without_other_samplers", "each_library")


def test_the_report_says_who_sampled():
    pyg_accel.reset_report()
    NeighborSampler(random_data(), [2, 2])._sample(torch.arange(4))
    (row,) = pyg_accel.report().rows
    assert (row.layer, row.formula, row.backend) == ("NeighborSampler", "neighbors [2, 2]", "cpu")


def test_without_patch_pyg_decides():
    pyg_accel.unpatch()
    sampler = NeighborSampler(random_data(), [2])
    with pytest.raises(ImportError, match="pyg-lib"):
        sampler._sample(torch.arange(4))
    with pytest.raises(ImportError, match="pyg-lib"):
        NeighborSampler(random_data(), [2], weight_attr="weight")


BAD_SEEDS = {
    "too large": torch.tensor([1, N]),
    "negative": torch.tensor([-1]),
    "bool": torch.tensor([True, False]),
    "float": torch.tensor([1.0]),
}


@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"time_attr": "time"}])
@pytest.mark.parametrize("case", BAD_SEEDS)
def test_seeds_that_are_no_nodes_raise(case: str, options: dict[str, Any]):
    with pytest.raises(ValueError, match="'seed'"):
        NeighborSampler(random_data(), [2], **options)._sample(BAD_SEEDS[case])


def test_seeds_of_two_dimensions_are_taken_in_order():
    sampler = NeighborSampler(random_data(), [-1])
    out = sampler._sample(torch.tensor([[3, 1], [2, 3]]))
    flat = sampler._sample(torch.tensor([3, 1, 2, 3]))
    assert out.node[:4].tolist() == [3, 1, 2, 3]
    for name in ("node", "row", "col", "edge"):
        assert torch.equal(getattr(out, name), getattr(flat, name))
    assert out.num_sampled_nodes == flat.num_sampled_nodes


@pytest.mark.parametrize("disjoint", [False, True])
def test_nodes_beyond_num_nodes_are_reached_by_the_last_hop(disjoint: bool):
    far = torch.tensor([[7, 2**40, 1, 2], [0, 0, 1, 1]])
    data = Data(edge_index=far, num_nodes=3)
    sampler = NeighborSampler(data, [-1], disjoint=disjoint)
    out = sampler._sample(torch.tensor([0, 1]))
    assert out.node.tolist() == [0, 1, 7, 2**40, 2]
    assert out.node[out.row].tolist() == far[0].tolist()
    with pytest.raises(ValueError, match="edge_index"):
        NeighborSampler(data, [-1, -1], disjoint=disjoint)._sample(torch.tensor([0]))
    data.edge_index[0, 0] = -1
    with pytest.raises(ValueError, match="edge_index"):
        NeighborSampler(data, [-1], disjoint=disjoint)._sample(torch.tensor([0]))


def test_bad_arguments_are_named():
    seeds = torch.arange(4)

    def refused(match: str, data: Data | None = None, times: Tensor | None = None, **options: Any):
        sampler = NeighborSampler(data or random_data(), **{"num_neighbors": [2, 2]} | options)
        with pytest.raises(ValueError, match=match):
            sampler._sample(seeds, times)

    refused("seed_time", time_attr="when")
    refused("seed_time", time_attr="time", times=torch.arange(3))
    refused("seed_time", time_attr="time", times=torch.rand(4))
    refused("temporal_strategy", time_attr="time", temporal_strategy="first")
    data = random_data()
    data.weight = data.weight.long()
    refused("weight_attr", data, weight_attr="weight")
    data.weight = -torch.rand(E)
    refused("weights", data, weight_attr="weight")
    data.weight = torch.full((E,), float("nan"))
    refused("weights", data, weight_attr="weight")
    data.time = data.time.double()
    refused("time_attr", data, time_attr="time")
    refused("num_neighbors", num_neighbors={("a", "to", "b"): [2]})
    for count in ([2, 2.5], ["2"], 2, [None]):
        refused("num_neighbors", num_neighbors=count)


def test_a_graph_that_is_none_raises():
    data = random_data()
    sampler = NeighborSampler(data, [3, 3])
    seeds = torch.arange(20)
    sampler.row[:] = N + 5
    with pytest.raises(ValueError, match="edge_index"):
        sampler._sample(seeds)
    sampler = NeighborSampler(data, [3, 3])
    sampler.colptr[5:] = 10 * E
    with pytest.raises(ValueError, match="colptr"):
        sampler._sample(seeds)
    sampler.colptr = sampler.colptr[:3]
    with pytest.raises(ValueError, match="colptr"):
        sampler._sample(seeds)
    unsorted = star(3, time=torch.tensor([0, 3, 2, 1]))
    sampler = NeighborSampler(unsorted, [2], time_attr="time", is_sorted=True)
    with pytest.raises(ValueError, match="sorted by time"):
        sampler._sample(torch.tensor([0]), torch.tensor([9]))


def test_unknown_types_raise():
    data = typed_data()
    with pytest.raises(ValueError, match="'seed'"):
        NeighborSampler(data, [2])._sample({"z": torch.arange(2)})
    with pytest.raises(ValueError, match="num_neighbors"):
        NeighborSampler(data, {("a", "of", "b"): [2]})._sample({"a": torch.arange(2)})
    uneven = {kind: [2] for kind in data.edge_types} | {("a", "to", "b"): [2, 2]}
    with pytest.raises(ValueError, match="hops"):
        NeighborSampler(data, uneven)._sample({"a": torch.arange(2)})
