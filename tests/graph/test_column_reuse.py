"""What rows of a graph share, held against its definition; no GPU needed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_accel import Graph
from pyg_accel.graph import CSR
from pyg_accel.graph.column_reuse import (
    HEIGHTS,
    LEAST,
    Shared,
    _measured_kind,
    per_column,
    reuse_of,
)
from pyg_accel.graph.facts import facts_of
from pyg_accel.testing import zoo

CASES = {case.name: case for case in zoo(hub=600)}


def graph_of(name: str) -> Graph:
    case = CASES[name]
    return Graph.from_edge_index(case.edge_index, (case.num_sources, case.num_targets))


def by_definition(csr: CSR) -> Iterator[Shared]:
    row = torch.repeat_interleave(torch.arange(csr.num_rows), csr.rowptr.diff().long())
    for height in HEIGHTS:
        pairs: Tensor = torch.stack([row // height, csr.col.long()])
        _, each = pairs.unique(dim=1, return_counts=True)
        for least in LEAST:
            much = each[each >= least]
            yield Shared(height, least, int(much.sum()) / row.numel(), much.numel() / row.numel())


@pytest.mark.parametrize("name", ["one-edge", "directed", "empty-rows", "bipartite", "duplicates"])
def test_what_rows_share_is_told_as_it_is_defined(name):
    csr = graph_of(name).csr()
    for actual, right in zip(reuse_of(csr), by_definition(csr), strict=True):
        assert actual == pytest.approx(right, abs=6e-4)


def test_entries_a_column_are_told_by_height():
    actual = per_column(reuse_of(graph_of("directed").csr()))
    assert len(actual) == len(HEIGHTS)
    assert 1 <= actual[0] < actual[1] < actual[2]
    assert per_column(()) == ()
    many = Graph.from_edge_index(torch.zeros(2, 5000, dtype=torch.long))  # copies of one edge
    assert per_column(reuse_of(many.csr())) == (1000.0,) * 3


@pytest.mark.parametrize("name", ["no-edges", "empty"])
def test_a_graph_without_edges_shares_nothing(name):
    for shared in reuse_of(graph_of(name).csr()):
        assert shared[2:] == ((1.0, 1.0) if shared.least == 1 else (0.0, 0.0))


def test_windows_that_happen_to_have_no_edges_share_nothing():
    edges = torch.tensor([[0, 1], [64 * 3, 64 * 3 + 1]])  # not among the windows that are sampled
    graph = Graph.from_edge_index(edges, (64 * 10_000, 64 * 10_000))
    assert reuse_of(graph.csr())[1] == Shared(16, 2, 0.0, 0.0)


def test_an_estimate_from_some_windows_is_close():
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(64 * 700) // 64 * 64
    within = torch.randint(64, (block.numel() * 8,), generator=generator)
    source = block.repeat_interleave(8) + within
    target = torch.arange(block.numel()).repeat_interleave(8)
    csr = Graph.from_edge_index(torch.stack([source, target])).csr()
    for actual, right in zip(reuse_of(csr), by_definition(csr), strict=True):
        assert actual == pytest.approx(right, rel=0.05)


def test_what_rows_share_is_told_of_graphs_that_are_used_again_and_again():
    csr = graph_of("directed").csr()

    def sharing_on_a_gpu() -> tuple[Shared, ...]:
        facts_of(csr).uses += 1
        return _measured_kind(csr).sharing

    assert [sharing_on_a_gpu() for _ in range(44)] == [()] * 40 + [reuse_of(csr)] * 4
    torch.use_deterministic_algorithms(True)
    try:
        assert sharing_on_a_gpu() == ()
    finally:
        torch.use_deterministic_algorithms(False)
