"""Neighbours through the sides of cells, against all images by brute force."""

import itertools

import pytest
import torch
from torch import Tensor

from pyg_accel.pyg_lib.periodic import radius_graph


def by_force(x: Tensor, r: float, cell: Tensor, pbc: tuple[bool, ...], *, loop: bool) -> set:
    """All edges with their offsets, of images up to 4 cells away."""
    ranges = [range(-4, 5) if along else range(1) for along in pbc]
    actual = set()
    for shift in itertools.product(*ranges):
        moved = x + torch.tensor(shift, dtype=x.dtype) @ cell
        distance = torch.cdist(x, moved)  # [target, source]
        for target, source in (distance < r).nonzero().tolist():
            if loop or source != target or any(shift):
                actual.add((source, target, *shift))
    return actual


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("pbc", [(True, True, True), (True, False, True), (False, False, False)])
@pytest.mark.parametrize("r", [0.4, 1.7])
def test_edges_are_those_of_all_images(r: float, pbc: tuple[bool, ...], loop: bool):
    torch.manual_seed(3)
    cell = torch.eye(3, dtype=torch.float64) + 0.3 * torch.rand(3, 3, dtype=torch.float64)
    x = torch.randn(7, 3, dtype=torch.float64)  # also outside of the cell
    edges, offset = radius_graph(x, r, loop=loop, max_num_neighbors=10**4, cell=cell, pbc=pbc)
    wanted = by_force(x, r, cell, pbc, loop=loop)
    # Points lie up to 3 cells outside, so that an image may be further away than 4.
    got = {tuple(row) for row in torch.cat([edges.t(), offset], 1).tolist()}
    assert {row for row in got if max(map(abs, row[2:])) <= 4} == wanted
    vector = x[edges[0]] + offset.double() @ cell - x[edges[1]]
    assert (vector.norm(dim=1) < r).all()
    assert (edges[1].diff() >= 0).all()


def test_examples_have_cells_of_their_own_and_share_no_edges():
    torch.manual_seed(0)
    x, batch = torch.rand(9, 3), torch.tensor([0] * 4 + [1] * 5)
    cells = torch.stack([torch.eye(3), 2 * torch.eye(3)])
    edges, offset = radius_graph(x, 0.8, batch, cell=cells, max_num_neighbors=500)
    for b, rows in enumerate((slice(0, 4), slice(4, 9))):
        alone = radius_graph(x[rows], 0.8, cell=cells[b], max_num_neighbors=500)
        mine = batch[edges[1]] == b
        assert torch.equal(edges[:, mine] - rows.start, alone[0])
        assert torch.equal(offset[mine], alone[1])


def test_the_nearest_neighbours_remain_and_rows_follow_the_flow():
    x = torch.tensor([[0.0, 0, 0], [0.4, 0, 0]])
    args = {"cell": torch.eye(3), "max_num_neighbors": 2}
    edges, offset = radius_graph(x, 0.95, **args)
    assert edges.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert offset[:, 0].tolist() == [0, -1, 0, 1]
    turned, _ = radius_graph(x, 0.95, flow="target_to_source", **args)
    assert torch.equal(turned, edges.flip(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": torch.zeros(3, 3)}, "'cell' to have a volume"),
        ({"cell": torch.eye(2)}, "'cell'"),
        ({"pbc": (True, False)}, "'pbc'"),
        ({"batch": torch.tensor([1, 0])}, "'batch' to ascend"),
        ({"batch": torch.tensor([0])}, "'batch' to be 2 integers"),
        ({"batch": torch.tensor([-1, 0])}, "'batch' from 0"),
        ({"batch": torch.tensor([0, 1]), "batch_size": 1}, "'batch' from 0"),
        ({"r": float("nan")}, "'r' to be finite"),
        ({"max_num_neighbors": -1}, "'max_num_neighbors'"),
        ({"x": torch.rand(2, 2)}, "'x'"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, message: str):
    args = {"x": torch.rand(2, 3), "r": 0.5, "cell": torch.eye(3)} | change
    with pytest.raises(ValueError, match=message):
        radius_graph(**args)


def test_no_points_have_no_edges():
    edges, offset = radius_graph(torch.empty(0, 3), 1.0, cell=torch.eye(3))
    assert edges.shape == (2, 0)
    assert offset.shape == (0, 3)
