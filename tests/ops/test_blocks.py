"""A graph in blocks of target rows, and functions that run on one block after the other."""

import pytest
import torch
from torch import Tensor

from pyg_accel import ops
from pyg_accel.graph import Graph
from pyg_accel.ops import blocked
from pyg_accel.ops.blocked import in_blocks
from pyg_accel.ops.blocks import Block, blocks_of, edges_of_a_block, padded_degrees

N, M, E = 50, 33, 400


def graph(kind: str) -> tuple[Graph, Tensor]:
    edges = torch.stack([torch.randint(0, M, (E,)), torch.randint(0, N - 5, (E,))])
    if kind == "hub":
        edges[1, :150] = 7
    elif kind == "no-edges":
        edges = edges[:, :0]
    elif kind == "nothing":
        return Graph.from_edge_index(edges[:, :0], (0, 0)), edges[:, :0]
    return Graph.from_edge_index(edges, (M, N)), edges


@pytest.mark.parametrize("by_degree", [False, True])
@pytest.mark.parametrize("most", [1, 40, 10_000])
@pytest.mark.parametrize("kind", ["plain", "hub", "no-edges", "nothing"])
def test_every_row_and_edge_is_in_one_block(kind, most, by_degree):
    whole, edges = graph(kind)
    blocks = blocks_of(whole, most, by_degree=by_degree)
    assert blocks and blocks is blocks_of(whole, most, by_degree=by_degree)
    assert torch.equal(torch.cat([b.rows for b in blocks]).sort()[0], torch.arange(whole.num_rows))
    assert torch.equal(torch.cat([b.edges for b in blocks]).sort()[0],
                       torch.arange(edges.size(1)))  # fmt: skip
    for block in blocks:
        own = block.graph
        own.__init__(own.rowptr, own.col, None, own.num_cols, sorted=own.sorted)  # is valid
        assert own.num_rows <= 1 or own.num_edges <= most or own.num_edges == 0
        rows = block.rows.repeat_interleave(own.degree.long())
        assert torch.equal(edges[1][block.edges], rows)
        assert torch.equal(edges[0][block.edges], block.sources[own.col.long()])
        if by_degree and own.num_rows:
            assert int(own.degree.max()) <= block.degree
            assert int(own.degree.min()) * 3 >= block.degree * 2


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 5, 7, 9, 100, 10_001])
def test_degrees_are_rounded_up_by_less_than_a_half(degree):
    (padded,) = padded_degrees(torch.tensor([degree]), fewest=10**9).tolist()
    assert degree <= padded <= degree * 3 / 2
    assert padded_degrees(torch.tensor([degree])).tolist() == [degree]


def test_a_block_has_as_many_edges_as_fill_a_cache():
    few, many = (edges_of_a_block(size, torch.device("cpu")) for size in (4000, 4))
    assert 1024 <= few < many and few & (few - 1) == 0


@pytest.mark.one_of(2)
@pytest.mark.parametrize("of_edges", [False, True])
@pytest.mark.parametrize("kind", ["plain", "hub", "no-edges"])
def test_gradients_of_all_kinds_of_tensors_are_those_of_one_pass(kind, of_edges, monkeypatch):
    monkeypatch.setattr(blocked, "edges_of_a_block", lambda most, _: most)
    whole, edges = graph(kind)
    tensors = [torch.randn(n, 3, dtype=torch.double, requires_grad=True)
               for n in (M, N, edges.size(1), 3)]  # fmt: skip

    def function(block: Block, inputs: list[Tensor]) -> list[Tensor]:
        u, v, e, w = inputs
        made = ops.gspmm(block.graph, "mul(add(u0,v1),e2)", [u, v, e], reduce="none") @ w
        return [made.tanh() if of_edges else ops.gspmm(block.graph, "e0", [made], reduce="max")]

    def run(most: int) -> Tensor:
        rows = edges.size(1) if of_edges else N
        return in_blocks(whole, most, function, tensors, "uvew", rows, of_edges=of_edges)[0]

    assert len(blocks_of(whole, 30)) > 1
    out, expected = run(30), run(10_000)
    torch.testing.assert_close(out, expected)
    actual = torch.autograd.grad(out.sin().sum(), tensors)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.sin().sum(), tensors))
    assert torch.autograd.gradcheck(lambda *_: run(30), tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *_: run(30), tensors, fast_mode=True)
