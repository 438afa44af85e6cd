"""What PyG's distributed samplers ask of ``torch.ops.pyg``: parts give what one sampler gives."""

import pytest
import torch
from torch import Tensor

from pyg_accel.pyg_lib import sampler
from pyg_accel.pyg_lib.distributed import (
    dist_neighbor_sample,
    hetero_relabel_neighborhood,
    merge_sampler_outputs,
    relabel_neighborhood,
)
from pyg_accel.runtime.native import cpu_unavailable_reasons

native = pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="there is no native library")


def graph(size: int = 12) -> tuple[Tensor, Tensor]:
    """A random graph without duplicates, whose last node has no edges."""
    torch.manual_seed(0)
    row, col = (torch.rand(size - 1, size) < 0.3).nonzero().unbind(1)
    return torch.searchsorted(row, torch.arange(size + 1)), col


@native
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("csc", [False, True])
def test_two_parts_sample_what_one_sampler_does(disjoint: bool, csc: bool):
    rowptr, col = graph()
    seed = torch.tensor([7, 2, 11, 4])
    row, column, node, edge, *_ = sampler.neighbor_sample(
        rowptr, col, seed, [-1, -1], csc=csc, disjoint=disjoint
    )
    source, batch = seed, torch.arange(4)
    nodes, batches, edges, counts = [], [], [], []
    seen = {*zip(batch.tolist(), seed.tolist(), strict=True)} if disjoint else {*seed.tolist()}
    for _ in range(2):
        part = source % 2
        order = torch.where(part == 0, (part == 0).cumsum(0), (part == 1).cumsum(0)) - 1
        actual = [dist_neighbor_sample(rowptr, col, source[part == p], -1) for p in range(2)]
        merged, ids, of, numbers = merge_sampler_outputs(
            [f[0] for f in actual], [f[1] for f in actual], [f[2] for f in actual], part.tolist(),
            order.tolist(), 2, -1, batch, disjoint,
        )  # fmt: skip
        nodes.append(merged)
        edges.append(ids)
        counts += numbers
        batches.append(merged if of is None else of)
        keys = [*zip(batches[-1].tolist(), merged.tolist(), strict=True)]
        new = [i for i, (b, n) in enumerate(keys)
               if ((b, n) if disjoint else n) not in seen
               and not seen.add((b, n) if disjoint else n)]  # fmt: skip
        source, batch = merged[new], batches[-1][new]
    assert torch.equal(torch.cat(edges), edge)
    relabelled = relabel_neighborhood(
        seed, torch.cat(nodes), counts, 12, torch.cat(batches), csc, disjoint
    )
    assert torch.equal(torch.stack(relabelled), torch.stack([row, column]))
    assert len(seen) == node.size(0)


@native
def test_seeds_come_one_by_one_and_their_times_count():
    rowptr, col, time = torch.tensor([0, 2, 4]), torch.tensor([5, 3, 3, 5]), torch.arange(6)
    node, edge, ends = dist_neighbor_sample(rowptr, col, torch.tensor([1, 0, 1]), -1)
    assert node.tolist() == [1, 0, 1, 3, 5, 5, 3, 3, 5]
    assert (edge.tolist(), ends) == ([2, 3, 0, 1, 2, 3], [3, 5, 7, 9])
    node, edge, ends = dist_neighbor_sample(
        rowptr, col, torch.tensor([1, 0]), -1, time, seed_time=torch.tensor([4, 2]), disjoint=True
    )
    assert node.tolist() == [[0, 1], [1, 0], [0, 3]]
    assert (edge.tolist(), ends) == ([2], [2, 3, 3])
    _, edge, ends = dist_neighbor_sample(rowptr, col, torch.tensor([4, 1]), -1)  # 4 is elsewhere
    assert (edge.tolist(), ends) == ([2, 3], [2, 2, 4])
    with pytest.raises(ValueError, match="'directed'"):
        dist_neighbor_sample(rowptr, col, torch.tensor([1]), -1, directed=False)


@native
@pytest.mark.parametrize("disjoint", [False, True])
def test_types_are_numbered_hop_by_hop(disjoint: bool):
    # a -> b -> a, two hops from two nodes of a: the nodes of b, then those of a that they lead to.
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    rowptr = {kinds[0]: torch.tensor([0, 2, 4]), kinds[1]: torch.tensor([0, 1, 2, 4])}
    col = {kinds[0]: torch.tensor([0, 2, 2, 1]), kinds[1]: torch.tensor([1, 0, 0, 1])}
    seed = torch.tensor([1, 0])
    row, column, *_ = sampler.hetero_neighbor_sample(
        rowptr, col, {"a": seed}, {kind: [-1, -1] for kind in kinds}, disjoint=disjoint
    )
    nodes = {"b": torch.tensor([2, 1, 0, 2]), "a": torch.tensor([0, 1, 0, 1])}
    batch = {"b": torch.tensor([0, 0, 1, 1]), "a": torch.tensor([0, 0, 0, 1])}
    counts = {"a__to__b": [[2, 2], []], "b__to__a": [[], [2, 1, 1]]}
    if disjoint:
        nodes["a"], batch["a"] = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
        counts["b__to__a"] = [[], [2, 1, 1, 2]]
    rows, cols = hetero_relabel_neighborhood(
        ["a", "b"], kinds, {"a": seed}, nodes, counts, {"a": 2, "b": 3}, batch, disjoint=disjoint
    )
    for kind in kinds:
        assert torch.equal(rows["__".join(kind)], row[kind])
        assert torch.equal(cols["__".join(kind)], column[kind])
    turned = [(target, name, source) for source, name, target in kinds]
    names = {"__".join(new): counts["__".join(old)] for new, old in zip(turned, kinds, strict=True)}
    flipped = hetero_relabel_neighborhood(
        ["a", "b"], turned, {"a": seed}, nodes, names, {"a": 2, "b": 3}, batch, True, disjoint
    )
    assert torch.equal(flipped[0]["b__to__a"], cols["a__to__b"])
