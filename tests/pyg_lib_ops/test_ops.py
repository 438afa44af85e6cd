"""Reductions, products, splines, clusters and samplers of pyg-lib's interface."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from pyg_accel import pyg_lib
from pyg_accel.pyg_lib import sampler
from pyg_accel.runtime.native import cpu_unavailable_reasons

ops = pyg_lib.ops
INDEX = torch.tensor([0, 0, 2, 2, 2, 4])
PTR = torch.tensor([0, 2, 2, 5, 5, 6])
native = pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="there is no native library")


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 3, dtype=dtype)


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
def test_rows_are_reduced_by_index_and_by_pointers(reduce: str):
    src = rows()
    wanted = torch.stack([
        torch.zeros(3, dtype=src.dtype) if begin == end else
        getattr(torch, f"a{reduce}" if reduce in ("min", "max") else reduce)(src[begin:end], 0)
        for begin, end in pairwise(PTR)
    ])  # fmt: skip
    for actual in (
        ops.scatter(src, INDEX, 0, reduce=reduce),
        ops.scatter(src.t(), INDEX, -1, reduce=reduce).t(),
        ops.segment_coo(src, INDEX, reduce=reduce),
        ops.segment_csr(src, PTR, reduce=reduce),
    ):
        torch.testing.assert_close(actual, wanted)
    assert gradcheck(lambda t: ops.scatter(t, INDEX, 0, reduce=reduce), rows().requires_grad_())


def test_winners_are_the_first_of_equal_rows_and_the_number_of_rows_where_there_is_none():
    src = torch.tensor([1.0, 1, 5, 2, 5, 0])
    assert ops.scatter_max(src, INDEX)[1].tolist() == [0, 6, 2, 6, 5]
    assert ops.segment_min_csr(src, PTR)[1].tolist() == [0, 6, 3, 6, 5]


def test_a_result_that_is_passed_is_reduced_into():
    src, out = rows(), torch.ones(5, 3, dtype=torch.float64)
    assert ops.scatter_sum(src, INDEX, 0, out) is out
    torch.testing.assert_close(out, ops.scatter_sum(src, INDEX, 0) + 1)
    least = torch.full((5, 3), -9.0, dtype=torch.float64)
    assert (ops.scatter_min(src, INDEX, 0, least)[0] == -9).all()


def test_products_have_no_gradient_of_zeros():
    src = torch.tensor([2.0, 0, 3, 4, 5, 6], requires_grad=True)
    ops.scatter_mul(src, INDEX).sum().backward()
    assert src.grad is not None
    assert src.grad.tolist() == [0, 0, 20, 15, 12, 1]


def test_softmax_log_softmax_and_logsumexp_agree():
    src = rows()
    softmax = ops.scatter_softmax(src, INDEX, 0)
    torch.testing.assert_close(ops.softmax_csr(src, PTR), softmax)
    torch.testing.assert_close(ops.softmax_csr(src.t(), PTR, 1), softmax.t())
    torch.testing.assert_close(ops.scatter_log_softmax(src, INDEX, 0), softmax.log())
    total = ops.scatter_logsumexp(src, INDEX, 0)
    torch.testing.assert_close((src - total[INDEX]).exp(), softmax)
    assert (total[1] == 0).all()
    spread = ops.scatter_std(src, INDEX, 0)
    torch.testing.assert_close(spread[2], src[2:5].std(0))


def test_gathers_undo_segments():
    src = rows()[:5]
    assert torch.equal(ops.gather_coo(src, INDEX), src[INDEX])
    assert torch.equal(ops.gather_csr(src, PTR), src[INDEX])


@pytest.mark.parametrize("bias", [False, True])
def test_segments_and_groups_are_multiplied(bias: bool):
    x, weight = rows(torch.float32), torch.randn(5, 3, 4)
    b = torch.randn(5, 4) if bias else None
    wanted = torch.stack([row @ weight[i] + (0 if b is None else b[i])
                          for row, i in zip(x, INDEX, strict=True)])  # fmt: skip
    torch.testing.assert_close(ops.segment_matmul(x, PTR, weight, b), wanted)
    parts = list(x.split(PTR.diff().tolist()))
    actual = ops.grouped_matmul(parts, list(weight), None if b is None else list(b))
    torch.testing.assert_close(torch.cat(actual), wanted)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_splines_add_up_to_one_and_have_gradients(degree: int):
    torch.manual_seed(0)
    pseudo = torch.rand(6, 2, dtype=torch.float64)
    size, opened = torch.tensor([4, 5]), torch.tensor([1, 0], dtype=torch.uint8)
    basis, index = ops.spline_basis(pseudo, size, opened, degree)
    torch.testing.assert_close(basis.sum(1), torch.ones(6, dtype=torch.float64))
    weight = torch.randn(20, 3, 2, dtype=torch.float64)
    mixed = torch.einsum("es,esio->eio", basis, weight[index])
    wanted = torch.einsum("ei,eio->eo", rows(), mixed)
    torch.testing.assert_close(ops.spline_weighting(rows(), weight, basis, index), wanted)
    args = [t.clone().requires_grad_() for t in (rows(), weight, pseudo)]
    assert gradcheck(
        lambda x, w, p: ops.spline_weighting(x, w, ops.spline_basis(p, size, opened, degree)[0],
                                             index), args,
    )  # fmt: skip
    with pytest.raises(ValueError, match="'degree'"):
        ops.spline_basis(pseudo, size, opened, 4)


def ring(size: int) -> tuple[Tensor, Tensor]:
    """A ring with both directions, and one node without edges."""
    nodes = torch.arange(size)
    col = torch.stack([(nodes - 1) % size, (nodes + 1) % size], 1).view(-1)
    return torch.cat([torch.arange(size + 1) * 2, torch.tensor([2 * size])]), col


def matched(rowptr: Tensor, col: Tensor, weight: Tensor, order: Tensor) -> list[int]:
    """Graclus, node by node: with the heaviest edge to a free neighbour, the last of several."""
    cluster = [-1] * order.numel()
    for u in order.tolist():
        edges = range(int(rowptr[u]), int(rowptr[u + 1]))
        free = [e for e in edges if cluster[col[e]] < 0 and col[e] != u]
        if cluster[u] < 0:
            v = int(col[max(free, key=lambda e: (float(weight[e]), e))]) if free else u
            cluster[u] = cluster[v] = min(u, v)
    return cluster


@native
@pytest.mark.parametrize("weighted", [False, True])
def test_matched_nodes_are_neighbours(weighted: bool):
    rowptr, col = ring(10)
    weight = torch.rand(20).half() if weighted else None
    torch.manual_seed(4)
    actual = ops.graclus_cluster(rowptr, col, weight)
    torch.manual_seed(4)
    first = -torch.arange(20)  # without weights
    order = torch.randperm(11)
    assert actual.tolist() == matched(rowptr, col, first if weight is None else weight, order)
    assert actual.bincount(minlength=11).max() == 2


@native
def test_ids_that_do_not_exist_are_refused():
    rowptr = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"^expected 'col'"):
        ops.graclus_cluster(rowptr, torch.tensor([7, 7]))
    with pytest.raises(ValueError, match=r"^expected 'seed' and 'col'"):
        sampler.random_walk(rowptr, torch.tensor([1, 7]), torch.tensor([0]), 5)
    with pytest.raises(ValueError, match="'seed'"):
        sampler.random_walk(rowptr, torch.tensor([1, 0]), torch.tensor([2]), 5)
    with pytest.raises(ValueError, match="'p'"):
        sampler.random_walk(rowptr, torch.tensor([1, 0]), torch.tensor([1]), 5, p=0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.softmax_csr(x, torch.tensor([0, 9])), "'ptr' to ascend from 0 to 4"),
        (lambda x: ops.softmax_csr(x, torch.tensor([0, 3, 1, 4])), "'ptr'"),
        (lambda x: ops.grid_cluster(x, torch.zeros(2)), "'size' to be positive"),
        (lambda x: ops.grid_cluster(x / 0, torch.ones(2)), "'pos' to hold finite"),
        (lambda x: ops.fps(x / 0, torch.tensor([0, 4])), "'src' to hold finite"),
        (lambda x: ops.fps(x.to(torch.complex64), torch.tensor([0, 4])), "'src' to hold real"),
        (lambda x: ops.knn(x.to(torch.complex64), x.to(torch.complex64)), "'x' to hold real"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call: Callable[[Tensor], Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(4, 2))


@pytest.mark.parametrize("walk", [pytest.param(sampler.random_walk, marks=native), sampler.walk])
def test_walks_follow_edges_with_the_likelihoods_of_node2vec(walk):
    # 0 and 1 are neighbours, and both of 2; only 2 leads to 3, and nothing leads on.
    rowptr, col = torch.tensor([0, 2, 4, 7, 7]), torch.tensor([1, 2, 0, 2, 0, 1, 3])
    torch.manual_seed(0)
    p, q = 4.0, 0.5
    actual = walk(rowptr, col, torch.zeros(40000, dtype=torch.int64), 2, p, q)
    at_two = actual[actual[:, 1] == 2, 2]
    share = at_two.bincount(minlength=4) / at_two.numel()
    weight = torch.tensor([1 / p, 1.0, 0.0, 1 / q])  # back, to a neighbour of 0, and away
    torch.testing.assert_close(share, weight / weight.sum(), atol=0.01, rtol=0)
    assert (actual[:, 0] == 0).all()
    alone = walk(rowptr, col, torch.tensor([3]), 3, 1.0, 1.0)
    assert alone.tolist() == [[3, 3, 3, 3]]


def test_a_subgraph_has_the_edges_between_its_nodes():
    rowptr, col = ring(6)
    ptr, inner, edge = sampler.subgraph(rowptr, col, torch.tensor([2, 1, 6]))
    assert ptr.tolist() == [0, 1, 2, 2]
    assert inner.tolist() == [1, 0]
    assert col[edge].tolist() == [1, 2]


def test_parts_have_about_the_same_size_and_few_edges_between_them():
    rowptr, col = ring(60)
    part = pyg_lib.partition.metis(rowptr, col, 4)
    assert part.bincount(minlength=4).max() <= 20
    row = torch.repeat_interleave(rowptr.diff())
    assert int((part[row] != part[col]).sum()) < 60
    assert pyg_lib.partition.metis(rowptr, col, 1).max() == 0


@native
@pytest.mark.parametrize("csc", [False, True])
def test_neighbours_are_sampled_in_both_directions(csc: bool):
    rowptr, col = torch.tensor([0, 2, 2, 2]), torch.tensor([1, 2])
    row, column, node, edge, nodes, edges = sampler.neighbor_sample(
        rowptr, col, torch.tensor([0]), [-1], csc=csc
    )
    assert node.tolist() == [0, 1, 2]
    assert ((column, row) if csc else (row, column))[0].tolist() == [0, 0]
    assert edge is not None
    assert (edge.tolist(), nodes, edges) == ([0, 1], [1, 2], [2])


@native
@pytest.mark.parametrize("csc", [False, True])
def test_neighbours_of_types_are_sampled_in_both_directions(csc: bool):
    kind = ("b", "to", "a") if csc else ("a", "to", "b")
    row, column, node, edge, nodes, edges = sampler.hetero_neighbor_sample(
        {kind: torch.tensor([0, 2])}, {kind: torch.tensor([3, 1])}, {"a": torch.tensor([0])},
        {kind: [2]}, csc=csc, disjoint=True,
    )  # fmt: skip
    assert node["b"].tolist() == [[0, 3], [0, 1]]
    assert ((column, row) if csc else (row, column))[0][kind].tolist() == [0, 0]
    assert edge[kind].tolist() == [0, 1]
    assert (nodes, edges) == ({"a": [1, 0], "b": [0, 2]}, {kind: [2]})
