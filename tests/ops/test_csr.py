"""The CSR form as an operator: right, cached, and what its fake promises."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pyg_accel import ops
from pyg_accel.ops.csr import CompiledGraph
from pyg_accel.testing import zoo

CASES = [case for case in zoo(hub=500) if case.edge_index.size(1) > 0]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_arrays_give_back_the_edges(case, target):
    sizes = (case.num_sources, case.num_targets)
    args = (case.edge_index, sizes[target], sizes[1 - target], target)
    operators = torch.ops.pyg_accel
    for rows, run in ((target, operators.coo_to_csr), (1 - target, operators.coo_to_csc)):
        rowptr, col, eid = run(*args)
        row = torch.arange(rowptr.numel() - 1).repeat_interleave(rowptr.diff())
        assert torch.equal(case.edge_index[rows].index_select(0, eid), row)
        assert torch.equal(case.edge_index[1 - rows].index_select(0, eid), col.long())


def test_the_graph_is_built_once_for_both_directions_and_cannot_be_changed(stored_graphs):
    edges, before = torch.randint(0, 9, (2, 30)), stored_graphs()
    first = torch.ops.pyg_accel.coo_to_csr(edges, 9, 9, 1)
    expected = [t.clone() for t in first]
    torch.ops.pyg_accel.coo_to_csc(edges, 9, 9, 1)
    for t in first:
        t.zero_()
    again = torch.ops.pyg_accel.coo_to_csr(edges, 9, 9, 1)
    assert stored_graphs() == before + 1
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_ids_beyond_the_sizes_are_refused():
    with pytest.raises(IndexError, match="outside of"):
        torch.ops.pyg_accel.coo_to_csr(torch.tensor([[0], [7]]), 3, 3, 1)


def test_a_graph_and_its_products_can_be_traced_with_symbolic_sizes():
    """As torch.compile does it where it does not say that it compiles (torch 2.11)."""

    def aggregate(edge_index, x):
        return ops.spmm(CompiledGraph(edge_index, x.size(0), x.size(0), 1), x)

    traced = make_fx(aggregate, tracing_mode="symbolic")(
        torch.randint(9, (2, 30)), torch.ones(9, 4)
    )
    edge_index, x = torch.randint(20, (2, 99)), torch.randn(20, 4)
    torch.testing.assert_close(traced(edge_index, x), aggregate(edge_index, x))
