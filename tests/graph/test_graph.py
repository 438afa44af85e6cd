"""Graph: CSR from edge lists and back, the transpose, and the cache."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_accel import Graph
from pyg_accel.graph import csr as csr_module
from pyg_accel.testing import zoo


@pytest.fixture(params=["native", "torch"])
def builder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build with the native library, or as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(csr_module, "library_of", lambda device: None)
    return request.param


def check_against_naive(graph: Graph, row: Tensor, col: Tensor) -> None:
    """Rows ascend, columns ascend inside, duplicates keep their order, and perm leads back."""
    order = sorted(range(row.numel()), key=lambda k: (int(row[k]), int(col[k])))
    assert graph.col.tolist() == [int(col[k]) for k in order]
    assert (list(range(len(order))) if graph.perm is None else graph.perm.tolist()) == order
    counts = torch.bincount(row.long(), minlength=graph.num_rows)
    assert graph.degree.tolist() == counts.tolist()
    assert graph.rowptr.tolist() == [0, *counts.cumsum(0).tolist()]


def check_transpose(graph: Graph, row: Tensor, col: Tensor) -> None:
    for edge_order in (False, True):
        turned = graph.transposed(edge_order=edge_order)
        assert turned.num_rows == graph.num_cols
        assert turned.num_cols == graph.num_rows
        counts = turned.rowptr[1:] - turned.rowptr[:-1]
        rows = torch.arange(turned.num_rows).repeat_interleave(counts.long())
        eid = turned.eid.long()
        edges = eid if edge_order or graph.perm is None else graph.perm.long()[eid]
        assert sorted(edges.tolist()) == list(range(row.numel()))
        assert torch.equal(col[edges].long(), rows)
        assert torch.equal(row[edges].long(), turned.col.long())
        assert turned.sorted
        ahead = turned.col[1:] >= turned.col[:-1]
        assert bool((ahead | (rows[1:] != rows[:-1])).all())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("case", zoo(hub=300), ids=lambda case: case.name)
def test_every_graph_of_the_zoo_is_sorted_right(case, flow, index_dtype, builder):
    edges = case.edge_index.to(index_dtype)
    size = (case.num_sources, case.num_targets)
    graph = Graph.from_edge_index(edges, size, flow)
    source, target = edges
    if flow == "source_to_target":
        row, col = target, source
        assert (graph.num_cols, graph.num_rows) == size
    else:
        row, col = source, target
        assert (graph.num_rows, graph.num_cols) == size
    assert graph.num_edges == edges.size(1)
    check_against_naive(graph, row, col)
    check_transpose(graph, row, col)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_any_edge_list_is_sorted_right(pairs):
    edges = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    graph = Graph.from_edge_index(edges, (7, 5))
    check_against_naive(graph, edges[1], edges[0])
    check_transpose(graph, edges[1], edges[0])


def test_it_equals_scipy():
    edges = torch.randint(0, 50, (2, 400)).unique(dim=1)
    edges = edges[:, torch.randperm(edges.size(1))]
    graph = Graph.from_edge_index(edges, (50, 50))
    right = scipy.sparse.csr_matrix(
        (np.arange(edges.size(1)), (edges[1].numpy(), edges[0].numpy())), shape=(50, 50)
    )
    right.sort_indices()
    assert graph.rowptr.tolist() == right.indptr.tolist()
    assert graph.col.tolist() == right.indices.tolist()
    assert graph.perm.tolist() == right.data.tolist()


@pytest.mark.parametrize("by", ["target", "source"])
def test_edge_lists_that_are_sorted_already_stay_right(by, builder):
    edges = torch.randint(0, 9, (2, 60))
    first, second = (1, 0) if by == "target" else (0, 1)
    edges = edges[:, torch.argsort(edges[first] * 9 + edges[second], stable=True)]
    graph = Graph.from_edge_index(edges, (9, 9))
    check_against_naive(graph, edges[1], edges[0])
    check_transpose(graph, edges[1], edges[0])


def test_without_a_size_the_largest_id_decides(builder):
    graph = Graph.from_edge_index(torch.tensor([[0, 6], [2, 1]]))
    assert (graph.num_rows, graph.num_cols) == (7, 7)
    graph = Graph.from_edge_index(torch.tensor([[0, 6], [2, 1]]), (None, 3))
    assert (graph.num_rows, graph.num_cols) == (3, 7)
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long))
    assert (graph.num_rows, graph.num_cols, graph.num_edges) == (0, 0, 0)


def test_indices_are_32_bit_where_they_fit(builder):
    graph = Graph.from_edge_index(torch.randint(0, 9, (2, 60)))
    assert {graph.rowptr.dtype, graph.col.dtype, graph.perm.dtype} == {torch.int32}
    assert graph.transposed().col.dtype == torch.int32


BAD_EDGES = {
    "a-list": (
        lambda: Graph.from_edge_index([[0], [1]]),
        ValueError,
        "'edge_index' to be a tensor",
    ),
    "one-row": (
        lambda: Graph.from_edge_index(torch.zeros(5).long()),
        ValueError,
        r"shape \[2, E\]",
    ),
    "three-rows": (
        lambda: Graph.from_edge_index(torch.zeros(3, 5).long()),
        ValueError,
        r"\[3, 5\]",
    ),
    "floats": (lambda: Graph.from_edge_index(torch.zeros(2, 5)), ValueError, "int32 or int64"),
    "flow": (
        lambda: Graph.from_edge_index(torch.zeros(2, 5).long(), None, "up"),
        ValueError,
        "'up'",
    ),
    "size": (
        lambda: Graph.from_edge_index(torch.zeros(2, 5).long(), (1, -1)),
        ValueError,
        "'size'",
    ),
    "three-sizes": (
        lambda: Graph.from_edge_index(torch.zeros(2, 5).long(), (1, 1, 1)),
        ValueError,
        "'size'",
    ),
    "target": (
        lambda: Graph.from_edge_index(torch.tensor([[0], [3]]), (3, 3)),
        IndexError,
        "target ids",
    ),
    "source": (
        lambda: Graph.from_edge_index(torch.tensor([[3], [0]]), (3, 3)),
        IndexError,
        "source ids",
    ),
    "negative": (
        lambda: Graph.from_edge_index(torch.tensor([[0], [-1]]), (3, 3)),
        IndexError,
        "target ids",
    ),
}


@pytest.mark.parametrize("case", BAD_EDGES)
def test_malformed_edge_lists_are_refused_by_name(case, builder):
    call, error, message = BAD_EDGES[case]
    with pytest.raises(error, match=message):
        call()


def test_from_csr_takes_the_arrays_as_they_are():
    for dtype in (torch.int32, torch.int64):
        rowptr, col = torch.tensor([0, 2, 2, 3], dtype=dtype), torch.tensor([0, 4, 1], dtype=dtype)
        graph = Graph.from_csr(rowptr, col)
        assert graph.rowptr.data_ptr() == rowptr.data_ptr()
        assert (graph.num_rows, graph.num_cols, graph.num_edges) == (3, 5, 3)
        assert graph.perm is None
        assert graph.sorted
        assert graph.col.dtype == graph.transposed().col.dtype == dtype
        check_transpose(graph, torch.tensor([0, 0, 2]), col)


@pytest.mark.parametrize(
    ("rowptr", "col", "expected"),
    [
        ([0, 2, 4], [0, 1, 0, 1], True),
        ([0, 2, 4], [1, 0, 0, 1], False),
        ([0, 2, 4], [5, 5, 0, 0], True),
        ([0, 0, 0], [], True),
        ([0, 1, 2, 3], [2, 1, 0], True),
        ([0, 3, 3], [0, 2, 1], False),
    ],
)
def test_from_csr_sees_whether_columns_ascend(rowptr, col, expected):
    graph = Graph.from_csr(torch.tensor(rowptr), torch.tensor(col, dtype=torch.long), num_cols=6)
    assert graph.sorted is expected


LONG = {"dtype": torch.long}
BAD_CSR = {
    "a-list": (([0, 1], torch.zeros(1, **LONG)), "'rowptr' to be a one-dimensional tensor"),
    "two-dimensions": ((torch.zeros(2, 2, **LONG), torch.zeros(1, **LONG)), "'rowptr' to be a one"),
    "floats": ((torch.tensor([0, 1]), torch.zeros(1)), "'col' to be int32 or int64"),
    "mixed": ((torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32)), "share their dtype"),
    "empty": ((torch.empty(0, **LONG), torch.empty(0, **LONG)), "run from 0"),
    "start": ((torch.tensor([1, 1]), torch.zeros(1, **LONG)), "run from 0"),
    "end": ((torch.tensor([0, 2]), torch.zeros(1, **LONG)), "run from 0"),
    "falls": ((torch.tensor([0, 2, 1, 2]), torch.zeros(2, **LONG)), "'rowptr' to ascend"),
    "negative": ((torch.tensor([0, 1]), torch.tensor([-1])), r"'col' within \[0, 1\)"),
}


@pytest.mark.parametrize("case", BAD_CSR)
def test_arrays_that_are_no_csr_matrix_are_refused_by_name(case):
    arrays, message = BAD_CSR[case]
    with pytest.raises(ValueError, match=message):
        Graph.from_csr(*arrays)


def test_a_column_beyond_num_cols_is_refused():
    with pytest.raises(ValueError, match=r"within \[0, 2\) \(got 2 to 2\)"):
        Graph.from_csr(torch.tensor([0, 1]), torch.tensor([2]), num_cols=2)


def test_the_repr_tells_the_size():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), (3, 2))
    assert repr(graph) == "Graph(num_rows=2, num_cols=3, num_edges=1, torch.int32, device=cpu)"


def test_a_graph_of_edges_is_built_when_something_asks_for_it():
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    graph = Graph.of_edges(edges, 1, 3, 4)
    assert (graph.num_rows, graph.num_cols, graph.num_edges, graph.built) == (3, 4, 4, False)
    assert graph.degree.tolist() == [1, 2, 1]
    assert not graph.built
    assert graph.edge_list().edge_index is edges
    assert graph.edge_list()[1:] == (1, 3, 4, None)
    same = Graph.from_edge_index(edges, (4, 3))
    assert graph.rowptr.tolist() == same.rowptr.tolist()
    assert graph.built
    assert graph.edge_list() is None
    assert torch.equal(graph.transposed(edge_order=True).eid, same.transposed(edge_order=True).eid)


def test_an_edge_list_that_was_released_is_read_as_long_as_its_memory_lives():
    edges = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    part = edges[:, :3]
    graph, gone = Graph.of_edges(part, 1, 3, 3), Graph.of_edges(edges.clone(), 1, 3, 3)
    for released in (graph, gone):
        released.release_edges()
    del part
    assert graph.edge_list() is None
    assert graph.rowptr.tolist() == [0, 1, 3, 3]
    with pytest.raises(RuntimeError, match="was freed"):
        gone.rowptr  # noqa: B018


def test_an_edge_list_must_not_change_before_it_is_read():
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = Graph.of_edges(edges, 1, 2, 2)
    edges += 0
    with pytest.raises(RuntimeError, match="changed in place"):
        graph.csr()
